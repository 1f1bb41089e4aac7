"""Triton building blocks of the fused losses: rows in, products of raw rows out, and blocks that finish each other's work.

Half-precision rows are multiplied as they are, since a product of two of them is exact in float32, and divided by their
lengths afterwards; float32 rows are made unit rows first. Statistics of rows are float32: `inv` = 1 / max(length, 1e-12).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_rows(ptr, rows, N, D, k, BK: tl.constexpr):
    """Return columns k to k + BK of rows, 0 outside. Offsets are 64 bits wide: N·D exceeds 2^31."""
    columns = k + tl.arange(0, BK)
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * D + columns[None, :], mask=mask, other=0.0)


@triton.jit
def unit(x, inv):
    """Return rows over their lengths in float32. A row of NaN or Inf is 0 here; the poison of the loss says so instead."""
    y = x.to(tl.float32) * inv[:, None]
    return tl.where((inv == inv)[:, None], y, 0.0)


@triton.jit
def cosines(
    x_ptr, rows, N, inv_x, z_ptr, columns, M, inv_z, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Return <y_i, z_j> of a tile in float32, [BM, BN]."""
    tile = tl.zeros([BM, BN], tl.float32)
    half: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    for k in range(0, D, BK):
        x, z = load_rows(x_ptr, rows, N, D, k, BK), load_rows(z_ptr, columns, M, D, k, BK)
        if half:
            tile = tl.dot(x, tl.trans(z), tile)
        else:
            tile = tl.dot(unit(x, inv_x), tl.trans(unit(z, inv_z)), tile, input_precision=PREC)
    if half:
        tile = tile * inv_x[:, None] * inv_z[None, :]
        if x_ptr.dtype.element_ty == tl.bfloat16:  # noqa: SIM102  (known when compiling; the inner one is not)
            # Products of rows beyond 1e18 overflow. Rare, so it is a second look: nothing of it is in the common path.
            if tl.minimum(tl.min(inv_x), tl.min(inv_z)) < 1e-15:
                tile = tl.zeros([BM, BN], tl.float32)
                two_x, two_z = _power_of_two(inv_x), _power_of_two(inv_z)
                for k in range(0, D, BK):
                    x = (load_rows(x_ptr, rows, N, D, k, BK) * two_x[:, None]).to(tl.bfloat16)
                    z = (load_rows(z_ptr, columns, M, D, k, BK) * two_z[:, None]).to(tl.bfloat16)
                    tile = tl.dot(x, tl.trans(z), tile)
                tile = tile * (inv_x / two_x)[:, None] * (inv_z / two_z)[None, :]
    return tile


@triton.jit
def _power_of_two(inv):
    """Return a power of two near inv: rows times it stay exact in bfloat16."""
    return tl.exp2(tl.floor(tl.log2(inv)))


@triton.jit
def unit_column(z_ptr, column, inv_c, at, D):
    """Return columns `at` of one unit row, rounded as `unit` rounds.

    Both products end in a selection: a bare one would be fused with the subtraction that follows on one side only, and
    equal rows would be 1e-8 apart.
    """
    z = tl.load(z_ptr + column.to(tl.int64) * D + at, mask=at < D, other=0.0).to(tl.float32) * inv_c
    return tl.where(inv_c == inv_c, z, 0.0)


@triton.jit
def differences(x_ptr, rows, N, inv_x, z_ptr, column, inv_c, D, BM: tl.constexpr):
    """Return |z_c - y_i|² and <y_i, z_c - y_i> of every row with one column, from differences.

    They are exact where the product has lost its digits. The second is -|z_c - y_i|²/2 for unit rows, but 1e-7 of
    rounding in a length counts beside a small difference.
    """
    squares, along = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for k in range(0, D, 32):  # few at once: this path is rare and must not take registers from the common one
        at = k + tl.arange(0, 32)
        z = unit_column(z_ptr, column, inv_c, at, D)
        y = unit(load_rows(x_ptr, rows, N, D, k, 32), inv_x)
        apart = z[None, :] - y
        squares += tl.sum(apart * apart, 1)
        along += tl.sum(y * apart, 1)
    return squares, along


@triton.jit
def arrive(counter_ptr, parties):
    """Return whether this block is the last of `parties` to come here. The counter is back at 0 afterwards.

    What the others stored before is visible to the last: the addition releases and acquires, after all threads of the
    block have stored.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == parties - 1
    if last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return last


@triton.jit
def row_stats_kernel(x_ptr, stats_ptr, zero_ptr, zeros, N, D, BM: tl.constexpr, BK: tl.constexpr, BZ: tl.constexpr):
    """Write inv = 1 / max(length, 1e-12) and (inv · length)², 1 for all but shorter rows; clear `zeros` words at zero_ptr.

    Reads 2·N·D, writes 2·N. Lengths are taken of rows over their largest value, so that squares neither overflow nor
    vanish; NaN for a row with NaN or Inf.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    top = tl.zeros([BM], tl.float32)
    poison = tl.zeros([BM], tl.float32)
    for k in range(0, D, BK):
        x = load_rows(x_ptr, rows, N, D, k, BK).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(x), 1))
        poison += tl.sum(x * 0.0, 1)
    scale = tl.where(top > 1e-30, tl.exp2(tl.floor(tl.log2(top))), 1.0)  # a power of two: nothing is rounded by it
    squares = tl.zeros([BM], tl.float32)
    for k in range(0, D, BK):
        x = load_rows(x_ptr, rows, N, D, k, BK).to(tl.float32) * (1.0 / scale)[:, None]
        squares += tl.sum(x * x, 1)
    length = scale * tl.sqrt_rn(squares) + poison
    # Rounded exactly, since every cosine hangs on it; and a short row must be told from others by equality.
    inv = tl.where(length < 1e-12, 1e12, tl.div_rn(1.0, tl.where(length < 1e-12, 1.0, length)))
    tl.store(stats_ptr + rows, inv, mask=rows < N)
    short = length * 1e12
    tl.store(stats_ptr + N + rows, tl.where(length < 1e-12, short * short, 1.0), mask=rows < N)
    words = tl.program_id(0) * BZ + tl.arange(0, BZ)
    tl.store(zero_ptr + words, tl.zeros([BZ], tl.int32), mask=words < zeros)


