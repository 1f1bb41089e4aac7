"""Triton building blocks of the fused losses: rows in, products of raw rows out, and blocks that finish each other's work.

Half-precision rows are multiplied as they are, since a product of two of them is exact in float32, and divided by their
lengths afterwards; float32 rows are made unit rows first. Statistics of rows are float32: `inv` = 1 / max(length, 1e-12).
"""

import os

import triton
import triton.language as tl

from pmlkit.losses.launch import Launch, Shape
from pmlkit.losses.tiling import Tiles

# Instructions that the interpreter does not know; the rest of Triton's own ex2, sqrt and rsqrt is for denormal numbers.
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


FAR = tl.constexpr(1e30)  # the squared distance of pairs that are not there


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
def any_of(mask):
    """Return whether any of a tile of truths holds."""
    if _INTERPRETED:
        return tl.max(tl.max(mask.to(tl.int32), 1), 0) > 0
    else:
        return tl.reduce_or(mask, None)


@triton.jit
def edge(row, column, N, M, SELF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Return whether a tile has pairs that are not there, or rows with themselves."""
    beyond = (row + BM > N) | (column + BN > M)
    if SELF:
        beyond |= (column < row + BM) & (column + BN > row)
    return beyond


@triton.jit
def halves_equal(label, label_z):
    """Return where the lower halves of labels are equal, [BM, BN]: wherever labels are, and hardly anywhere else."""
    return label.to(tl.int32)[:, None] == label_z.to(tl.int32)[None, :]


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
def ready_rows(x_ptr, rows, N, inv_x, D, k, BK: tl.constexpr):
    """Return columns k to k + BK of rows as the left side of `cosines` takes them.

    bfloat16 rows times a power of two near 1 / length, which is exact: products of raw rows beyond 1e18 would overflow.
    """
    x = load_rows(x_ptr, rows, N, D, k, BK)
    if x_ptr.dtype.element_ty == tl.float32:
        x = unit(x, inv_x)
    elif x_ptr.dtype.element_ty == tl.bfloat16:
        x = (x.to(tl.float32) * power_of_two(inv_x)[:, None]).to(tl.bfloat16)
    return x


@triton.jit
def cosines(
    x, x_ptr, rows, N, inv_x, factor, z, z_ptr, columns, M, inv_z, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Return factor·<y_i, z_j> of a tile in float32, [BM, BN].

    x: the first `ready_rows`, z: the first `load_rows` of the columns; with ONE they are all there is.
    """
    tile = _product(x, z, inv_z, tl.zeros([BM, BN], tl.float32), PREC)
    if not ONE:
        for k in range(BK, D, BK):
            x = ready_rows(x_ptr, rows, N, inv_x, D, k, BK)
            tile = _product(x, load_rows(z_ptr, columns, M, D, k, BK), inv_z, tile, PREC)
    if x_ptr.dtype.element_ty == tl.bfloat16:
        tile = tile * (inv_x / power_of_two(inv_x) * factor)[:, None] * inv_z[None, :]
    elif x_ptr.dtype.element_ty == tl.float16:
        tile = tile * (inv_x * factor)[:, None] * inv_z[None, :]
    else:
        tile = tile * factor
    return tile


@triton.jit
def _product(x, z, inv_z, tile, PREC: tl.constexpr):
    if z.dtype == tl.float32:
        return tl.dot(x, tl.trans(unit(z, inv_z)), tile, input_precision=PREC)
    else:
        return tl.dot(x, tl.trans(z), tile)


@triton.jit
def power_of_two(inv):
    """Return the power of two at or below inv (2^-126 at least), 1 for a row of NaN or Inf."""
    bits = tl.maximum(inv.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000)
    return tl.where(inv == inv, bits.to(tl.float32, bitcast=True), 1.0)


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
def floats(room_ptr, place):
    """Return a pointer to float32 numbers at a place, in words of 8 bytes, of the room."""
    return (room_ptr + place).to(tl.pointer_type(tl.float32))


@triton.jit
def counters(room_ptr, place):
    """Return a pointer to counters of 32 bits at a place, in words of 8 bytes, of the room."""
    return (room_ptr + place).to(tl.pointer_type(tl.int32))


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


@triton.jit
def poison_of(stats_ptr, count, program, programs):
    """Return 0, or NaN if this program's share of `count` rows has one with NaN or Inf. All programs see all rows."""
    found = tl.zeros([512], tl.float32)
    for first in range(program * 512, count, programs * 512):
        at = first + tl.arange(0, 512)
        found += tl.load(stats_ptr + at, mask=at < count, other=0.0) * 0.0
    return tl.sum(found, 0)


@triton.jit
def totals(ptr, count, KINDS: tl.constexpr):
    """Return the sums of each of KINDS rows of `count` float64 numbers, always added in the same order, [KINDS].

    All rows at once: one after another each would wait for memory, which is most of a small batch's time.
    """
    kind, inside = tl.arange(0, KINDS), tl.arange(0, 256)
    sums = tl.zeros([KINDS, 256], tl.float64)
    for first in range(0, count, 256):
        at = first + inside
        sums += tl.load(ptr + kind[:, None] * count + at[None, :], mask=(at < count)[None, :], other=0.0)
    return tl.sum(sums, 1)


@triton.jit
def pick(values, place: tl.constexpr):
    """Return one number of a few."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == place, values, 0.0), 0)


@triton.jit
def add_weighted(
    sums, along, weight, tile, z, z_ptr, columns, M, inv_z, D, at_d,
    CHUNKS: tl.constexpr, BK: tl.constexpr, DC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Add sum_j weight_ij y_j to `sums` (gradient columns from at_d) and, of several chunks, its part along y_i to `along`.

    z: the first `load_rows` of BK columns. Half-precision rows are multiplied as they are; the weight carries their
    lengths, and is rounded alike for both.
    """
    if CHUNKS > 1 or BK != DC:  # else it is what was multiplied before
        z = load_rows(z_ptr, columns, M, D, at_d, DC)
    if z_ptr.dtype.element_ty == tl.float32:
        sums = tl.dot(weight, unit(z, inv_z), sums, input_precision=PREC)
        if CHUNKS > 1:
            along += tl.sum(weight * tile, 1)
    elif z_ptr.dtype.element_ty == tl.bfloat16:
        scaled = (weight * inv_z[None, :]).to(tl.bfloat16)
        sums = tl.dot(scaled, z, sums)
        if CHUNKS > 1:
            along += tl.sum(scaled.to(tl.float32) * tile * (1.0 / inv_z)[None, :], 1)
    else:  # weights leave float16's range, so its rows, which TF32 holds exactly, go up instead
        sums = tl.dot(weight * inv_z[None, :], z.to(tl.float32), sums, input_precision="tf32x3")
        if CHUNKS > 1:
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
            for other in tl.static_range(SPLITS):  # unrolled, so that the loads wait for memory together
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
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    place = rows.to(tl.int64)[:, None] * D + columns[None, :]
    # Not like any other load, or the compiler would keep the first one's rows in registers all along.
    y = unit(tl.load(x_ptr + place, mask=mask, other=0.0, eviction_policy="evict_first"), inv_x)
    if CHUNKS == 1:  # all columns are here: the part along y of what was summed, so that its rounding cancels
        along = tl.sum(y * sums, 1) / tl.maximum(tl.sum(y * y, 1), 1e-30)
    gradient = tl.where((inv_x < 1e12)[:, None], (sums - y * along[:, None]) * inv_x[:, None], 0.0) + poison
    tl.store(out_ptr + place, gradient.to(out_ptr.dtype.element_ty), mask=mask)


def row_stats(shape: Shape, at_x: int, at_z: int, at_counters: int, zeros: int) -> Launch:
    """Return the launch that writes inv and squared length of every row at_x, of reference rows at_z, and clears counters."""
    widest = 1 << max(4, (shape.width - 1).bit_length())
    sizes = Tiles(BM=32, BN=0, BK=min(128, widest), ONE=True, DC=0, splits=1, warps=4, stages=2, PREC="")
    programs = sizes.row_blocks(shape.rows) + (sizes.row_blocks(shape.others) if shape.reference_set else 0)
    each = 1 << max(0, -(-zeros // programs) - 1).bit_length()
    numbers = (shape.rows, shape.others, shape.width, at_x, at_z, at_counters, zeros)
    return Launch(_row_stats_kernel, programs, sizes, numbers, {"SETS": 1 + shape.reference_set, "BZ": each})
