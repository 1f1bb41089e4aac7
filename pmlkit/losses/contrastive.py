"""Contrastive loss: positives are pulled below one distance, negatives pushed beyond another.

With y = row / max(|row|, 1e-12), z the same of the reference rows (y itself without them) and d_ij = |y_i - z_j|:

    positives: equal labels (without reference rows i != j); negatives: different labels; ordered pairs, each counts
    P+ = #{positive (i, j): d_ij > pos_margin}          N- = #{negative (i, j): d_ij < neg_margin}
    loss = 1/P+ sum_positives max(d_ij - pos_margin, 0) + 1/N- sum_negatives max(neg_margin - d_ij, 0)

A part whose count is 0 is 0. This is ContrastiveLoss of pytorch-metric-learning 2.9.0, except that identical rows are
at distance 0 with gradient 0 at every N (so that identical positives are no term), a row shorter than 1e-12 has
gradient 0, a NaN or Inf anywhere makes the loss and every gradient NaN, and a single pair is a pair.

Cost of the reference: three products of 2·N·M·D operations a pair, about seven N x M matrices alive at the peak, or
eleven if all rows are near.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.losses.arrange import arrange
from pmlkit.losses.elementary import inverse_root, square_root
from pmlkit.losses.fused import register
from pmlkit.losses.handover import arrive, counters, floats, pick, poison_of, totals
from pmlkit.losses.launch import Backward, Launch, Plan, Room
from pmlkit.losses.module import FusedLoss, evaluate
from pmlkit.losses.rows import reference_set, root, squared_distances, tied, unit_rows
from pmlkit.losses.sides import (
    BEGIN,
    END,
    INV,
    SCALE,
    SQUARE,
    integers,
    left_fit,
    left_rows,
    numbers,
    raw_rows,
    right_fit,
    right_rows,
    scale_of,
    side,
    unit,
)
from pmlkit.losses.tiles import (
    FAR,
    add_weighted,
    band,
    careful_tile,
    cosines,
    differences,
    finish_rows,
    plain_tile,
    positives,
    share,
    unit_column,
)
from pmlkit.losses.tiling import Shape, bands, fresh, tiles


def reference(
    emb_ND: Tensor,
    labels_N: Tensor,
    *,
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    ref_emb_MD: Tensor | None = None,
    ref_labels_M: Tensor | None = None,
) -> Tensor:
    """Return the loss as a scalar: float64 for float64 rows, else float32. Formula: pytorch-metric-learning 2.9.0.

    emb_ND, ref_emb_MD: floating-point rows; labels_N, ref_labels_M: any integer type, compared by value.
    Raises PmlkitError for labels that do not fit the rows, or for half a reference set.
    """
    refs_MD, refs_M, dtype = reference_set(emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    y_ND = unit_rows(emb_ND.to(dtype))
    z_MD = y_ND if ref_emb_MD is None else unit_rows(refs_MD.to(dtype))
    positive_NM = labels_N[:, None] == refs_M[None, :]
    negative_NM = ~positive_NM
    if ref_emb_MD is None:
        positive_NM.fill_diagonal_(False)

    dist_NM = root(squared_distances(y_ND, z_MD, positive_NM | negative_NM))
    pull_NM = positive_NM & (dist_NM > pos_margin)
    push_NM = negative_NM & (dist_NM < neg_margin)
    pulled = torch.where(pull_NM, dist_NM - pos_margin, 0).sum() / pull_NM.sum().clamp(min=1)
    pushed = torch.where(push_NM, neg_margin - dist_NM, 0).sum() / push_NM.sum().clamp(min=1)
    return tied(pulled + pushed, emb_ND, ref_emb_MD)


# Pairs nearer than this (squared) are measured by differences. float32: as the reference. Half-precision rows, whose
# products are exact: far enough from the 1e-7 that float32 sums lose, so that copies are at distance 0.
_NEAR = {torch.float32: 0.05, torch.bfloat16: 2e-3, torch.float16: 2e-3}
_LIFT = tl.constexpr(1024.0)  # the largest weight, 1 / sqrt(2e-3) times a fit below 2, stays in float16's range


@triton.jit
def _forward_kernel(
    x_ptr, x_label_ptr, z_ptr, z_label_ptr, room_ptr, loss_ptr,
    N, M, D, at_x, at_z, ready_x, ready_z, at_sums, at_scale, at_counters, pos_margin, neg_margin,
    SELF: tl.constexpr, NEAR: tl.constexpr, SPLITS: tl.constexpr, BANDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Sum what positives and negatives contribute, and count them. The last program divides. Reads N·M/BM rows.

    Without reference rows a pair (i, j) is worth what (j, i) is: only j > i is looked at. Near negatives are left for a
    second look, which few blocks need.
    """
    x, z = side(x_ptr, room_ptr, at_x, ready_x, N), side(z_ptr, room_ptr, at_z, ready_z, M)
    program, programs = tl.program_id(0), tl.num_programs(0)
    block, split = program // SPLITS, program % SPLITS
    rows = block * BM + tl.arange(0, BM)
    begin, end = tl.load(integers(x, BEGIN) + rows), tl.load(integers(x, END) + rows)
    fit_x, sq_x = left_fit(x, rows, -2.0, READY), tl.load(numbers(x, SQUARE) + rows)
    sq_x = tl.where(rows < N, sq_x, FAR)  # rows that are not there are near none
    inv_x = tl.load(numbers(x, INV) + rows)
    x_parts = left_rows(x, rows, D, 0, BK, W, PARTS, READY)
    pulled, pushed = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    pulls, pushes, lowest = tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32), tl.full([BM], FAR, tl.float32)
    pull_from, push_to = _limits(pos_margin, neg_margin)
    first, wide, full = band(x, block, M, BM, BN, BANDS)
    from_tile, to_tile = share(tl.where(SELF, first, 0), full - wide, split, SPLITS)
    if BANDS:
        for k in range(from_tile, to_tile):
            columns = plain_tile(k, first, wide) * BN + tl.arange(0, BN)
            squares = _squares(x, rows, x_parts, fit_x, sq_x, z, columns, D, BM, BN, BK, W, PARTS, READY)[2]
            push = (squares < push_to) & (squares >= NEAR)
            pushed += tl.sum(tl.where(push, neg_margin - square_root(squares), 0.0), 1)
            pushes += tl.sum(push.to(tl.int32), 1)
            lowest = tl.minimum(lowest, tl.min(squares, 1))
    careful = tl.cdiv(wide + tl.cdiv(M, BN) - full - split, SPLITS)
    again = tl.where(tl.min(lowest, 0) < NEAR, to_tile - from_tile, 0)
    for k in tl.range(0, careful + again, num_stages=1 if BANDS else None):
        k_tile = _second_look(k, careful, split, SPLITS, from_tile, first, wide, full)
        columns = k_tile * BN + tl.arange(0, BN)
        squares = _squares(x, rows, x_parts, fit_x, sq_x, z, columns, D, BM, BN, BK, W, PARTS, READY)[2]
        wanted = (rows < N)[:, None] & (columns < M)[None, :] & ((k < careful) | (squares < NEAR))
        if SELF:
            wanted &= rows[:, None] < columns[None, :]
        squares = tl.where(wanted, squares, FAR)
        if tl.min(squares) < NEAR:
            left = tl.max((squares < NEAR).to(tl.int32), 0)
            while tl.max(left, 0) > 0:
                at = k_tile * BN + tl.argmax(left, 0)
                exact = differences(x, rows, inv_x, z, at, tl.load(numbers(z, INV) + at), D, BM)[0]
                squares = tl.where((columns == at)[None, :] & (squares < NEAR), exact[:, None], squares)
                left = tl.where(columns == at, 0, left)
        same, distance = positives(begin, end, columns), square_root(squares)
        pull, push = same & (squares > pull_from) & (squares < FAR), (same == 0) & (squares < push_to)
        pulled += tl.sum(tl.where(pull, distance - pos_margin, 0.0), 1)
        pulls += tl.sum(pull.to(tl.int32), 1)
        pushed += tl.sum(tl.where(push, neg_margin - distance, 0.0), 1)
        pushes += tl.sum(push.to(tl.int32), 1)
    poison = inv_x * 0.0  # NaN for a row with NaN or Inf: it makes the loss and every gradient NaN
    if SELF == 0:
        poison += poison_of(numbers(z, INV), M, program, programs)
    _total(
        tl.sum((pulled + poison).to(tl.float64), 0), tl.sum(pushed.to(tl.float64), 0),
        tl.sum(pulls.to(tl.float64), 0), tl.sum(pushes.to(tl.float64), 0),
        room_ptr + at_sums, room_ptr + at_scale, counters(room_ptr, at_counters), loss_ptr, program, programs,
    )  # fmt: skip


