"""Batch-hard triplet loss: every anchor against its farthest positive and its nearest negative.

With y = row / max(|row|, 1e-12), z the same of the reference rows (y itself without them) and d_ij = |y_i - z_j|:

    p(i) = first argmax_j d_ij over equal labels (without reference rows j != i)
    n(i) = first argmin_j d_ij over different labels; anchors without one of the two are left out
    v_i = d_{i,p(i)} - d_{i,n(i)} + margin
    loss = sum_{v_i > 0} v_i / #{i: v_i > 0}, or 0 if no v_i > 0

This is BatchHardMiner with TripletMarginLoss of pytorch-metric-learning 2.9.0 (the mining rule of Hermans, Beyer and
Leibe 2017), except that identical rows are at distance 0 (no gradient) and tie exactly at every N, a row shorter than
1e-12 has gradient 0, a NaN or Inf anywhere makes the loss and every gradient NaN, and an empty batch is 0.

Cost of the reference: one product of 2·N·M·D operations and about four N x M matrices to mine (nine if all rows
are near), then O(N·D).
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.losses.arrange import arrange
from pmlkit.losses.fused import register
from pmlkit.losses.handover import arrive, counters, pick, poison_of, totals
from pmlkit.losses.launch import Backward, Launch, Plan, Room
from pmlkit.losses.mining import Triplets, anchor_numbers, mine
from pmlkit.losses.module import FusedLoss, evaluate
from pmlkit.losses.nearest import LAST, NO_KEY, index_in_tile, key, lower
from pmlkit.losses.rows import reference_set, root, tied, unit_rows
from pmlkit.losses.sides import (
    BEGIN,
    END,
    INV,
    ORDER,
    OWN,
    RANK,
    SQUARE,
    integers,
    left_fit,
    left_rows,
    numbers,
    raw_rows,
    right_fit,
    right_rows,
    side,
    unit,
)
from pmlkit.losses.tiles import (
    FAR,
    band,
    careful_tile,
    cosines,
    plain_tile,
    positives,
    share,
    unit_column,
    write_rows,
)
from pmlkit.losses.tiling import Shape, Tiles, bands, forward_tiles, tiles


def reference(
    emb_ND: Tensor,
    labels_N: Tensor,
    *,
    margin: float = 0.05,
    ref_emb_MD: Tensor | None = None,
    ref_labels_M: Tensor | None = None,
    triplets: Triplets | None = None,
) -> Tensor:
    """Return the loss as a scalar: float64 for float64 rows, else float32. Formula: pytorch-metric-learning 2.9.0.

    emb_ND, ref_emb_MD: floating-point rows; labels_N, ref_labels_M: any integer type, compared by value.
    triplets: anchors, positives, negatives (int64) to evaluate at; mined here when None.
    Raises PmlkitError as `mine` does.
    """
    if triplets is None:
        triplets = mine(emb_ND, labels_N, ref_emb_MD=ref_emb_MD, ref_labels_M=ref_labels_M)
    anchor_T, positive_T, negative_T = triplets
    refs_MD, _, dtype = reference_set(emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    y_ND = unit_rows(emb_ND.to(dtype))
    z_MD = y_ND if ref_emb_MD is None else unit_rows(refs_MD.to(dtype))
    to_positive_T, to_negative_T = (root((y_ND[anchor_T] - z_MD[j_T]).square().sum(1)) for j_T in (positive_T, negative_T))
    violation_T = to_positive_T - to_negative_T + margin
    active_T = violation_T > 0
    loss = torch.where(active_T, violation_T, 0).sum() / active_T.sum().clamp(min=1)
    return tied(loss, emb_ND, ref_emb_MD)


# Numbers of a row as an anchor: positions of its positive and its negative (-1 for an anchor that is left out, -2 - position
# where there is no gradient), 1/d_ip and 1/d_in (0 there), and, where several programs share the columns of a gradient, the
# parts of u = (z_p - y)/d_ip and w = (z_n - y)/d_in along y.
_FARTHEST, _NEAREST, _PULL, _PUSH, _ALONG_P, _ALONG_N = (tl.constexpr(OWN.value + i) for i in range(6))
_LATE = 8192  # columns from which a second look at one tile costs less than indices of all
_FEWEST = 2  # rows of a gradient program
_SCAN = tl.constexpr(1024)  # anchors that a gradient program looks at together


@triton.jit
def _forward_kernel(
    x_ptr, x_label_ptr, z_ptr, z_label_ptr, room_ptr, loss_ptr,
    N, M, D, at_x, at_z, ready_x, ready_z, at_sums, at_scale, at_keys, at_counters, margin,
    SELF: tl.constexpr, LATE: tl.constexpr, SPLITS: tl.constexpr, BANDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Mine, then judge the triplets of a row block in the last program that shares it. Reads N·M/BM rows.

    Pairs are compared by |z|² - 2 cosine, which lacks what is the same for all pairs of a row. Programs hand each other
    keys, (rank of that << 32) | rank of the index: the largest is the first of the equal best columns. To find an index costs
    four times what finding the lowest number does, so that LATE looks for it in the best tile alone, once all tiles are
    done; unless two tiles have the same number, where the first index counts.
    """
    x, z = side(x_ptr, room_ptr, at_x, ready_x, N), side(z_ptr, room_ptr, at_z, ready_z, M)
    counter_ptr, keys_ptr = counters(room_ptr, at_counters), (room_ptr + at_keys).to(tl.pointer_type(tl.int64))
    split, block = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    inside = tl.arange(0, BM)
    rows = block * BM + inside
    begin, end = tl.load(integers(x, BEGIN) + rows), tl.load(integers(x, END) + rows)
    fit_x = left_fit(x, rows, -2.0, READY)
    x_parts = left_rows(x, rows, D, 0, BK, W, PARTS, READY)
    high, low = tl.full([BM], -FAR, tl.float32), tl.full([BM], FAR, tl.float32)
    at_high, at_low = tl.full([BM], LAST, tl.int32), tl.full([BM], LAST, tl.int32)
    first, wide, full = band(x, block, M, BM, BN, BANDS)
    from_tile, to_tile = share(0, full - wide, split, SPLITS)
    if LATE:
        best_tile, tied = tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32)
        for k in range(from_tile, to_tile):
            columns = plain_tile(k, first, wide) * BN + tl.arange(0, BN)
            tile = _closeness(x, rows, x_parts, fit_x, z, columns, D, BM, BN, BK, W, PARTS, READY)
            best = tl.min(tile, 1)
            tied = tl.where(best < low, 0, tl.where(best == low, 1, tied))
            best_tile = tl.where(best < low, plain_tile(k, first, wide), best_tile)
            low = tl.minimum(best, low)
        if tl.max(tl.where(rows < N, tied, 0), 0) == 0:
            at_low = index_in_tile(x, rows, z, best_tile, D, BM, BN, BK, W, PARTS, READY)
            from_tile = to_tile
        else:
            low = tl.full([BM], FAR, tl.float32)
    if BANDS:
        for k in tl.range(from_tile, to_tile, num_stages=1 if LATE else None):
            columns = plain_tile(k, first, wide) * BN + tl.arange(0, BN)
            tile = _closeness(x, rows, x_parts, fit_x, z, columns, D, BM, BN, BK, W, PARTS, READY)
            low, at_low = lower(low, at_low, tile, tl.load(integers(z, ORDER) + columns))
    for k in tl.range(split, wide + tl.cdiv(M, BN) - full, SPLITS, num_stages=1 if BANDS else None):
        columns = careful_tile(k, first, wide, full) * BN + tl.arange(0, BN)
        tile = _closeness(x, rows, x_parts, fit_x, z, columns, D, BM, BN, BK, W, PARTS, READY)
        index = tl.load(integers(z, ORDER) + columns)
        positive = positives(begin, end, columns)
        low, at_low = lower(low, at_low, tl.where(positive | (columns >= M)[None, :], FAR, tile), index)
        if SELF:
            positive &= rows[:, None] != columns[None, :]
        higher, at_high = lower(-high, at_high, tl.where(positive, -tile, FAR), index)
        high = -higher
    farthest = tl.where(high > -FAR, key(high, at_high), NO_KEY)
    nearest = tl.where(low < FAR, key(-low, at_low), NO_KEY)
    if SPLITS > 1:
        place = keys_ptr + block * SPLITS * 2 * BM + inside
        tl.store(place + split * 2 * BM, farthest)
        tl.store(place + split * 2 * BM + BM, nearest)
        if arrive(counter_ptr + 1 + block, SPLITS):
            for other in tl.static_range(SPLITS):
                farthest = tl.maximum(farthest, tl.load(place + other * 2 * BM))
                nearest = tl.maximum(nearest, tl.load(place + other * 2 * BM + BM))
            _judge(
                farthest, nearest, x, z, room_ptr + at_sums, room_ptr + at_scale, counter_ptr, loss_ptr,
                rows, block, tl.num_programs(0) // SPLITS, D, margin, SELF, BM, W,
            )  # fmt: skip
    else:
        _judge(
            farthest, nearest, x, z, room_ptr + at_sums, room_ptr + at_scale, counter_ptr, loss_ptr,
            rows, block, tl.num_programs(0), D, margin, SELF, BM, W,
        )  # fmt: skip


