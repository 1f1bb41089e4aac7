"""Triton building blocks of the fused losses: rows in, products of raw rows out, gradients written.

Half-precision rows are multiplied as they are, since a product of two of them is exact in float32, and divided by their
lengths afterwards; float32 rows are made unit rows first.
"""

import triton
import triton.language as tl

from pmlkit.losses.elementary import power_of_two
from pmlkit.losses.handover import arrive

FAR = tl.constexpr(1e30)  # the squared distance of pairs that are not there


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
