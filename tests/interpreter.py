"""Mends Triton's interpreter (3.6, 3.7): bfloat16, whose bits it multiplies as integers, and maxima, which keep NaN there."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Make products of bfloat16 tiles products of their values, round to the nearest even, and drop NaN as a GPU does."""
    builder: Any = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle
    cast = builder.cast_impl

    def wide(tile: Any) -> np.ndarray:
        bits = tile.data
        return (bits.astype(np.uint32) << 16).view(np.float32) if tile.dtype.scalar == tl.bfloat16 else bits

    def create_dot(self: Any, a: Any, b: Any, total: Any, input_precision: Any, most_imprecise: Any) -> Any:
        product = np.matmul(wide(a), wide(b), dtype=total.data.dtype)
        return handle(product + total.data, total.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if (before, after) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return handle(rounded.view(torch.int16).numpy().view(np.uint16).reshape(source.data.shape), after)
        if (before, after) == (tl.bfloat16, tl.float32):
            return handle(wide(source), after)
        return cast(self, source, target)

    def maximum(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmax)

    def minimum(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmin)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_maxnumf, builder.create_minnumf = maximum, minimum