@triton.jit
def _closeness(
    x, rows, x_parts, fit_x, z, columns, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Return |z|² - 2 cosine of a tile."""
    z_parts, fit_z = right_rows(z, columns, D, 0, BK, W, PARTS, READY), right_fit(z, columns, READY)
    tile = cosines(x, rows, x_parts, fit_x, z, columns, z_parts, fit_z, D, BM, BN, BK, W, PARTS, READY)
    return tile + tl.load(numbers(z, SQUARE) + columns)[None, :]


@triton.jit
def _judge(
    farthest, nearest, x, z, sums_ptr, scale_ptr, counter_ptr, loss_ptr, rows, block, blocks, D, margin,
    SELF: tl.constexpr, BM: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write the numbers of the anchors of a row block, and its part of the loss. The last block divides."""
    kept = (rows < x[3]) & (farthest > NO_KEY) & (nearest > NO_KEY)
    # A raw NaN is no column's lowest number and so leaves no index; the loss is NaN then whatever is picked.
    p = tl.minimum(((farthest & LAST) ^ LAST).to(tl.int32), z[3] - 1)
    n = tl.minimum(((nearest & LAST) ^ LAST).to(tl.int32), z[3] - 1)
    p, n = tl.load(integers(z, RANK) + tl.where(kept, p, 0)), tl.load(integers(z, RANK) + tl.where(kept, n, 0))
    distance_p, along_p = _apart(x, rows, z, p, D, BM)
    distance_n, along_n = _apart(x, rows, z, n, D, BM)
    violation = distance_p - distance_n + margin
    active = kept & (violation > 0)
    pulled, pushed = active & (distance_p > 0), active & (distance_n > 0)
    pull = tl.where(pulled, 1.0 / tl.where(distance_p > 0, distance_p, 1.0), 0.0)
    push = tl.where(pushed, 1.0 / tl.where(distance_n > 0, distance_n, 1.0), 0.0)
    tl.store(integers(x, _FARTHEST) + rows, tl.where(kept, tl.where(pulled, p, -2 - p), -1))
    tl.store(integers(x, _NEAREST) + rows, tl.where(kept, tl.where(pushed, n, -2 - n), -1))
    tl.store(numbers(x, _PULL) + rows, pull)
    tl.store(numbers(x, _PUSH) + rows, push)
    if W > 128:
        tl.store(numbers(x, _ALONG_P) + rows, along_p * pull)
        tl.store(numbers(x, _ALONG_N) + rows, along_n * push)
    poison = tl.sum(tl.load(numbers(x, INV) + rows) * 0.0, 0)  # NaN for a row with NaN or Inf: all gradients are NaN then
    if SELF == 0:
        poison += poison_of(numbers(z, INV), z[3], block, blocks)
    tl.store(sums_ptr + block, tl.sum(tl.where(active, violation, 0.0).to(tl.float64), 0) + poison)
    tl.store(sums_ptr + blocks + block, tl.sum(active.to(tl.float64), 0))
    if arrive(counter_ptr, blocks):
        sums = totals(sums_ptr, blocks, 2)
        violations = pick(sums, 0)
        scale = 1.0 / tl.maximum(pick(sums, 1), 1.0) + violations * 0.0
        tl.store(scale_ptr, scale)
        tl.store(loss_ptr, (violations * scale).to(tl.float32))


@triton.jit
def _apart(x, rows, z, others, D, BM: tl.constexpr):
    """Return |z - y_i| and <y_i, z - y_i> of every row with one other of its own, by differences, which keep digits."""
    squares, along = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    inv_x, inv_z = tl.load(numbers(x, INV) + rows), tl.load(numbers(z, INV) + others)
    for k in range(0, D, 64):
        y = unit(raw_rows(x, rows, D, k, 64), inv_x)
        apart = unit(raw_rows(z, others, D, k, 64), inv_z) - y
        squares += tl.sum(apart * apart, 1)
        along += tl.sum(y * apart, 1)
    return tl.sqrt(squares), along


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, z_ptr, room_ptr, out_x_ptr, out_z_ptr,
    N, M, D, at_x, at_z, ready_x, ready_z, at_scale, at_counters, at_partial, at_partial_z,
    SELF: tl.constexpr, SIDES: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, BM_Z: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows (SIDES 1), of the reference rows (2) or of both (3)."""
    x, z = side(x_ptr, room_ptr, at_x, ready_x, N), side(z_ptr, room_ptr, at_z, ready_z, M)
    program, blocks = tl.program_id(0), tl.cdiv(N, BM) * CHUNKS
    scale = tl.load(grad_ptr).to(tl.float32) * tl.load(room_ptr + at_scale).to(tl.float32)
    if SIDES == 1:
        _gradient(program, x, z, D, scale, out_x_ptr, True, SELF, CHUNKS, BM, DC)
    elif SIDES == 2:
        _gradient(program, z, x, D, scale, out_z_ptr, False, True, CHUNKS, BM_Z, DC)
    elif program < blocks:
        _gradient(program, x, z, D, scale, out_x_ptr, True, SELF, CHUNKS, BM, DC)
    else:
        _gradient(program - blocks, z, x, D, scale, out_z_ptr, False, True, CHUNKS, BM_Z, DC)


@triton.jit
def _gradient(
    program, x, z, D, scale, out_ptr,
    ANCHORS: tl.constexpr, TARGETS: tl.constexpr, CHUNKS: tl.constexpr, BM: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of rows: as anchors (gathers p and n) and as targets of the z rows' triplets.

    Every program looks through the positives of its classes' anchors and the negatives of all anchors for its own rows, and
    adds them one by one: no atomics, no sort. A row that very many anchors pick takes its program long.
    """
    chunk, block = program % CHUNKS, program // CHUNKS
    rows = block * BM + tl.arange(0, BM)
    sums, along = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32)
    if ANCHORS:
        y = unit(raw_rows(x, rows, D, chunk * DC, DC), tl.load(numbers(x, INV) + rows))
        sums, along = _add_own(sums, along, x, rows, y, z, _FARTHEST, _PULL, _ALONG_P, -1.0, D, chunk * DC, CHUNKS, DC)
        sums, along = _add_own(sums, along, x, rows, y, z, _NEAREST, _PUSH, _ALONG_N, 1.0, D, chunk * DC, CHUNKS, DC)
    if TARGETS:
        start = tl.load(integers(x, BEGIN) + block * BM)
        stop = tl.load(integers(x, END) + tl.minimum(block * BM + BM, x[3]) - 1)
        sums, along = _add_targets(
            sums, along, start, stop, x, rows, block * BM, z, _FARTHEST, _PULL, _ALONG_P, -1.0, D, chunk * DC, CHUNKS, BM, DC
        )
        sums, along = _add_targets(
            sums, along, 0, z[3], x, rows, block * BM, z, _NEAREST, _PUSH, _ALONG_N, 1.0, D, chunk * DC, CHUNKS, BM, DC
        )
    # Nothing is shared between programs: where those of other losses count, these have nothing to count.
    write_rows(sums * scale, along * scale, x, rows, D, chunk * DC, scale * 0.0, out_ptr, CHUNKS, DC)


