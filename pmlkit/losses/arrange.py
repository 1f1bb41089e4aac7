"""The first launch of every fused loss: rows in the order of their labels, how long they are, and cleared counters."""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.losses.elementary import power_of_two
from pmlkit.losses.handover import counters
from pmlkit.losses.launch import Launch, Room
from pmlkit.losses.sides import (
    BEGIN,
    COPIED,
    END,
    FIT,
    INV,
    MADE,
    ORDER,
    OWN,
    PAD,
    RANK,
    RAW,
    SQUARE,
    fitted,
    in_parts,
    integers,
    numbers,
    side,
)
from pmlkit.losses.tiling import Shape, Tiles, parts, ready_width

_AS_GIVEN, _RANKED, _SORTED = range(3)  # how rows come to their order
_MOST_RANKED = 4096  # rows that programs compare with all others: 5.6 us for 2,048 on an H200, 44 for 8,192; a sort takes 55
# What a call may take beside its inputs and results. Ready copies are made where they fit in; rows of larger batches are
# made ready whenever they are loaded, or taken as they are.
_BYTES, _BYTES_A_ROW = 16 * 2**20, 64


@triton.jit
def _arrange_kernel(
    x_ptr, x_label_ptr, z_ptr, z_label_ptr, room_ptr, loss_ptr,
    N, M, D, at_x, at_z, ready_x, ready_z, at_counters, zeros,
    SETS: tl.constexpr, ORDERED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, W: tl.constexpr,
    PARTS: tl.constexpr, READY: tl.constexpr, BZ: tl.constexpr,
):  # fmt: skip
    """Write the numbers and the ready copies of the rows and, of two sets, of the others; clear the counters."""
    program = tl.program_id(0)
    words = program * BZ + tl.arange(0, BZ)
    tl.store(counters(room_ptr, at_counters) + words, tl.zeros([BZ], tl.int32), mask=words < zeros)
    x = side(x_ptr, room_ptr, at_x, ready_x, N)
    if SETS == 1:
        _arrange(x, x_label_ptr, x_label_ptr, N, program, D, True, True, ORDERED, BM, BN, BK, W, PARTS, READY)
    else:
        z = side(z_ptr, room_ptr, at_z, ready_z, M)
        blocks = x[4] // BM
        if program < blocks:
            _arrange(x, x_label_ptr, z_label_ptr, M, program, D, True, False, ORDERED, BM, BN, BK, W, PARTS, READY)
        else:
            _arrange(
                z, z_label_ptr, x_label_ptr, N, program - blocks, D, ORDERED > 0, False, ORDERED, BM, BN, BK, W, PARTS, READY
            )


