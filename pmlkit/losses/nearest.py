"""Finding the best column of every row, tile by tile: the lowest number and, of equal ones, the first index."""

import triton
import triton.language as tl

from pmlkit.losses.sides import FIT, ORDER, integers, numbers, ready_rows
from pmlkit.losses.tiles import FAR

NO_KEY = tl.constexpr(-0x7F00000000000000)  # below the key of every pair
LAST = tl.constexpr(0x7FFFFFFF)  # above every index


@triton.jit
def index_in_tile(
    x, rows, z, best_tile, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Return the lowest index of a row's nearest column in a tile of its own, by differences of ready rows."""
    low, at_low = tl.full([BM], FAR, tl.float32), tl.full([BM], LAST, tl.int32)
    fit_x = tl.load(numbers(x, FIT) + rows)[:, None]
    for j in range(0, BN):
        columns = best_tile * BN + j
        fit_z, squares = tl.load(numbers(z, FIT) + columns)[:, None], tl.zeros([BM], tl.float32)
        for k in range(0, W, BK):
            y, other = ready_rows(x, rows, D, k, BK, W, PARTS, READY), ready_rows(z, columns, D, k, BK, W, PARTS, READY)
            apart = other[0].to(tl.float32) * fit_z - y[0].to(tl.float32) * fit_x
            if PARTS == 2:
                apart += other[1].to(tl.float32) - y[1].to(tl.float32)
            squares += tl.sum(apart * apart, 1)
        index = tl.load(integers(z, ORDER) + columns)
        at_low = tl.where((squares < low) | ((squares == low) & (index < at_low)), index, at_low)
        low = tl.minimum(squares, low)
    return at_low


@triton.jit
def lower(low, at_low, tile, index):
    """Return the lowest number of each row so far and the lowest index of a column that has it."""
    best = tl.min(tile, 1)
    at = tl.min(tl.where(tile == best[:, None], index[None, :], LAST), 1)
    at = tl.where(best < low, at, tl.where(best == low, tl.minimum(at, at_low), at_low))
    return tl.minimum(best, low), at


@triton.jit
def key(value, index):
    """Return a key that grows with a number and, among equal ones, falls with an index."""
    bits = value.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ LAST, bits)
    return (rank.to(tl.int64) << 32) | (index ^ LAST).to(tl.int64)
