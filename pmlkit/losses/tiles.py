"""Triton building blocks of the fused losses' tile loops: which tiles there are, cosines, weighted sums, gradients written."""

import triton
import triton.language as tl

from pmlkit.losses.handover import arrive
from pmlkit.losses.sides import BEGIN, END, INV, ORDER, RAW, in_parts, integers, left_rows, numbers, raw_rows, right_rows, unit

FAR = tl.constexpr(1e30)  # the squared distance of pairs that are not there


@triton.jit
def band(x, block, M, BM: tl.constexpr, BN: tl.constexpr, BANDS: tl.constexpr):
    """Return the first tile of columns with the labels of a block of rows, how many there are, and how many are full.

    All tiles but these and the last, if it is not full, hold negatives of every row and nothing else: `plain_tile` numbers
    them from 0 to full - wide, `careful_tile` numbers the others. Without BANDS all tiles are careful: the kernels of
    small batches are shorter by a loop, and reading them is part of their time.
    """
    full = M // BN
    if BANDS:
        begin = tl.load(integers(x, BEGIN) + block * BM)
        end = tl.load(integers(x, END) + tl.minimum(block * BM + BM, x[3]) - 1)
        first = tl.minimum(begin // BN, full)
        wide = tl.maximum(tl.minimum(tl.cdiv(end, BN), full) - first, 0)
    else:
        first, wide = full * 0, full
    return first, wide, full


@triton.jit
def share(start, stop, split, SPLITS: tl.constexpr):
    """Return where the part of start to stop begins and ends that one of SPLITS programs takes."""
    each = tl.cdiv(stop - start, SPLITS)
    return start + split * each, tl.minimum(start + split * each + each, stop)


@triton.jit
def plain_tile(k, first, wide):
    """Return the k-th of the tiles that hold negatives alone."""
    return k + tl.where(k >= first, wide, 0)


@triton.jit
def careful_tile(k, first, wide, full):
    """Return the k-th of the other tiles."""
    return tl.where(k < wide, first + k, full)


@triton.jit
def positives(begin, end, columns):
    """Return where columns have the label of a row, [BM, BN]; begin, end: positions of the row's class."""
    return (columns[None, :] >= begin[:, None]) & (columns[None, :] < end[:, None])


@triton.jit
def cosines(
    x, rows, x_parts, fit_x, z, columns, z_parts, fit_z, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Return factor·<y_i, z_j> of a tile in float32, [BM, BN]. fit_x: `left_fit` of the rows for the factor.

    x_parts, z_parts: the first BK columns of left and right rows; where W is BK they are all there is.
    """
    tile = _product(x_parts, z_parts, tl.zeros([BM, BN], tl.float32), PARTS)
    if BK < W:
        for k in range(BK, W, BK):
            x_more = left_rows(x, rows, D, k, BK, W, PARTS, READY)
            z_more = right_rows(z, columns, D, k, BK, W, PARTS, READY)
            tile = _product(x_more, z_more, tile, PARTS)
    if z[0].dtype.element_ty != tl.float32:  # first: products of raw rows are as large as those
        tile *= fit_z[None, :]
    return tile * fit_x[:, None]


@triton.jit
def _product(x, z, tile, PARTS: tl.constexpr):
    if PARTS == 2:  # small numbers first; the product of both low parts is below what float32 holds
        tile = tl.dot(x[1], tl.trans(z[0]), tile)
        tile = tl.dot(x[0], tl.trans(z[1]), tile)
    return tl.dot(x[0], tl.trans(z[0]), tile)


@triton.jit
def add_weighted(
    sums, along, weight, tile, z, columns, z_parts, fit_z, D, at_d,
    BK: tl.constexpr, W: tl.constexpr, DC: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Add sum_j weight_ij z_j to `sums` (gradient columns from at_d) and, of several chunks, its part along y_i to `along`.

    weight: in the range of float16. tile: cosines. Sums are `scale_of` times too large. FRESH: add tiles in float32, since the
    tensor cores cut digits off whenever they add to a sum.
    """
    if W > DC:  # else it is what was multiplied before
        z_parts = right_rows(z, columns, D, at_d, DC, W, PARTS, READY)
    if z[0].dtype.element_ty != tl.float32:
        weight *= fit_z[None, :]
    if READY == RAW:
        high = weight.to(tl.bfloat16)
        low = high
    else:
        high, low = in_parts(weight, PARTS)  # pyright: ignore[reportGeneralTypeIssues]
    if PARTS == 2:
        part = tl.dot(high, z_parts[1], tl.dot(low, z_parts[0]))
        sums += tl.dot(high, z_parts[0], part)
    elif FRESH:
        sums += tl.dot(high, z_parts[0])
    else:
        sums = tl.dot(high, z_parts[0], sums)
    if W > DC:  # rounded like the sums, so that their difference keeps its digits
        rounded = high.to(tl.float32)
        if PARTS == 2:
            rounded += low.to(tl.float32)
        if z[0].dtype.element_ty != tl.float32:
            rounded *= (1.0 / fit_z)[None, :]
        along += tl.sum(tl.where(weight == 0, 0.0, rounded * tile), 1)
    return sums, along


@triton.jit
def unit_column(z, column, inv_c, at, D):
    """Return columns `at` of the unit row at one position, rounded as `unit` rounds.

    Both products end in a selection: a bare one would be fused with the subtraction that follows on one side only, and
    equal rows would be 1e-8 apart.
    """
    row = tl.load(integers(z, ORDER) + column).to(tl.int64)
    y = tl.load(z[0] + row * D + at, mask=at < D, other=0.0).to(tl.float32) * inv_c
    return tl.where(inv_c == inv_c, y, 0.0)


@triton.jit
def differences(x, rows, inv_x, z, column, inv_c, D, BM: tl.constexpr):
    """Return |z_c - y_i|² and <y_i, z_c - y_i> of every row with one column, from differences.

    They are exact where the product has lost its digits. The second is -|z_c - y_i|²/2 for unit rows, but 1e-7 of
    rounding in a length counts beside a small difference.
    """
    squares, along = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for k in range(0, D, 32):  # few at once: this path is rare and must not take registers from the common one
        at = k + tl.arange(0, 32)
        y = unit(raw_rows(x, rows, D, k, 32), inv_x)
        apart = unit_column(z, column, inv_c, at, D)[None, :] - y
        squares += tl.sum(apart * apart, 1)
        along += tl.sum(y * apart, 1)
    return squares, along


@triton.jit
def finish_rows(
    sums, along, x, rows, D, at_d, block, split, chunk, poison, counter_ptr, partial_ptr, out_ptr,
    SPLITS: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of rows as `write_rows` does; of several programs the last adds up in order.

    poison: 0, or NaN for a batch that has NaN or Inf.
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
            write_rows(sums, along, x, rows, D, at_d, poison, out_ptr, CHUNKS, DC)
    else:
        write_rows(sums, along, x, rows, D, at_d, poison, out_ptr, CHUNKS, DC)


@triton.jit
def write_rows(sums, along, x, rows, D, at_d, poison, out_ptr, CHUNKS: tl.constexpr, DC: tl.constexpr):
    """Write (sums - y·along) / length as the gradient of a block of rows; 0 for rows shorter than 1e-12."""
    inv = tl.load(numbers(x, INV) + rows)
    columns = at_d + tl.arange(0, DC)
    mask = (rows < x[3])[:, None] & (columns < D)[None, :]
    place = tl.load(integers(x, ORDER) + rows).to(tl.int64)[:, None] * D + columns[None, :]
    y = unit(tl.load(x[0] + place, mask=mask, other=0.0), inv)
    if CHUNKS == 1:  # all columns are here: the part along y of what was summed, so that its rounding cancels
        along = tl.sum(y * sums, 1) / tl.maximum(tl.sum(y * y, 1), 1e-30)
    gradient = tl.where((inv < 1e12)[:, None], (sums - y * along[:, None]) * inv[:, None], 0.0) + poison
    tl.store(out_ptr + place, gradient.to(out_ptr.dtype.element_ty), mask=mask)