@triton.jit
def poison_of(stats_ptr, count, program, programs):
    """Return 0, or NaN if this program's share of `count` rows has one with NaN or Inf. All programs see all rows."""
    found = tl.zeros([512], tl.float32)
    for first in range(program * 512, count, programs * 512):
        at = first + tl.arange(0, 512)
        found += tl.load(stats_ptr + at, mask=at < count, other=0.0) * 0.0
    return tl.sum(found, 0)


@triton.jit
def total(ptr, count):
    """Return the sum of `count` float64 numbers, always in the same order."""
    sums = tl.zeros([256], tl.float64)
    for first in range(0, count, 256):
        at = first + tl.arange(0, 256)
        sums += tl.load(ptr + at, mask=at < count, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def add_weighted(
    sums, along, weight, tile, z_ptr, columns, M, inv_z, D, at_d, DC: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """Add sum_j weight_ij y_j to `sums` (gradient columns from at_d) and its part along y_i to `along`.

    Half-precision rows are multiplied as they are; the weight carries their lengths, and is rounded alike for both.
    """
    z = load_rows(z_ptr, columns, M, D, at_d, DC)
    if z_ptr.dtype.element_ty == tl.float32:
        sums = tl.dot(weight, unit(z, inv_z), sums, input_precision=PREC)
        along += tl.sum(weight * tile, 1)
    elif z_ptr.dtype.element_ty == tl.bfloat16:
        scaled = (weight * inv_z[None, :]).to(tl.bfloat16)
        sums = tl.dot(scaled, z, sums)
        along += tl.sum(scaled.to(tl.float32) * tile * (1.0 / inv_z)[None, :], 1)
    else:  # weights leave float16's range, so its rows, which TF32 holds exactly, go up instead
        sums = tl.dot(weight * inv_z[None, :], z.to(tl.float32), sums, input_precision="tf32x3")
        along += tl.sum(weight * tile, 1)
    return sums, along


@triton.jit
def finish_rows(
    sums, along, x_ptr, rows, N, inv_x, D, at_d, block, split, chunk, poison, counter_ptr, partial_ptr, out_ptr,
    SPLITS: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """Write (sums - y·along) / length as the gradient of a block of rows; of several programs the last adds up in order.

    Rows shorter than 1e-12 get 0. poison is 0, or NaN for a batch that has NaN or Inf.
    """
    if SPLITS > 1:
        inside = tl.arange(0, BM)
        at = inside[:, None] * DC + tl.arange(0, DC)[None, :]
        place = partial_ptr + (block * CHUNKS + chunk).to(tl.int64) * SPLITS * BM * (DC + 1)
        tl.store(place + split * BM * (DC + 1) + at, sums)
        tl.store(place + split * BM * (DC + 1) + BM * DC + inside, along)
        if arrive(counter_ptr + block * CHUNKS + chunk, SPLITS):
            sums, along = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32)
            for other in range(SPLITS):
                sums += tl.load(place + other * BM * (DC + 1) + at)
                along += tl.load(place + other * BM * (DC + 1) + BM * DC + inside)
            _write_rows(sums, along, x_ptr, rows, N, inv_x, D, at_d, poison, out_ptr, CHUNKS, DC)
    else:
        _write_rows(sums, along, x_ptr, rows, N, inv_x, D, at_d, poison, out_ptr, CHUNKS, DC)


@triton.jit
def _write_rows(
    sums, along, x_ptr, rows, N, inv_x, D, at_d, poison, out_ptr, CHUNKS: tl.constexpr, DC: tl.constexpr
):  # fmt: skip
    columns = at_d + tl.arange(0, DC)
    y = unit(load_rows(x_ptr, rows, N, D, at_d, DC), inv_x)
    if CHUNKS == 1:  # all columns are here: the part along y of what was summed, so that its rounding cancels
        along = tl.sum(y * sums, 1) / tl.maximum(tl.sum(y * y, 1), 1e-30)
    gradient = tl.where((inv_x < 1e12)[:, None], (sums - y * along[:, None]) * inv_x[:, None], 0.0) + poison
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    place = out_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(place, gradient.to(out_ptr.dtype.element_ty), mask=mask)


def row_stats(rows_ND: Tensor, stats: Tensor, counters: Tensor | None) -> None:
    """Write inv and squared length of every row to `stats` (float32, 2·N), and zeros to `counters`."""
    rows, width = rows_ND.shape
    BK = min(128, triton.next_power_of_2(max(width, 16)))
    blocks = triton.cdiv(rows, 32)
    zeros = 0 if counters is None else 2 * counters.numel()
    target = stats if counters is None else counters
    BZ = triton.next_power_of_2(max(1, triton.cdiv(zeros, blocks)))
    kernel: Any = row_stats_kernel  # whose call takes launch options that its type does not know
    kernel[(blocks,)](rows_ND, stats, target.view(torch.int32), zeros, rows, width, BM=32, BK=BK, BZ=BZ, num_warps=4)
