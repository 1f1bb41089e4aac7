"""Number formats: storage size and the error a correct implementation may show. Nothing else defines either."""

from dataclasses import dataclass
from fractions import Fraction

from pmlkit.errors import PmlkitError, nearest


@dataclass(frozen=True)
class Precision:
    """A storage format.

    key: name used in cases, records and peaks. element: element type (of a plain format: its torch name).
    block: values that share one scale, or None. scale: type of the block scale. tensor_scale: type of a further scale per
    row or tensor. element_bits, scale_bits: sizes. tolerance: largest accepted ‖difference‖/‖reference‖ of a loss value or
    a gradient against float64 on the same rounded inputs, for a subject that may do all its arithmetic in this format.
    loss_scale: what a loss is multiplied by before its backward pass, as one trains in a format of few exponents.
    """

    key: str
    element: str
    element_bits: int
    tolerance: float
    block: int | None = None
    scale: str | None = None
    scale_bits: int = 0
    tensor_scale: str | None = None
    loss_scale: float = 1.0

    @property
    def bits(self) -> Fraction:
        """Bits per value, block scales included (a tensor scale costs nothing per value)."""
        return Fraction(self.element_bits) + (Fraction(self.scale_bits, self.block) if self.block else 0)

    def nbytes(self, values: int) -> Fraction:
        """Bytes that `values` values take, block scales included."""
        return values * self.bits / 8


# Tolerances of the plain formats. fp32: PML 2.9.0 reaches 5e-7 on random data and 2e-5 on tight NT-Xent clusters.
# bf16: its all-bfloat16 arithmetic reaches 1.1e-2 (contrastive) and 1.3e-2 (ProxyAnchor). fp16: 5e-2 (NT-Xent).
# Block formats: the format's own rounding on normal data is 3.7e-2 (mxfp8); products on equal operands are held tighter.
PRECISIONS = {
    p.key: p
    for p in (
        Precision("fp64", "float64", 64, 1e-12),
        Precision("fp32", "float32", 32, 1e-5),
        Precision("fp16", "float16", 16, 6e-2, loss_scale=1024.0),
        Precision("bf16", "bfloat16", 16, 2e-2),
        Precision("mxfp8", "e4m3", 8, 6e-2, block=32, scale="e8m0", scale_bits=8),
        Precision("nvfp4", "e2m1", 4, 2.5e-1, block=16, scale="e4m3", scale_bits=8, tensor_scale="float32"),
    )
}


def precision(key: str) -> Precision:
    """Return the format called `key`. Raises PmlkitError for an unknown one."""
    if key not in PRECISIONS:
        raise PmlkitError(f"unknown precision {key!r}: {nearest(key, list(PRECISIONS))}")
    return PRECISIONS[key]