@triton.jit
def _total(pulled, pushed, pulls, pushes, sums_ptr, scale_ptr, counter_ptr, loss_ptr, program, programs):
    """Add up what all programs have found; the last one writes the loss and how much a pull and a push are worth.

    Those are relative to the larger of the two, so that weights fit into float16; the third number takes it back. Where
    there are more than 1e7 times as many active negatives as positives, or the other way round, pairs of the larger kind
    in tiles that hold both lose digits: their float16 numbers are small.
    """
    tl.store(sums_ptr + program, pulled)
    tl.store(sums_ptr + programs + program, pushed)
    tl.store(sums_ptr + 2 * programs + program, pulls)
    tl.store(sums_ptr + 3 * programs + program, pushes)
    if arrive(counter_ptr, programs):
        sums = totals(sums_ptr, programs, 4)
        pull_sum, push_sum, pull_count, push_count = pick(sums, 0), pick(sums, 1), pick(sums, 2), pick(sums, 3)
        per_pull = tl.where(pull_count > 0, 1.0 / tl.maximum(pull_count, 1.0), 0.0)
        per_push = tl.where(push_count > 0, 1.0 / tl.maximum(push_count, 1.0), 0.0)
        larger = tl.maximum(tl.maximum(per_pull, per_push), 1e-30)
        tl.store(scale_ptr, per_pull / larger)
        tl.store(scale_ptr + 1, per_push / larger)
        tl.store(scale_ptr + 2, larger / (_LIFT * SCALE) + pull_sum * 0.0)
        tl.store(loss_ptr, (pull_sum * per_pull + push_sum * per_push).to(tl.float32))


