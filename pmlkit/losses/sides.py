"""One side of a fused loss as its kernels see it: rows in the order of their labels, with their numbers.

A side is the tuple (raw rows, ready rows, numbers, count, count rounded up to PAD). Kernels name rows by their position in
the order of labels, so that rows of one class lie together. Ready rows are float16: 4096·y / fit, with y the row over its
length. Half-precision rows are only divided by a power of two, which is exact, and fit is the rest, in [1, 2). float32 rows
have fit 1 and, of two parts, high = float16(4096·y) and low = float16(4096·y - high): 22 digits, as 3xTF32 has, at
twice the speed. Copies are made where memory allows (READY = COPIED), else rows are made ready whenever they are loaded
(MADE); bfloat16 rows are then multiplied as they are (RAW), those of a tile's left side times a power of two, so that no
product overflows.
"""

import triton
import triton.language as tl

from pmlkit.losses.elementary import power_of_two
from pmlkit.losses.handover import floats

PAD = tl.constexpr(128)  # numbers and ready rows go on to a multiple of this: no tile needs a mask to load them
SCALE = tl.constexpr(4096.0)  # float16 holds values of unit rows down to 2^-36 then

MADE, COPIED, RAW = (tl.constexpr(i) for i in range(3))

# Numbers of a row, each an array over positions. inv = 1 / max(length, 1e-12), NaN for a row with NaN or Inf. square:
# |y|², 1 but for rows shorter than 1e-12. order: the row's index in the batch. begin, end: positions of its class on the
# other side. rank: the position of the row with this index. What a loss adds comes after these.
INV, FIT, SQUARE, ORDER, BEGIN, END, RANK, OWN = (tl.constexpr(i) for i in range(8))


@triton.jit
def side(raw_ptr, room_ptr, at_numbers, at_ready, count):
    """Return a side from places in the room."""
    ready_ptr = (room_ptr + at_ready).to(tl.pointer_type(tl.float16))
    return raw_ptr, ready_ptr, floats(room_ptr, at_numbers), count, tl.cdiv(count, PAD) * PAD


@triton.jit
def numbers(s, what: tl.constexpr):
    """Return a pointer to one of the float32 numbers of the rows."""
    return s[2] + what * s[4]


@triton.jit
def integers(s, what: tl.constexpr):
    """Return a pointer to one of the int32 numbers of the rows."""
    return (s[2] + what * s[4]).to(tl.pointer_type(tl.int32))


@triton.jit
def raw_rows(s, at, D, k, BK: tl.constexpr):
    """Return columns k to k + BK of rows at positions as they were given, 0 outside. Offsets are 64 bits wide."""
    columns = k + tl.arange(0, BK)
    row = tl.load(integers(s, ORDER) + at, mask=at < s[3], other=0)
    mask = (at < s[3])[:, None] & (columns < D)[None, :]
    return tl.load(s[0] + row.to(tl.int64)[:, None] * D + columns[None, :], mask=mask, other=0.0)


@triton.jit
def unit(x, inv):
    """Return rows over their lengths in float32. A row of NaN or Inf is 0 here; the poison of the loss says so instead."""
    y = x.to(tl.float32) * inv[:, None]
    return tl.where((inv == inv)[:, None], y, 0.0)


@triton.jit
def fitted(x, inv, KIND: tl.constexpr):
    """Return raw rows as ready ones, before they are rounded to float16. KIND: type of the raw rows."""
    if tl.float32 == KIND:
        return unit(x, inv) * SCALE
    else:
        return unit(x, power_of_two(inv) * SCALE * tl.where(inv == inv, 1.0, inv))


@triton.jit
def in_parts(y, PARTS: tl.constexpr):
    """Return float16 numbers that add up to y, high and low; with one part the second is not used."""
    high = y.to(tl.float16)
    low = high
    if PARTS == 2:
        low = (y - high.to(tl.float32)).to(tl.float16)
    return high, low


@triton.jit
def ready_rows(s, at, D, k, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr):
    """Return the parts of columns k to k + BK of the ready rows at positions. W: width of ready rows, padded."""
    if READY == COPIED:
        place = s[1] + at[:, None] * (PARTS * W) + (k + tl.arange(0, BK))[None, :]
        high = tl.load(place)
        low = high
        if PARTS == 2:
            low = tl.load(place + W)
        return high, low
    else:
        y = fitted(raw_rows(s, at, D, k, BK), tl.load(numbers(s, INV) + at), s[0].dtype.element_ty)
        return in_parts(y, PARTS)


@triton.jit
def left_rows(s, at, D, k, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr):
    """Return the parts of rows at positions as the left side of products with the other side's `right_rows`."""
    if READY == RAW:
        inv = tl.load(numbers(s, INV) + at)
        high = unit(raw_rows(s, at, D, k, BK), power_of_two(inv) * tl.where(inv == inv, 1.0, inv)).to(tl.bfloat16)
        return high, high
    else:
        return ready_rows(s, at, D, k, BK, W, PARTS, READY)


@triton.jit
def right_rows(s, at, D, k, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr):
    """Return the parts of rows at positions as the right side of products with `left_rows`."""
    if READY == RAW:
        high = raw_rows(s, at, D, k, BK)
        return high, high
    else:
        return ready_rows(s, at, D, k, BK, W, PARTS, READY)


@triton.jit
def left_fit(s, at, factor, READY: tl.constexpr):
    """Return what products of left rows are multiplied by, for factor times cosines."""
    fit = tl.load(numbers(s, FIT) + at)
    if READY == RAW:
        return fit * factor
    else:
        return fit * (factor / (SCALE * SCALE))


@triton.jit
def right_fit(s, at, READY: tl.constexpr):
    """Return what products of right rows are multiplied by; not used for float32 rows. Raw rows of NaN or Inf have 0."""
    if READY == RAW:
        inv = tl.load(numbers(s, INV) + at)
        return tl.where(inv == inv, inv, 0.0)
    else:
        return tl.load(numbers(s, FIT) + at)


@triton.jit
def scale_of(READY: tl.constexpr):
    """Return how many times right rows, with their fits, are too large."""
    return 1.0 if READY == RAW else SCALE
