"""Elementary functions of the fused losses' kernels, as a processor has them: to a unit or two in the last place."""

import os

import triton
import triton.language as tl

# Instructions that the interpreter does not know; the rest of Triton's own ex2, sqrt and rsqrt is for denormal numbers.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def power(x):
    """Return 2^x to 2 units in the last place, 0 below 2^-126."""
    if _INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def square_root(x):
    """Return the square root of numbers from 0, to 1 unit in the last place."""
    if _INTERPRETED:
        return tl.sqrt(x)
    else:
        return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def inverse_root(x):
    """Return 1 / the square root of positive numbers, to 2 units in the last place."""
    if _INTERPRETED:
        return tl.rsqrt(x)
    else:
        return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def inverse(x):
    """Return 1 / x to 1 unit in the last place; 0 of infinity."""
    if _INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def power_of_two(inv):
    """Return the power of two at or below inv (2^-126 at least), 1 for a row of NaN or Inf."""
    bits = tl.maximum(inv.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000)
    return tl.where(inv == inv, bits.to(tl.float32, bitcast=True), 1.0)
