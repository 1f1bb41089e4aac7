"""The expert layer as torch's own grouped products make it, with compiled glue around them: what a user would write today.

bf16: `torch.nn.functional.grouped_mm`, differentiable. mxfp8's rival: `torch._scaled_grouped_mm` of E4M3 with one scale a row,
coarser than one a block: that is what Hopper's library product takes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pmlkit.bench.layer import LayerInputs, bound_layer
from pmlkit.case import Case
from pmlkit.losses.bind import Bound

_LARGEST = 448.0  # of E4M3
_COARSER = 2.0  # times the exact format's error: one scale a row was measured at 1.4


def bind_grouped(case: Case, inputs: LayerInputs) -> Bound:
    """Return the bf16 layer of `torch.nn.functional.grouped_mm`. Raises NotImplementedError for another format."""
    if case.precision != "bf16":
        raise NotImplementedError(f"torch.nn.functional.grouped_mm computes bf16, not {case.precision}")
    first, second = inputs.w13.transpose(1, 2), inputs.w2.transpose(1, 2)

    def layer() -> Tensor:
        order, ends = _compiled(_order)(inputs.ids, inputs.w13.shape[0])
        rows = _compiled(_gather)(inputs.x, order, inputs.ids.shape[1])
        h1 = torch.nn.functional.grouped_mm(rows, first, offs=ends)
        h2 = _compiled(_swiglu)(h1)
        out = torch.nn.functional.grouped_mm(h2, second, offs=ends)
        return _compiled(_combine)(out, order, inputs.scores)

    return bound_layer(layer, inputs)


def bind_scaled(case: Case, inputs: LayerInputs, fast: bool = True) -> Bound:
    """Return the row-scaled E4M3 layer of `torch._scaled_grouped_mm`, weights quantised beforehand.

    fast: sums as the tensor core makes them, of about 14 digits. Raises NotImplementedError for training and other formats.
    """
    if case.precision != "mxfp8" or case.mode == "training":
        raise NotImplementedError(f"torch._scaled_grouped_mm stands beside mxfp8 inference, not {case.precision} {case.mode}")
    w13, scale13 = _quantised(inputs.w13)
    w2, scale2 = _quantised(inputs.w2)

    def product(rows: Tensor, scale: Tensor, weights: Tensor, of_weights: Tensor, ends: Tensor) -> Tensor:
        return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
            rows, weights.transpose(1, 2), scale, of_weights, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def layer() -> Tensor:
        order, ends = _compiled(_order)(inputs.ids, len(w13))
        rows, scale = _compiled(_gather_quantised)(inputs.x, order, inputs.ids.shape[1])
        h2, scale_h2 = _compiled(_swiglu_quantised)(product(rows, scale, w13, scale13, ends))
        return _compiled(_combine)(product(h2, scale_h2, w2, scale2, ends), order, inputs.scores)

    return bound_layer(layer, inputs, slack=_COARSER)


def bind_scaled_slow(case: Case, inputs: LayerInputs) -> Bound:
    """Return the same with float32 sums."""
    return bind_scaled(case, inputs, fast=False)


def _order(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return routes sorted by expert, and where each expert's end, int32."""
    flat = ids.flatten()
    counts = (flat[:, None] == torch.arange(experts, device=ids.device)).sum(0)
    return flat.argsort(stable=True), counts.cumsum(0).int()


def _gather(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    return x[order // top_k]


def _swiglu(h1: Tensor) -> Tensor:
    gate, up = h1.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def _combine(rows: Tensor, order: Tensor, scores: Tensor) -> Tensor:
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (rows[place].view(*scores.shape, -1).float() * scores[:, :, None]).sum(1).bfloat16()


def _quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 values with a scale for each row of the last dimension."""
    values = values.detach()
    scale = values.abs().amax(-1).float().clamp(min=1e-12) / _LARGEST
    made = torch.empty_like(values, dtype=torch.float8_e4m3fn)
    for place in range(len(values)):  # float32 copies of one expert at a time
        made[place] = (values[place].float() / scale[place][..., None]).to(torch.float8_e4m3fn)
    return made, scale


def _rows_quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(1).clamp(min=1e-12) / _LARGEST
    return (rows / scale[:, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale


def _gather_quantised(x: Tensor, order: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    values, scale = _rows_quantised(x.float())
    return values.view(torch.int8)[order // top_k].view(torch.float8_e4m3fn), scale[order // top_k]


def _swiglu_quantised(h1: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = h1.float().chunk(2, dim=1)
    return _rows_quantised(torch.nn.functional.silu(gate) * up)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled on a GPU; on a processor, which only checks numbers, as it is."""
    return torch.compile(function) if torch.cuda.is_available() else function