@triton.jit
def _second_look(k, careful, split, SPLITS: tl.constexpr, from_tile, first, wide, full):
    """Return the k-th tile of a program after its plain ones: first its careful ones, then the plain ones again."""
    again = plain_tile(from_tile + k - careful, first, wide)
    return tl.where(k < careful, careful_tile(split + k * SPLITS, first, wide, full), again)


@triton.jit
def _squares(
    x, rows, x_parts, fit_x, sq_x, z, columns, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Return the column rows, their fits, the squared distances of a tile and -2 cosines."""
    z_parts, fit_z = right_rows(z, columns, D, 0, BK, W, PARTS, READY), right_fit(z, columns, READY)
    tile = cosines(x, rows, x_parts, fit_x, z, columns, z_parts, fit_z, D, BM, BN, BK, W, PARTS, READY)
    return z_parts, fit_z, tile + tl.load(numbers(z, SQUARE) + columns)[None, :] + sq_x[:, None], tile


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, z_ptr, room_ptr, out_x_ptr, out_z_ptr,
    N, M, D, at_x, at_z, ready_x, ready_z, at_scale, pos_margin, neg_margin, at_counters, at_partial, at_partial_z,
    SELF: tl.constexpr, NEAR: tl.constexpr, SIDES: tl.constexpr, FRESH: tl.constexpr, CHUNKS: tl.constexpr, BANDS: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, SPLITS_Z: tl.constexpr, BM_Z: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, DC: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows (SIDES 1), of the reference rows (2) or of both (3)."""
    x, z = side(x_ptr, room_ptr, at_x, ready_x, N), side(z_ptr, room_ptr, at_z, ready_z, M)
    program, blocks_z = tl.program_id(0), tl.cdiv(M, BM_Z) * CHUNKS
    counter_ptr, scale_ptr = counters(room_ptr, at_counters), room_ptr + at_scale
    grad = tl.load(grad_ptr).to(tl.float32)
    if SIDES == 1:
        _gradient(
            program, x, z, D, grad, scale_ptr, counter_ptr, floats(room_ptr, at_partial), out_x_ptr, pos_margin, neg_margin,
            SELF, NEAR, FRESH, CHUNKS, SPLITS, BANDS, BM, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip
    elif SIDES == 2 or program < blocks_z * SPLITS_Z:
        _gradient(
            program, z, x, D, grad, scale_ptr, counter_ptr, floats(room_ptr, at_partial_z), out_z_ptr, pos_margin, neg_margin,
            SELF, NEAR, FRESH, CHUNKS, SPLITS_Z, BANDS, BM_Z, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip
    else:
        _gradient(
            program - blocks_z * SPLITS_Z, x, z, D, grad, scale_ptr,
            counter_ptr + blocks_z, floats(room_ptr, at_partial), out_x_ptr, pos_margin, neg_margin,
            SELF, NEAR, FRESH, CHUNKS, SPLITS, BANDS, BM, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip


@triton.jit
def _gradient(
    program, x, z, D, grad, scale_ptr, counter_ptr, partial_ptr, out_ptr, pos_margin, neg_margin,
    SELF: tl.constexpr, NEAR: tl.constexpr, FRESH: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, BANDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, DC: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of rows: sum_j W_ij z_j without its part along y_i, over the length. Builds W again."""
    chunk, split, block = program % CHUNKS, program // CHUNKS % SPLITS, program // (CHUNKS * SPLITS)
    rows = block * BM + tl.arange(0, BM)
    begin, end = tl.load(integers(x, BEGIN) + rows), tl.load(integers(x, END) + rows)
    fit_x, sq_x = left_fit(x, rows, -2.0, READY), tl.load(numbers(x, SQUARE) + rows)
    x_parts = left_rows(x, rows, D, 0, BK, W, PARTS, READY)
    sums, along, lowest = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32), tl.full([BM], FAR, tl.float32)
    pull_from, push_to = _limits(pos_margin, neg_margin)
    first, wide, full = band(x, block, z[3], BM, BN, BANDS)
    from_tile, to_tile = share(0, full - wide, split, SPLITS)
    if BANDS:
        for k in range(from_tile, to_tile):
            columns = plain_tile(k, first, wide) * BN + tl.arange(0, BN)
            z_parts, fit_z, squares, tile = _squares(x, rows, x_parts, fit_x, sq_x, z, columns, D, BM, BN, BK, W, PARTS, READY)
            weight = tl.where((squares < push_to) & (squares >= NEAR), inverse_root(squares) * _LIFT, 0.0)
            lowest = tl.minimum(lowest, tl.min(squares, 1))
            sums, along = add_weighted(
                sums, along, weight, tile * -0.5, z, columns, z_parts, fit_z, D, chunk * DC, BK, W, DC, PARTS, READY, FRESH
            )
    # A push is worth up to N times less than a pull: what had all of float16's range is brought down only now.
    per_pull, per_push = tl.load(scale_ptr).to(tl.float32), tl.load(scale_ptr + 1).to(tl.float32)
    sums, along = sums * per_push, along * per_push
    careful = tl.cdiv(wide + tl.cdiv(z[3], BN) - full - split, SPLITS)
    again = tl.where(tl.min(lowest, 0) < NEAR, to_tile - from_tile, 0)
    for k in tl.range(0, careful + again, num_stages=1 if BANDS else None):
        k_tile = _second_look(k, careful, split, SPLITS, from_tile, first, wide, full)
        columns = k_tile * BN + tl.arange(0, BN)
        z_parts, fit_z, squares, tile = _squares(x, rows, x_parts, fit_x, sq_x, z, columns, D, BM, BN, BK, W, PARTS, READY)
        wanted = (rows < x[3])[:, None] & (columns < z[3])[None, :]
        if SELF:
            wanted &= rows[:, None] != columns[None, :]
        squares = tl.where(wanted, squares, FAR)
        if tl.min(squares) < NEAR:
            sums, along = _add_near(
                sums, along, squares, k_tile * BN, x, rows, begin, end, z, D, chunk * DC,
                per_pull, per_push, pull_from, push_to, NEAR, BM, BN, DC, READY,
            )  # fmt: skip
        if k < careful:
            inverse = inverse_root(squares) * _LIFT
            weight = tl.where(squares < push_to, per_push * inverse, 0.0)
            pull = tl.where((squares > pull_from) & (squares < FAR), -per_pull * inverse, 0.0)
            weight = tl.where(squares < NEAR, 0.0, tl.where(positives(begin, end, columns), pull, weight))
            sums, along = add_weighted(
                sums, along, weight, tile * -0.5, z, columns, z_parts, fit_z, D, chunk * DC, BK, W, DC, PARTS, READY, FRESH
            )
    factor = grad * tl.load(scale_ptr + 2).to(tl.float32)
    finish_rows(
        sums * (factor * SCALE / scale_of(READY)), along * (factor * SCALE),
        x, rows, D, chunk * DC, block, split, chunk, factor * 0.0,
        counter_ptr, partial_ptr, out_ptr, SPLITS, CHUNKS, BM, DC,
    )  # fmt: skip


@triton.jit
def _add_near(
    sums, along, squares, first, x, rows, begin, end, z, D, at_d, per_pull, per_push, pull_from, push_to,
    NEAR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DC: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Add what near pairs of a tile give by differences, column by column."""
    columns = first + tl.arange(0, BN)
    inv_x = tl.load(numbers(x, INV) + rows)
    left = tl.max((squares < NEAR).to(tl.int32), 0)
    while tl.max(left, 0) > 0:
        at = first + tl.argmax(left, 0)
        here = tl.min(tl.where((columns == at)[None, :], squares, FAR), 1) < NEAR
        inv_c = tl.load(numbers(z, INV) + at)
        exact, along_c = differences(x, rows, inv_x, z, at, inv_c, D, BM)
        alone = tl.where(exact < push_to, per_push, 0.0)
        alone = tl.where((at >= begin) & (at < end), tl.where(exact > pull_from, -per_pull, 0.0), alone)
        alone = tl.where(here & (exact > 0), alone * inverse_root(tl.maximum(exact, 1e-30)), 0.0) * _LIFT
        z_c = unit_column(z, at, inv_c, at_d + tl.arange(0, DC), D)
        sums += (alone * scale_of(READY))[:, None] * (z_c[None, :] - unit(raw_rows(x, rows, D, at_d, DC), inv_x))
        along += alone * along_c
        left = tl.where(columns == at, 0, left)
    return sums, along


@triton.jit
def _limits(pos_margin, neg_margin):
    """Return the squared distances from which positives are pulled and up to which negatives are pushed."""
    return tl.where(pos_margin >= 0, pos_margin * pos_margin, -1.0), tl.where(neg_margin > 0, neg_margin * neg_margin, 0.0)


def _plan(s: Shape) -> Plan:
    t, room = tiles(s.rows, s.others, s), Room()
    arranged, programs = arrange(s, room, own=0), t.programs(s.rows)
    at_sums, at_scale, back = room.doubles(4 * programs), room.doubles(3), Backward(s, room)
    own = {**arranged.constants, "SELF": not s.reference_set, "NEAR": _NEAR[s.dtype], "FRESH": fresh(s), "BANDS": bands(s)}
    places = (*arranged.places, at_sums, at_scale, back.at_counters, *s.settings)
    return Plan(
        room=room.words,
        sort=arranged.sort,
        forward=(arranged.launch(back.at_counters, back.counters), Launch(_forward_kernel, programs, t, places, own)),
        backward=back.launches(_backward_kernel, (*arranged.places, at_scale, *s.settings), own),
    )


register("contrastive", _plan)


def contrastive_loss(
    embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None,
    *, pos_margin: float = 0.0, neg_margin: float = 1.0, tf32: bool = False,
) -> Tensor:  # fmt: skip
    """Return what `ContrastiveLoss` with these settings returns, without a module."""
    return evaluate(
        "contrastive", {"pos_margin": pos_margin, "neg_margin": neg_margin}, tf32, embeddings, labels, ref_emb, ref_labels
    )


class ContrastiveLoss(FusedLoss):
    """Contrastive loss as ContrastiveLoss of pytorch-metric-learning, fused: memory O(N), no host synchronisation.

    Called with embeddings [N, D] (float32, bfloat16 or float16 on a CUDA device; D to 1024, N to 2^20; other rows go to
    the plain reference), labels [N] of any integer type, and optionally a reference set ref_emb [M, D] and ref_labels
    [M]. Returns a float32 scalar; gradients have the type of their rows. Deterministic. Raises PmlkitError for a
    constructor argument or a tuple that is not fused, and for labels that do not fit.
    """

    def __init__(self, pos_margin: float = 0, neg_margin: float = 1, *, tf32: bool = False, **unsupported: Any) -> None:
        settings = {"pos_margin": float(pos_margin), "neg_margin": float(neg_margin)}
        super().__init__("contrastive", "losses.ContrastiveLoss", settings, tf32, unsupported)
