"""Sizes of number formats."""

from fractions import Fraction

import pytest

from pmlkit.errors import PmlkitError
from pmlkit.precision import PRECISIONS, precision


def test_bits_include_block_scales() -> None:
    """mxfp8 is 8 bits and one byte per 32; nvfp4 4 bits and one byte per 16; plain formats have no scale."""
    assert precision("mxfp8").bits == Fraction(33, 4)
    assert precision("nvfp4").bits == Fraction(9, 2)
    assert [precision(key).bits for key in ("fp64", "fp32", "fp16", "bf16")] == [64, 32, 16, 16]


def test_bytes_of_values() -> None:
    """32 mxfp8 values take 33 bytes, 16 nvfp4 values 9."""
    assert precision("mxfp8").nbytes(32) == 33
    assert precision("nvfp4").nbytes(16) == 9


def test_tolerances_grow_as_formats_shrink() -> None:
    """A coarser plain format never has a tighter tolerance."""
    assert precision("fp64").tolerance < precision("fp32").tolerance < precision("bf16").tolerance
    assert all(0 < p.tolerance < 1 for p in PRECISIONS.values())


def test_unknown_precision() -> None:
    """An unknown format names the nearest one."""
    with pytest.raises(PmlkitError, match="mxfp8"):
        precision("mxfp9")
