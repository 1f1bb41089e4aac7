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

from pmlkit.losses.elementary import any_of, inverse_root, square_root
from pmlkit.losses.fused import register
from pmlkit.losses.handover import arrive, counters, floats, pick, poison_of, totals
from pmlkit.losses.launch import Backward, Launch, Plan, Room, Shape
from pmlkit.losses.lengths import row_stats
from pmlkit.losses.module import FusedLoss, evaluate
from pmlkit.losses.rows import reference_set, root, squared_distances, tied, unit_rows
from pmlkit.losses.tiles import (
    FAR,
    add_weighted,
    cosines,
    differences,
    edge,
    finish_rows,
    halves_equal,
    load_rows,
    ready_rows,
    unit,
    unit_column,
)
from pmlkit.losses.tiling import tiles


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


@triton.jit
def _forward_kernel(
    x_ptr, label_ptr, z_ptr, z_label_ptr, room_ptr, loss_ptr,
    N, M, D, at_x, at_z, at_sums, at_scale, at_counters, pos_margin, neg_margin,
    SELF: tl.constexpr, NEAR: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Sum what positives and negatives contribute, and count them. The last program divides. Reads N·M/BM rows."""
    x_stats, z_stats, sums_ptr, scale_ptr = (
        floats(room_ptr, at_x),
        floats(room_ptr, at_z),
        room_ptr + at_sums,
        room_ptr + at_scale,
    )
    program, programs = tl.program_id(0), tl.num_programs(0)
    rows = program // SPLITS * BM + tl.arange(0, BM)
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    sq_x = tl.load(x_stats + N + rows, mask=rows < N, other=1.0)
    label = tl.load(label_ptr + rows, mask=rows < N, other=0)
    pulled, pushed = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    pulls, pushes = tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32)
    x = ready_rows(x_ptr, rows, N, inv_x, D, 0, BK)
    share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
    begin = program % SPLITS * share
    end = tl.minimum(begin + share, M)
    if SELF:  # a pair (i, j) is worth what (j, i) is: only j > i
        begin = tl.maximum(begin, program // SPLITS * BM // BN * BN)
    pull_from, push_to = _limits(pos_margin, neg_margin)
    for first in range(begin, end, BN):
        columns = first + tl.arange(0, BN)
        inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
        sq_z = tl.load(z_stats + M + columns, mask=columns < M, other=1.0)
        label_z = tl.load(z_label_ptr + columns, mask=columns < M, other=0)
        z = load_rows(z_ptr, columns, M, D, 0, BK)
        tile = cosines(x, x_ptr, rows, N, inv_x, -2.0, z, z_ptr, columns, M, inv_z, D, BM, BN, BK, ONE, PREC)
        squares = tile + sq_z[None, :] + sq_x[:, None]
        if edge(program // SPLITS * BM, first, N, M, SELF, BM, BN):
            wanted = (rows < N)[:, None] & (columns < M)[None, :]
            if SELF:
                wanted &= rows[:, None] < columns[None, :]
            squares = tl.where(wanted, squares, FAR)
        least, alike = tl.min(squares), any_of(halves_equal(label, label_z))
        if alike | (least < tl.maximum(push_to, NEAR)):  # many tiles of random rows have nothing to add
            if least < NEAR:
                left = tl.max((squares < NEAR).to(tl.int32), 0)
                while tl.max(left, 0) > 0:
                    at = tl.argmax(left, 0)
                    exact, _ = differences(x_ptr, rows, N, inv_x, z_ptr, first + at, tl.load(z_stats + first + at), D, BM)
                    here = (columns[None, :] == first + at) & (squares < NEAR)
                    squares = tl.where(here, exact[:, None], squares)
                    left = tl.where(columns == first + at, 0, left)
            distance = square_root(squares)
            push = squares < push_to
            if alike:
                same = label[:, None] == label_z[None, :]
                push &= same == 0
                pull = same & (squares > pull_from) & (squares < FAR)
                pulled += tl.sum(tl.where(pull, distance - pos_margin, 0.0), 1)
                pulls += tl.sum(pull.to(tl.int32), 1)
            pushed += tl.sum(tl.where(push, neg_margin - distance, 0.0), 1)
            pushes += tl.sum(push.to(tl.int32), 1)
    poison = inv_x * 0.0  # NaN for a row with NaN or Inf: it makes the loss and every gradient NaN
    if SELF == 0:
        poison += poison_of(z_stats, M, program, programs)
    tl.store(sums_ptr + program, tl.sum((pulled + poison).to(tl.float64), 0))
    tl.store(sums_ptr + programs + program, tl.sum(pushed.to(tl.float64), 0))
    tl.store(sums_ptr + 2 * programs + program, tl.sum(pulls.to(tl.float64), 0))
    tl.store(sums_ptr + 3 * programs + program, tl.sum(pushes.to(tl.float64), 0))
    if arrive(counters(room_ptr, at_counters), programs):
        sums = totals(sums_ptr, programs, 4)
        pull_sum, push_sum, pull_count, push_count = pick(sums, 0), pick(sums, 1), pick(sums, 2), pick(sums, 3)
        per_pull = 1.0 / tl.maximum(pull_count, 1.0) + pull_sum * 0.0
        per_push = 1.0 / tl.maximum(push_count, 1.0) + pull_sum * 0.0
        tl.store(scale_ptr, per_pull)
        tl.store(scale_ptr + 1, per_push)
        tl.store(loss_ptr, (pull_sum * per_pull + push_sum * per_push).to(tl.float32))


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, label_ptr, z_ptr, z_label_ptr, room_ptr, out_ptr,
    N, M, D, at_x, at_z, at_scale, at_counters, at_partial, pos_margin, neg_margin,
    SELF: tl.constexpr, NEAR: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, DC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows: sum_j W_ij y_j without its part along y_i, over the length. Builds W again."""
    x_stats, z_stats, scale_ptr = floats(room_ptr, at_x), floats(room_ptr, at_z), room_ptr + at_scale
    chunk, split = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS % SPLITS
    block = tl.program_id(0) // (CHUNKS * SPLITS)
    rows = block * BM + tl.arange(0, BM)
    at_d = chunk * DC
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    sq_x = tl.load(x_stats + N + rows, mask=rows < N, other=1.0)
    label = tl.load(label_ptr + rows, mask=rows < N, other=0)
    grad = tl.load(grad_ptr).to(tl.float32)  # a row of SELF has each pair twice, of twice as many
    per_pull, per_push = grad * tl.load(scale_ptr).to(tl.float32), grad * tl.load(scale_ptr + 1).to(tl.float32)
    sums, along = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32)
    x = ready_rows(x_ptr, rows, N, inv_x, D, 0, BK)
    share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
    pull_from, push_to = _limits(pos_margin, neg_margin)
    for first in range(split * share, tl.minimum(split * share + share, M), BN):
        columns = first + tl.arange(0, BN)
        inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
        sq_z = tl.load(z_stats + M + columns, mask=columns < M, other=1.0)
        label_z = tl.load(z_label_ptr + columns, mask=columns < M, other=0)
        z = load_rows(z_ptr, columns, M, D, 0, BK)
        tile = cosines(x, x_ptr, rows, N, inv_x, -2.0, z, z_ptr, columns, M, inv_z, D, BM, BN, BK, ONE, PREC)
        squares = tile + sq_z[None, :] + sq_x[:, None]
        if edge(block * BM, first, N, M, SELF, BM, BN):
            wanted = (rows < N)[:, None] & (columns < M)[None, :]
            if SELF:
                wanted &= rows[:, None] != columns[None, :]
            squares = tl.where(wanted, squares, FAR)
        least, alike = tl.min(squares), any_of(halves_equal(label, label_z))
        if alike | (least < tl.maximum(push_to, NEAR)):
            if least < NEAR:
                left = tl.max((squares < NEAR).to(tl.int32), 0)
                while tl.max(left, 0) > 0:
                    at = tl.argmax(left, 0)
                    here = tl.min(tl.where(columns[None, :] == first + at, squares, FAR), 1) < NEAR
                    inv_c = tl.load(z_stats + first + at)
                    exact, along_c = differences(x_ptr, rows, N, inv_x, z_ptr, first + at, inv_c, D, BM)
                    same = label == tl.load(z_label_ptr + first + at)
                    alone = tl.where(exact < push_to, per_push, 0.0)
                    alone = tl.where(same, tl.where(exact > pull_from, -per_pull, 0.0), alone)
                    alone = tl.where(here & (exact > 0), alone * inverse_root(tl.maximum(exact, 1e-30)), 0.0)
                    d = at_d + tl.arange(0, DC)
                    z_c = unit_column(z_ptr, first + at, inv_c, d, D)
                    sums += alone[:, None] * (z_c[None, :] - unit(load_rows(x_ptr, rows, N, D, at_d, DC), inv_x))
                    along += alone * along_c
                    left = tl.where(columns == first + at, 0, left)
                squares = tl.where(squares < NEAR, FAR, squares)  # those are done
            inverse = inverse_root(squares)
            weight = tl.where(squares < push_to, per_push * inverse, 0.0)
            if alike:
                same = label[:, None] == label_z[None, :]
                pull = (squares > pull_from) & (squares < FAR)
                weight = tl.where(same, tl.where(pull, -per_pull * inverse, 0.0), weight)
            sums, along = add_weighted(
                sums, along, weight, tile * -0.5, z, z_ptr, columns, M, inv_z, D, at_d, CHUNKS, BK, DC, PREC
            )  # fmt: skip
    finish_rows(
        sums, along, x_ptr, rows, N, inv_x, D, at_d, block, split, chunk, per_pull * 0.0,
        counters(room_ptr, at_counters), floats(room_ptr, at_partial), out_ptr, SPLITS, CHUNKS, BM, DC,
    )  # fmt: skip


@triton.jit
def _limits(pos_margin, neg_margin):
    """Return the squared distances from which positives are pulled and up to which negatives are pushed."""
    return tl.where(pos_margin >= 0, pos_margin * pos_margin, -1.0), tl.where(neg_margin > 0, neg_margin * neg_margin, 0.0)


def _plan(s: Shape) -> Plan:
    t = tiles(s.rows, s.others, s.width, s.dtype, s.tf32)
    programs, room = t.programs(s.rows), Room()
    at_x = room.floats(2 * s.rows)
    at_z = room.floats(2 * s.others) if s.reference_set else at_x
    at_sums, at_scale, back = room.doubles(4 * programs), room.doubles(2), Backward(s, room, at_x, at_z)
    sides = {"SELF": not s.reference_set, "NEAR": _NEAR[s.dtype]}
    sizes = (s.rows, s.others, s.width, at_x, at_z, at_sums, at_scale, back.at_counters, *s.settings)
    return Plan(
        forward=(row_stats(s, at_x, at_z, back.at_counters, back.counters), Launch(_forward_kernel, programs, t, sizes, sides)),
        backward=back.launches(_backward_kernel, (at_scale,), s.settings, sides),
        room=room.words,
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
