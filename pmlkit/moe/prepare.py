"""Expert weights in a block-scaled format, quantised once and laid out for the kernels that read them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError, nearest
from pmlkit.moe.decoded import by_chunk
from pmlkit.moe.formats import MXFP8_BLOCK, NVFP4, Folded, largest
from pmlkit.moe.quantise import quantise_folded, quantise_nvfp4

Format = Literal["mxfp8", "nvfp4"]
MATH = {"mxfp8": "folded-fp8", "nvfp4": "decode-bf16"}  # how products of a format are computed


@dataclass(frozen=True, eq=False)
class Prepared:
    """Weights for inference. w13: [E, 2F, D], gate rows first. w2: [E, D, F].

    mxfp8: scales folded into values, one a row left. nvfp4: scales by chunk (`decoded.by_chunk`), one maximum an expert, so
    that gate and up share it.
    """

    format: Format
    w13: Folded | NVFP4
    w2: Folded | NVFP4
    sizes: tuple[int, int, int]  # experts, columns of a token, columns between the projections

    @property
    def storage(self) -> list[Tensor]:
        """The tensors that hold the weights, for whoever moves or frees them."""
        return [getattr(weights, name) for weights in (self.w13, self.w2) for name in weights.__dataclass_fields__]


def prepare_weights(w13: Tensor, w2: Tensor, format: Format = "mxfp8", *, out: Prepared | None = None) -> Prepared:
    """Quantise w13 [E, 2F, D] and w2 [E, D, F], of any float type, along D and F.

    out: prepared weights of the same format and sizes to refill in place; they are returned.
    Raises PmlkitError for another format, and for sizes that 32 does not divide or that `out` does not have.
    """
    if format not in MATH:
        raise PmlkitError(f"prepare_weights: no format {format!r}: {nearest(format, list(MATH))}")
    if w13.ndim != 3 or w2.ndim != 3 or w13.shape != (w2.shape[0], 2 * w2.shape[2], w2.shape[1]):
        raise PmlkitError(f"prepare_weights: need w13 [E, 2F, D] and w2 [E, D, F]; got {tuple(w13.shape)}, {tuple(w2.shape)}")
    if any(size % MXFP8_BLOCK for size in w2.shape[1:]):
        raise PmlkitError(f"prepare_weights: {MXFP8_BLOCK} must divide D and F of w2 {tuple(w2.shape)}: pad with zeros")
    sizes = w2.shape[0], w2.shape[1], w2.shape[2]
    if out is not None and (out.format, out.sizes) != (format, sizes):
        raise PmlkitError(f"prepare_weights: out holds {out.format} E, D, F = {out.sizes}, not {format} {sizes}")
    quantise = _folded if format == "mxfp8" else _nvfp4
    made = Prepared(format, quantise(w13), quantise(w2), sizes)
    if out is None:
        return made
    for kept, new in zip(out.storage, made.storage, strict=True):
        kept.copy_(new)
    return out


def restored(format: Format, storage: list[Tensor], sizes: tuple[int, int, int]) -> Prepared:
    """Return prepared weights from their `storage`."""
    kind = Folded if format == "mxfp8" else NVFP4
    return Prepared(format, kind(*storage[:3]), kind(*storage[3:]), sizes)


def _folded(weights: Tensor) -> Folded:
    experts, rows, width = weights.shape
    flat = quantise_folded(weights.contiguous().view(experts * rows, width))
    return Folded(flat.values.view(weights.shape), flat.scale.view(experts, rows), flat.lost)


def _nvfp4(weights: Tensor) -> NVFP4:
    experts, rows, width = weights.shape
    amax = torch.cat([largest(of_one.reshape(1, -1)) for of_one in weights])  # one at a time: its float32 copy is large
    flat = quantise_nvfp4(weights.contiguous().view(experts * rows, width), amax_R=amax.repeat_interleave(rows))
    scales = by_chunk(flat.scales.view(experts, rows, width // 16))
    return NVFP4(flat.values.view(experts, rows, width // 2), scales, amax)