@triton.jit
def _arrange(
    s, label_ptr, other_ptr, others, block, D, HAS_LABELS: tl.constexpr, ALONE: tl.constexpr, ORDERED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Write what belongs to BM rows of a side; BM divides PAD.

    HAS_LABELS: false for proxies. ALONE: whether the other side is this one.
    """
    at = block * BM + tl.arange(0, BM)
    real = at < s[3]
    row, position = at.to(tl.int64), at
    begin, end = at, at
    if ORDERED == 0:  # rows with proxies: the class of a row, -1 if there is none
        label = tl.load(label_ptr + at, mask=real & HAS_LABELS, other=-1)
        begin = tl.where((label >= 0) & (label < others), label, -1).to(tl.int32)
    elif ORDERED == 1:
        label = tl.load(label_ptr + at, mask=real, other=0)
        less, begin, end = _rank(  # pyright: ignore[reportGeneralTypeIssues]
            label, at, label_ptr, s[3], BM, BN
        )
        position = tl.where(real, less, at)
        if not ALONE:
            _, begin, end = _rank(label, at, other_ptr, others, BM, BN)
    elif ORDERED == 2:  # the labels in order, then the rows' indices
        label = tl.load(label_ptr + at, mask=real, other=0)
        row = tl.load(label_ptr + s[3] + at, mask=real, other=0)
        begin, end = _bound(label, other_ptr, others, False, BM), _bound(label, other_ptr, others, True, BM)
    inv, square = _lengths(s[0], row, real, D, BM, BK)  # pyright: ignore[reportGeneralTypeIssues]
    fit = tl.full([BM], 1.0, tl.float32)
    if s[0].dtype.element_ty != tl.float32:
        fit = tl.where(inv == inv, inv / power_of_two(inv), 1.0)
    tl.store(numbers(s, INV) + position, tl.where(real, inv, 0.0))
    tl.store(numbers(s, FIT) + position, tl.where(real, fit, 0.0))
    tl.store(numbers(s, SQUARE) + position, tl.where(real, square, 0.0))
    tl.store(integers(s, ORDER) + position, tl.where(real, row.to(tl.int32), 0))
    tl.store(integers(s, BEGIN) + position, tl.where(real, begin, 0))
    tl.store(integers(s, END) + position, tl.where(real, end, 0))
    tl.store(integers(s, RANK) + row, position, mask=real)
    if READY == COPIED:
        for k in range(0, W, BK):
            columns = k + tl.arange(0, BK)
            mask = real[:, None] & (columns < D)[None, :]
            x = tl.load(s[0] + row[:, None] * D + columns[None, :], mask=mask, other=0.0)
            high, low = in_parts(fitted(x, inv, s[0].dtype.element_ty), PARTS)
            place = s[1] + position[:, None] * (PARTS * W) + columns[None, :]
            tl.store(place, high)
            if PARTS == 2:
                tl.store(place + W, low)


@triton.jit
def _rank(label, at, other_ptr, others, BM: tl.constexpr, BN: tl.constexpr):
    """Return how many others come before each row (equal labels by index), and where its class begins and ends there."""
    counts, before = tl.zeros([BM, BN], tl.int32), tl.zeros([BM, BN], tl.int32)
    for first in range(0, others, BN):
        column = first + tl.arange(0, BN)
        other = tl.load(other_ptr + column, mask=column < others, other=0)[None, :]
        there = (column < others)[None, :]
        smaller, same = (other < label[:, None]) & there, (other == label[:, None]) & there
        counts += tl.where(smaller, 1, tl.where(same, 0x10000, 0))  # two counts of at most 2^13 in one number
        before += (same & (column[None, :] < at[:, None])).to(tl.int32)
    total = tl.sum(counts, 1)
    less = total & 0xFFFF
    return less + tl.sum(before, 1), less, less + (total >> 16)


@triton.jit
def _bound(label, sorted_ptr, count, BEYOND: tl.constexpr, BM: tl.constexpr):
    """Return how many of some labels in order are less than each label, or with BEYOND also those that are equal."""
    low, high = tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32) + count
    for _ in range(21):  # 2^20 rows at most
        middle = (low + high) // 2
        other = tl.load(sorted_ptr + middle, mask=low < high, other=0)
        below = other <= label if BEYOND else other < label
        low, high = tl.where((low < high) & below, middle + 1, low), tl.where((low < high) & (below == 0), middle, high)
    return low


@triton.jit
def _lengths(x_ptr, row, real, D, BM: tl.constexpr, BK: tl.constexpr):
    """Return inv = 1 / max(length, 1e-12), rounded exactly, and (inv · length)², 1 for all but shorter rows.

    NaN instead of inv for a row with NaN or Inf, or longer than 3.4e38.
    Lengths are taken of rows over their largest value, so that squares neither overflow nor vanish.
    """
    top, poison = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for k in range(0, D, BK):
        columns = k + tl.arange(0, BK)
        mask = real[:, None] & (columns < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(tl.abs(x), 1))
        poison += tl.sum(x * 0.0, 1)
    scale = tl.where(top > 1e-30, tl.exp2(tl.floor(tl.log2(top))), 1.0)  # a power of two: nothing is rounded by it
    squares = tl.zeros([BM], tl.float32)
    for k in range(0, D, BK):
        columns = k + tl.arange(0, BK)
        mask = real[:, None] & (columns < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32) * (1.0 / scale)[:, None]
        squares += tl.sum(x * x, 1)
    length = scale * tl.sqrt_rn(squares) + poison
    length = tl.where(length == float("inf"), float("nan"), length)  # of finite numbers, but no float32 holds it
    short = length * 1e12
    inv = tl.where(length < 1e-12, 1e12, tl.div_rn(1.0, tl.where(length < 1e-12, 1.0, length)))
    return inv, tl.where(length < 1e-12, short * short, 1.0)


def in_label_order(labels_N: Tensor) -> Tensor:
    """Return labels in ascending order and, after them, the index of each, [2N] int64; equal labels stay in their order."""
    both_2N = labels_N.new_empty(2, len(labels_N))
    torch.sort(labels_N, stable=True, out=(both_2N[0], both_2N[1]))
    return both_2N.view(-1)


@dataclass(frozen=True)
class Arranged:
    """Where a call keeps its sides, and what its kernels are told about them.

    at_x, at_z, ready_x, ready_z: places. sort: whether the host sorts the labels first. constants: of the kernels.
    """

    at_x: int
    at_z: int
    ready_x: int
    ready_z: int
    sort: bool
    constants: dict[str, int]
    shape: Shape

    @property
    def places(self) -> tuple[int, ...]:
        """The numbers that a forward kernel takes first: sizes and places."""
        s = self.shape
        return s.rows, s.others, s.width, self.at_x, self.at_z, self.ready_x, self.ready_z

    def launch(self, at_counters: int, zeros: int) -> Launch:
        """Return the launch that writes the sides and clears counters."""
        s = self.shape
        BM, BN = _blocks(max(s.rows, s.others))
        blocks = padded(s.rows) // BM + (padded(s.others) // BM if s.reference_set else 0)
        sizes = Tiles(
            BM=BM, BN=BN, BK=min(128, ready_width(s.width)), W=ready_width(s.width), DC=0, splits=1, warps=4, stages=2
        )
        ordered = _AS_GIVEN if not self.constants["SORTED"] else _SORTED if self.sort else _RANKED
        own = {"SETS": 1 + s.reference_set, "ORDERED": ordered, "BZ": 1 << max(0, -(-zeros // blocks) - 1).bit_length()}
        return Launch(_arrange_kernel, blocks, sizes, (*self.places, at_counters, zeros), {**self.constants, **own})


def _blocks(rows: int) -> tuple[int, int]:
    """Return how many rows a program arranges, and how many labels it compares them with at once."""
    return (4, 128) if rows <= 128 else (4, 512) if rows <= 4096 else (32, 256)


def padded(count: int) -> int:
    """Return a count rounded up to PAD."""
    return -(-count // PAD.value) * PAD.value


def numbers_of(rows: int, own: int) -> int:
    """Return how many numbers a side keeps, of which a loss adds its own ones."""
    return (OWN.value + own) * padded(rows)


def arrange(
    shape: Shape, room: Room, own: int, *, own_others: int | None = None, by_label: bool = True, taken: int = 0
) -> Arranged:
    """Find room for the sides of a call.

    own, own_others: numbers that the loss adds to a row, and to a row of another set. by_label: whether labels order the
    rows. taken: bytes that the loss takes for itself.
    """
    count = parts(shape)
    sides = [shape.rows, shape.others][: 1 + shape.reference_set]
    sort = by_label and max(sides) > _MOST_RANKED
    added = [own, own if own_others is None else own_others]
    kept = [numbers_of(rows, more) for rows, more in zip(sides, added, strict=False)]
    halves = [padded(rows) * count * ready_width(shape.width) for rows in sides]
    used = taken + 4 * sum(kept) + 2 * sum(halves) + (16 * sum(sides) if sort else 0)
    ready = used + 2**16 <= _BYTES + _BYTES_A_ROW * sum(sides)  # 2^16: sums and counters
    raw = shape.dtype == shape.others_dtype == torch.bfloat16
    at = [room.floats(numbers) for numbers in kept]
    copies = [room.doubles(math.ceil(size / 4)) if ready else 0 for size in halves]
    constants = {"PARTS": count, "READY": (COPIED if ready else RAW if raw else MADE).value, "SORTED": by_label}
    return Arranged(at[0], at[-1], copies[0], copies[-1], sort, constants, shape)
