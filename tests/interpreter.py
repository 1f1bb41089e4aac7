"""Mends Triton's interpreter (3.6, 3.7), where it differs from a GPU.

bfloat16 and E4M3, whose bits it multiplies as integers, one by one or in products of tiles; rounding to them: of E4M3 it
rounds ties up, drops carries and cuts subnormal numbers; maxima, which keep NaN there.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Make products of tiles products of their values, round to the nearest even, and drop NaN as a GPU does."""
    builder: Any = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle
    cast, fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def wide(tile: Any) -> np.ndarray:
        bits = tile.data
        if tile.dtype.scalar == tl.float8e4nv:
            return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.float8_e4m3fn).float().numpy().reshape(bits.shape)
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

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if (before, after) == (tl.float32, tl.float8e4nv):
            inside = torch.from_numpy(np.clip(source.data, -448, 448))  # a GPU saturates, and keeps NaN
            return handle(inside.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), after)
        if (before, after) == (tl.float8e4nv, tl.float32):
            return handle(wide(source), after)
        return fp_to_fp(self, source, target, rounding)

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return self.binary_op(a, b, np.multiply)
        return cast_impl(self, handle(wide(a) * wide(b), tl.float32), tl.bfloat16)

    def maximum(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmax)

    def minimum(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmin)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    builder.create_fmul = create_fmul
    builder.create_maxnumf, builder.create_minnumf = maximum, minimum