@triton.jit
def _add_own(
    sums, along, x, rows, y, z, PICK: tl.constexpr, WEIGHT: tl.constexpr, ALONG: tl.constexpr, sign, D, at_d,
    CHUNKS: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """Add what rows get as anchors from their positives or their negatives."""
    there = rows < x[3]
    other = tl.maximum(tl.load(integers(x, PICK) + rows, mask=there, other=-1), 0)  # of weight 0 where there is none
    apart = unit(raw_rows(z, other, D, at_d, DC), tl.load(numbers(z, INV) + other)) - y
    weight = tl.load(numbers(x, WEIGHT) + rows, mask=there, other=0.0) * sign
    sums += weight[:, None] * apart
    if CHUNKS > 1:
        along += tl.load(numbers(x, ALONG) + rows, mask=there, other=0.0) * sign
    return sums, along


@triton.jit
def _add_targets(
    sums, along, start, stop, x, rows, first, z, PICK: tl.constexpr, WEIGHT: tl.constexpr, ALONG: tl.constexpr, sign, D, at_d,
    CHUNKS: tl.constexpr, BM: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """Add what rows first to first + BM get from those anchors, start to stop, that have picked one of them."""
    for begin in range(start, stop, _SCAN):
        anchors = begin + tl.arange(0, _SCAN)
        picked = tl.load(integers(z, PICK) + anchors, mask=anchors < stop, other=-1)
        left = tl.where((picked >= first) & (picked < first + BM), anchors, LAST)
        anchor = tl.min(left, 0)
        while anchor < LAST:
            row, weight = tl.load(integers(z, PICK) + anchor), tl.load(numbers(z, WEIGHT) + anchor) * sign
            columns = at_d + tl.arange(0, DC)
            y_a = unit_column(z, anchor, tl.load(numbers(z, INV) + anchor), columns, D)
            apart = weight * (y_a - unit_column(x, row, tl.load(numbers(x, INV) + row), columns, D))
            here = rows == row
            sums += tl.where(here[:, None], apart[None, :], 0.0)
            if CHUNKS > 1:  # <z_p, y_a - z_p> is -(d² + <y_a, z_p - y_a>), here over d; |weight| is 1 / d
                along -= tl.where(here, tl.load(numbers(z, ALONG) + anchor) * sign + 1.0 / weight, 0.0)
            left = tl.where(left == anchor, LAST, left)
            anchor = tl.min(left, 0)
    return sums, along


def _gradient_tiles(rows: int, others: int, s: Shape) -> Tiles:
    """Return tiles of the backward pass: few rows each, which are added to one by one, and no program shares them.

    NVIDIA H200, 2026-12-01, 32,768 bfloat16 rows: a pair of 894 us with one warp, 920 with four.
    """
    BM = max(_FEWEST, min(16, 1 << max(0, max(rows, others) // 512 - 1).bit_length()))
    return replace(tiles(rows, others, s), BM=BM, splits=1, warps=1 if BM in (2, 16) else 2)


def _plan(s: Shape) -> Plan:
    t, room = forward_tiles(s.rows, s.others, s), Room()
    arranged, blocks = arrange(s, room, own=anchor_numbers(s.width)), t.row_blocks(s.rows)  # first: `mined` reads it there
    at_sums, at_scale = room.doubles(2 * blocks), room.doubles(1)
    at_keys = room.doubles(2 * t.programs(s.rows) * t.BM if t.splits > 1 else 0)
    back = Backward(s, room, least=1 + blocks, tiles=_gradient_tiles)
    own = {**arranged.constants, "SELF": not s.reference_set, "LATE": t.splits == 1 and s.others >= _LATE, "BANDS": bands(s)}
    places = (*arranged.places, at_sums, at_scale, at_keys, back.at_counters, *s.settings)
    return Plan(
        room=room.words,
        sort=arranged.sort,
        forward=(arranged.launch(back.at_counters, back.counters), Launch(_forward_kernel, t.programs(s.rows), t, places, own)),
        backward=back.launches(_backward_kernel, (*arranged.places, at_scale), own),
    )


register("batch_hard_triplet", _plan)


def batch_hard_triplet_loss(
    embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None,
    *, margin: float = 0.05, tf32: bool = False,
) -> Tensor:  # fmt: skip
    """Return what `BatchHardTripletLoss` with these settings returns, without a module."""
    return evaluate("batch_hard_triplet", {"margin": margin}, tf32, embeddings, labels, ref_emb, ref_labels)


class BatchHardTripletLoss(FusedLoss):
    """Batch-hard triplet loss as TripletMarginLoss with BatchHardMiner, fused: memory O(N), no host synchronisation.

    Called with embeddings [N, D] (float32, bfloat16 or float16 on a CUDA device; D to 1024, N to 2^20; other rows go to
    the plain reference), labels [N] of any integer type, and optionally a reference set ref_emb [M, D] and ref_labels
    [M]. Returns a float32 scalar; gradients have the type of their rows. Deterministic. tf32: mine float32 rows in TF32,
    which picks another row where two distances nearly tie. Raises PmlkitError for a constructor argument or a tuple that
    is not fused, and for labels that do not fit.
    """

    def __init__(self, margin: float = 0.05, *, tf32: bool = False, **unsupported: Any) -> None:
        equivalent = "losses.TripletMarginLoss with miners.BatchHardMiner"
        super().__init__("batch_hard_triplet", equivalent, {"margin": float(margin)}, tf32, unsupported)
