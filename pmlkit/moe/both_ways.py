"""Expert weights in mxfp8 for training: one scale a tile of 32 x 32, folded along rows for forward, along columns for backward.

Both copies hold the same quantised numbers, up to digits that folding takes. Hopper's fp8 product wants the contraction along
memory, so that the second copy is transposed: 2 bytes a parameter in all.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.moe.formats import MXFP8_BLOCK, NAN_SCALE, Folded
from pmlkit.moe.launch import launch
from pmlkit.moe.quantise import e8m0_codes, magnitude_bits, power, to_e4m3

_SIDE = 64  # rows and columns of weights that a program takes


@dataclass(frozen=True, eq=False)
class BothWays:
    """Weights [E, N, C]: rows are values [E, N, C] with scale [E, N], columns are values [E, C, N] with scale [E, C]."""

    rows: Folded
    columns: Folded

    @property
    def storage(self) -> list[Tensor]:
        """The six tensors, rows first."""
        return [getattr(way, name) for way in (self.rows, self.columns) for name in way.__dataclass_fields__]


def both_ways(weights: Tensor) -> BothWays:
    """Quantise weights [E, N, C] of any float type. Raises PmlkitError for N or C that 32 does not divide."""
    experts, N, C = weights.shape
    if N % MXFP8_BLOCK or C % MXFP8_BLOCK:
        raise PmlkitError(f"cannot cut weights {tuple(weights.shape)} into tiles of {MXFP8_BLOCK}: pad them with zeros")
    weights = weights.contiguous()
    codes = torch.empty(experts, N // MXFP8_BLOCK, C // MXFP8_BLOCK, dtype=torch.uint8, device=weights.device)
    grid = (-(-N // _SIDE), -(-C // _SIDE), experts)
    launch(_codes_kernel, grid, weights, codes, N, C, _SIDE, num_warps=4)
    known = torch.where(codes == NAN_SCALE, 0, codes)
    tops = known.amax(2), known.amax(1)
    made = [
        torch.empty(sizes, dtype=torch.float8_e4m3fn, device=weights.device) for sizes in ((experts, N, C), (experts, C, N))
    ]
    lost = [torch.zeros(1, dtype=torch.int32, device=weights.device) for _ in range(2)]
    launch(_both_kernel, grid, weights, codes, *tops, *made, *lost, N, C, _SIDE, num_warps=4)
    scales = [top.int().repeat_interleave(MXFP8_BLOCK, 1) for top in tops]
    folded = [
        Folded(values, torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale - 127), lost[way])
        for way, (values, scale) in enumerate(zip(made, scales, strict=True))
    ]
    return BothWays(*folded)


@triton.jit
def _load(w_ptr, expert, n, c, N, C):
    place = (expert.to(tl.int64) * N + n[:, None]) * C + c[None, :]
    return tl.load(w_ptr + place, mask=(n < N)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _codes_kernel(w_ptr, codes_ptr, N, C, SIDE: tl.constexpr):
    expert = tl.program_id(2)
    TILES: tl.constexpr = SIDE // 32
    n, c = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    bits = magnitude_bits(_load(w_ptr, expert, n, c, N, C)).reshape(TILES, 32, TILES, 32)
    codes = e8m0_codes(tl.max(tl.max(bits, 3), 1))
    i, j = tl.program_id(0) * TILES + tl.arange(0, TILES), tl.program_id(1) * TILES + tl.arange(0, TILES)
    place = codes_ptr + (expert * (N // 32) + i[:, None]) * (C // 32) + j[None, :]
    tl.store(place, codes.to(tl.uint8), mask=(i < N // 32)[:, None] & (j < C // 32)[None, :])


@triton.jit
def _both_kernel(
    w_ptr, codes_ptr, row_top_ptr, column_top_ptr, rows_ptr, columns_ptr, lost_ptr, lost_columns_ptr, N, C,
    SIDE: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(2)
    n, c = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    there = (n < N)[:, None] & (c < C)[None, :]
    place = codes_ptr + (expert * (N // 32) + n[:, None] // 32) * (C // 32) + c[None, :] // 32
    codes = tl.load(place, mask=there, other=0).to(tl.int32)
    bad = codes == 255
    values = to_e4m3(_load(w_ptr, expert, n, c, N, C) * power(tl.maximum(127 - codes, -126)), bad).to(tl.float32)
    known = tl.where(bad, 0, codes)
    row_top = tl.load(row_top_ptr + expert * (N // 32) + n // 32, mask=n < N, other=0).to(tl.int32)
    column_top = tl.load(column_top_ptr + expert * (C // 32) + c // 32, mask=c < C, other=0).to(tl.int32)
    exact = values * power(tl.maximum(known - row_top[:, None], -126))
    folded = to_e4m3(exact, bad)
    place = (expert.to(tl.int64) * N + n[:, None]) * C + c[None, :]
    tl.store(rows_ptr + place, folded, mask=there)
    lost = tl.sum(tl.sum(((folded.to(tl.float32) != exact) & (bad == 0)).to(tl.int32), 1), 0)
    tl.atomic_add(lost_ptr, lost, mask=lost > 0, sem="relaxed")
    exact = values * power(tl.maximum(known - column_top[None, :], -126))
    folded = to_e4m3(exact, bad)
    place = (expert.to(tl.int64) * C + c[:, None]) * N + n[None, :]
    tl.store(columns_ptr + place, folded.T, mask=there.T)
    lost = tl.sum(tl.sum(((folded.to(tl.float32) != exact) & (bad == 0)).to(tl.int32), 1), 0)
    tl.atomic_add(lost_columns_ptr, lost, mask=lost > 0, sem="relaxed")
