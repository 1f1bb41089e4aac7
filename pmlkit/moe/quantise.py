"""Kernels that write the formats of `formats.py`, bit by bit: one program a row, which it reads once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.moe.formats import LEAST_AMAX, LEAST_SCALE, MXFP8, MXFP8_BLOCK, NVFP4, NVFP4_BLOCK, Folded
from pmlkit.moe.launch import launch
from pmlkit.moe.routing import Routing

_INFINITY = tl.constexpr(0x7F800000)  # bits of float32; magnitudes from here on are Inf or NaN
_WHOLE = tl.constexpr(448.0 * 6.0)
_LEAST_AMAX, _LEAST_SCALE = tl.constexpr(LEAST_AMAX), tl.constexpr(LEAST_SCALE)


def quantise_mxfp8(x_RD: Tensor, routing: Routing | None = None) -> MXFP8:
    """Return rows [R, D], or those of `routing`, in mxfp8 along D. Raises PmlkitError for a D that 32 does not divide."""
    rows, values, scales = _made(x_RD, routing, MXFP8_BLOCK)
    codes = scales.new_empty(rows, x_RD.shape[1] // MXFP8_BLOCK)
    _start(_mxfp8_kernel, x_RD, routing, rows, values, codes, codes, codes, fold=False)
    return MXFP8(values, codes)


def quantise_folded(x_RD: Tensor, routing: Routing | None = None, lost: Tensor | None = None) -> Folded:
    """Return rows [R, D], or those of `routing`, in mxfp8 along D with its block scales folded into the values.

    lost: int32 [1] to add the number of values that lost digits to. Raises PmlkitError for a D that 32 does not divide.
    """
    rows, values, _ = _made(x_RD, routing, MXFP8_BLOCK)
    scale = torch.empty(rows, dtype=torch.float32, device=x_RD.device)
    lost = torch.zeros(1, dtype=torch.int32, device=x_RD.device) if lost is None else lost
    _start(_mxfp8_kernel, x_RD, routing, rows, values, values, scale, lost, fold=True)
    return Folded(values, scale, lost)


def quantise_nvfp4(x_RD: Tensor, routing: Routing | None = None, amax_R: Tensor | None = None) -> NVFP4:
    """Return rows [R, D], or those of `routing`, in nvfp4 along D; amax_R: float32 maxima [R] that stand for the rows' own.

    Raises PmlkitError for a D that 16 does not divide.
    """
    rows, _, scales = _made(x_RD, routing, NVFP4_BLOCK)
    values = scales.new_empty(rows, x_RD.shape[1] // 2)
    scales = scales.new_empty(rows, x_RD.shape[1] // NVFP4_BLOCK).view(torch.float8_e4m3fn)
    given = amax_R is not None
    amax_R = amax_R if amax_R is not None else torch.empty(rows, dtype=torch.float32, device=x_RD.device)
    width = x_RD.shape[1]
    table, count = _table(x_RD, routing)
    blocks = triton.next_power_of_2(-(-width // NVFP4_BLOCK))
    launch(
        _nvfp4_kernel, (rows,), x_RD, table, count, values, scales.view(torch.uint8), amax_R, width,
        routing is not None, given, blocks, num_warps=8 if blocks > 64 else 4,
    )  # fmt: skip
    return NVFP4(values, scales, amax_R)


def _made(x_RD: Tensor, routing: Routing | None, block: int) -> tuple[int, Tensor, Tensor]:
    if x_RD.shape[1] % block:
        raise PmlkitError(f"cannot cut rows of {x_RD.shape[1]} numbers into blocks of {block}: pad them with zeros first")
    rows = len(x_RD) if routing is None else len(routing.source_R)
    values = torch.empty(rows, x_RD.shape[1], dtype=torch.float8_e4m3fn, device=x_RD.device)
    return rows, values, torch.empty(0, dtype=torch.uint8, device=x_RD.device)


def _table(x_RD: Tensor, routing: Routing | None) -> tuple[Tensor, Tensor]:
    """Return the token of each row and where their number is; anything where rows are read as they lie."""
    return (x_RD, x_RD) if routing is None else (routing.source_R, routing.offsets_E1[-1:])


def _start(kernel: object, x_RD: Tensor, routing: Routing | None, rows: int, values: Tensor, *out: Tensor, fold: bool) -> None:
    table, count = _table(x_RD, routing)
    width = x_RD.shape[1]
    blocks = triton.next_power_of_2(-(-width // MXFP8_BLOCK))
    launch(
        kernel, (rows,), x_RD, table, count, values, *out, width, routing is not None, fold, blocks,
        num_warps=8 if blocks > 32 else 4,
    )  # fmt: skip


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x|, which order as the magnitudes do, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power(exponent):
    """Return 2^exponent for -127 <= exponent <= 127, exactly."""
    return tl.where(exponent > -127, (exponent + 127) << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_codes(bits):
    """Return the scale codes of blocks whose largest magnitude has these bits."""
    codes = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 0)
    return tl.where(bits >= _INFINITY, 255, codes)


@triton.jit
def to_e4m3(x, bad):
    """Return E4M3 numbers nearest to x, ties to even, or NaN where bad."""
    values = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(bad, 0x7F, values.to(tl.int32)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def folded_blocks(x, codes, top):
    """Return blocks [B, 32] with these scale codes in E4M3, folded to the scale `top`, and how many values lost digits."""
    bad, known = (codes == 255)[:, None], tl.where(codes == 255, 0, codes)
    values = to_e4m3(x * power(tl.maximum(127 - codes, -126))[:, None], bad)
    exact = values.to(tl.float32) * power(tl.maximum(known - top, -126))[:, None]
    values = to_e4m3(exact, bad)
    return values, tl.sum(tl.sum(((values.to(tl.float32) != exact) & (bad == 0)).to(tl.int32), 1), 0)


@triton.jit
def _load_row(x_ptr, table_ptr, count_ptr, row, at, D, GATHER: tl.constexpr):
    if GATHER:
        there = row < tl.load(count_ptr)
        source = tl.load(table_ptr + row, mask=there, other=0).to(tl.int64)
        return tl.load(x_ptr + source * D + at, mask=(at < D) & there, other=0.0).to(tl.float32)
    else:
        return tl.load(x_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)


@triton.jit
def _mxfp8_kernel(
    x_ptr, table_ptr, count_ptr, values_ptr, codes_ptr, scale_ptr, lost_ptr, D,
    GATHER: tl.constexpr, FOLD: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = _load_row(x_ptr, table_ptr, count_ptr, row, at, D, GATHER)
    codes = e8m0_codes(tl.max(magnitude_bits(x), 1))
    if FOLD:
        top = tl.max(tl.where(codes == 255, 0, codes), 0)
        values, lost = folded_blocks(x, codes, top)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(scale_ptr + row, power(top - 127))
        tl.atomic_add(lost_ptr, lost, mask=lost > 0, sem="relaxed")
    else:
        values = to_e4m3(x * power(tl.maximum(127 - codes, -126))[:, None], (codes == 255)[:, None])
        tl.store(codes_ptr + row * (D // 32) + block, codes.to(tl.uint8), mask=block < D // 32)
    tl.store(values_ptr + row * D + at, values, mask=at < D)


@triton.jit
def e2m1_codes(x):
    """Return E2M1 numbers nearest to x as integers, ties to even, saturated at 6."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def nvfp4_parts(x, amax, GIVEN: tl.constexpr):
    """Return a row of blocks [B, 16] in nvfp4: E2M1 codes, E4M3 scales, which blocks are not finite, and its maximum."""
    bits = magnitude_bits(x)
    largest = tl.max(bits, 1)
    if not GIVEN:
        finite = tl.max(tl.max(tl.where(bits < _INFINITY, bits, 0), 1), 0)
        amax = tl.maximum(finite.to(tl.float32, bitcast=True), _LEAST_AMAX)
    whole = tl.div_rn(_WHOLE, amax)
    bad = largest >= _INFINITY
    wanted = tl.where(bad, 0, largest).to(tl.float32, bitcast=True) * whole
    scale = tl.minimum(tl.maximum(tl.div_rn(wanted, 6.0), _LEAST_SCALE), 448.0).to(tl.float8e4nv)
    divisor = tl.broadcast_to(scale.to(tl.float32)[:, None], [x.shape[0], 16])
    scaled = tl.where(bad[:, None], 0.0, tl.div_rn(x * whole, divisor))
    return e2m1_codes(scaled), scale, bad, amax


@triton.jit
def _nvfp4_kernel(
    x_ptr, table_ptr, count_ptr, values_ptr, scales_ptr, amax_ptr, D,
    GATHER: tl.constexpr, GIVEN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = _load_row(x_ptr, table_ptr, count_ptr, row, at, D, GATHER)
    given = tl.load(amax_ptr + row) if GIVEN else 0.0
    codes, scale, bad, amax = nvfp4_parts(x, given, GIVEN)  # pyright: ignore[reportGeneralTypeIssues]
    if not GIVEN:
        tl.store(amax_ptr + row, amax)
    low, high = tl.split(codes.reshape(BLOCKS, 8, 2))
    place = values_ptr + row * (D // 2) + block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(place, (low | high << 4).to(tl.uint8), mask=(block < D // 16)[:, None])
    code = tl.where(bad, 0x7F, scale.to(tl.uint8, bitcast=True).to(tl.int32))
    tl.store(scales_ptr + row * (D // 16) + block, code.to(tl.uint8), mask=block < D // 16)
