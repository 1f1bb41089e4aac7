"""The expert layer of one rank with prepared weights, for inference: no gradients. Nothing waits for the device."""

from typing import Any

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.moe import mega, staged
from pmlkit.moe.config import ExpertsConfig
from pmlkit.moe.experts import check_routes
from pmlkit.moe.formats import Folded
from pmlkit.moe.operators import rows_of_block
from pmlkit.moe.prepare import Prepared, restored
from pmlkit.moe.routing import STATUS_WORDS, route
from pmlkit.moe.swiglu import SwiGLU

_PLAIN = ExpertsConfig()  # made here, since `torch.compile` does not follow the making of one

_LIBRARY = torch.library.Library("pmlkit", "FRAGMENT")
_LIBRARY.define(
    "prepared_experts(Tensor x, Tensor ids, Tensor scores, Tensor[] weights, str format, int[] sizes, float limit, float alpha,"
    " int capacity, bool promote, str pipeline) -> (Tensor, Tensor)"
)


def prepared_experts(
    x: Tensor, expert_ids: Tensor, scores: Tensor, weights: Prepared, config: ExpertsConfig | None = None,
    *, return_status: bool = False,
) -> Any:  # fmt: skip
    """Return the output [T, D] in bfloat16 of a layer whose weights `prepare_weights` made; else as `routed_experts`.

    x: [T, D] bfloat16 on the weights' device, quantised to their format on the way. Of `config`, format and type
    of gradients do not matter. Raises PmlkitError for shapes or types that do not fit, and for an `x` that wants a gradient.
    """
    config = config or _PLAIN
    check_routes("prepared_experts", x, expert_ids, scores)
    experts, width, _ = weights.sizes
    if x.shape[1] != width or x.dtype != torch.bfloat16:
        raise PmlkitError(f"prepared_experts: weights are for bfloat16 x [T, {width}]; got {x.dtype} {tuple(x.shape)}")
    devices = {str(tensor.device) for tensor in (x, expert_ids, scores, weights.storage[0])}
    if len(devices) > 1:
        raise PmlkitError(f"prepared_experts: tensors on {', '.join(sorted(devices))}: move all to one device")
    if torch.is_grad_enabled() and (x.requires_grad or scores.requires_grad):
        raise PmlkitError(
            f"prepared_experts of {experts} {weights.format} experts has no gradients: use torch.no_grad(), or routed_experts"
        )
    if config.pipeline == "mega" and weights.format != "mxfp8":
        raise PmlkitError(f"prepared_experts: {weights.format} has no mega pipeline: use 'staged'")
    out, status = torch.ops.pmlkit.prepared_experts.default(
        x.contiguous(), expert_ids.contiguous(), scores.float().contiguous(), weights.storage, weights.format,
        list(weights.sizes), *config.numbers, config.promote, config.pipeline,
    )  # fmt: skip
    return (out, status) if return_status else out


def _forward(x, ids, scores, weights, format, sizes, limit, alpha, capacity, promote, pipeline):
    experts = sizes[0]
    tile = rows_of_block(ids.numel(), experts)
    routing = route(ids, experts, tile=tile, capacity=None if capacity < 0 else capacity)
    if not ids.numel():
        return torch.zeros_like(x), routing.status
    prepared = restored(format, weights, tuple(sizes))
    activation = SwiGLU(limit or None, alpha)
    if pipeline == "mega" and isinstance(prepared.w13, Folded) and isinstance(prepared.w2, Folded):
        return mega.forward(x, scores, prepared.w13, prepared.w2, routing, activation, promote), routing.status
    return staged.forward(x, scores, prepared, routing, activation, promote), routing.status


def _fake(x, ids, scores, weights, format, sizes, limit, alpha, capacity, promote, pipeline):
    return torch.empty_like(x), ids.new_empty(STATUS_WORDS, dtype=torch.int32)


_LIBRARY.impl("prepared_experts", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("pmlkit::prepared_experts", _fake, lib=_LIBRARY)
