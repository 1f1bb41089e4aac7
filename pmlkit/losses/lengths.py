"""The first launch of every fused loss: how long rows are, and cleared counters.

Statistics of rows are float32: `inv` = 1 / max(length, 1e-12), and the squared length after division, 1 but for shorter rows.
"""

import triton
import triton.language as tl

from pmlkit.losses.handover import counters, floats
from pmlkit.losses.launch import Launch, Shape
from pmlkit.losses.tiles import load_rows
from pmlkit.losses.tiling import Tiles


@triton.jit
def _row_stats_kernel(
    x_ptr, x_label_ptr, z_ptr, z_label_ptr, room_ptr, loss_ptr, N, M, D, at_x, at_z, at_counters, zeros,
    SETS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BZ: tl.constexpr,
):  # fmt: skip
    """Write the statistics of the rows and, of two sets, of the others; clear the counters. Reads 2·(N + M)·D numbers."""
    program = tl.program_id(0)
    words = program * BZ + tl.arange(0, BZ)
    tl.store(counters(room_ptr, at_counters) + words, tl.zeros([BZ], tl.int32), mask=words < zeros)
    if SETS == 1:
        _row_stats(x_ptr, floats(room_ptr, at_x), program, N, D, BM, BK)
    else:
        blocks = tl.cdiv(N, BM)
        if program < blocks:
            _row_stats(x_ptr, floats(room_ptr, at_x), program, N, D, BM, BK)
        else:
            _row_stats(z_ptr, floats(room_ptr, at_z), program - blocks, M, D, BM, BK)


@triton.jit
def _row_stats(x_ptr, stats_ptr, block, N, D, BM: tl.constexpr, BK: tl.constexpr):
    """Write inv = 1 / max(length, 1e-12) and (inv · length)², 1 for all but shorter rows.

    Lengths are taken of rows over their largest value, so that squares neither overflow nor vanish; NaN for a row with
    NaN or Inf, or longer than 3.4e38.
    """
    rows = block * BM + tl.arange(0, BM)
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
    length = tl.where(length == float("inf"), float("nan"), length)  # of finite numbers, but no float32 holds it
    # Rounded exactly, since every cosine hangs on it; and a short row must be told from others by equality.
    inv = tl.where(length < 1e-12, 1e12, tl.div_rn(1.0, tl.where(length < 1e-12, 1.0, length)))
    tl.store(stats_ptr + rows, inv, mask=rows < N)
    short = length * 1e12
    tl.store(stats_ptr + N + rows, tl.where(length < 1e-12, short * short, 1.0), mask=rows < N)


def row_stats(shape: Shape, at_x: int, at_z: int, at_counters: int, zeros: int) -> Launch:
    """Return the launch that writes inv and squared length of every row at_x, of reference rows at_z, and clears counters."""
    widest = 1 << max(4, (shape.width - 1).bit_length())
    sizes = Tiles(BM=32, BN=0, BK=min(128, widest), ONE=True, DC=0, splits=1, warps=4, stages=2, PREC="")
    programs = sizes.row_blocks(shape.rows) + (sizes.row_blocks(shape.others) if shape.reference_set else 0)
    each = 1 << max(0, -(-zeros // programs) - 1).bit_length()
    numbers = (shape.rows, shape.others, shape.width, at_x, at_z, at_counters, zeros)
    return Launch(_row_stats_kernel, programs, sizes, numbers, {"SETS": 1 + shape.reference_set, "BZ": each})
