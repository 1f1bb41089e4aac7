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

from pmlkit.losses.elementary import any_of
from pmlkit.losses.fused import register
from pmlkit.losses.handover import arrive, counters, floats, pick, totals
from pmlkit.losses.launch import Backward, Launch, Plan, Room, Shape
from pmlkit.losses.lengths import row_stats
from pmlkit.losses.module import FusedLoss, evaluate
from pmlkit.losses.rows import reference_set, root, squared_distances, tied, unit_rows
from pmlkit.losses.tiles import FAR, cosines, edge, finish_rows, halves_equal, load_rows, ready_rows, unit
from pmlkit.losses.tiling import Tiles, tiles

Triplets = tuple[Tensor, Tensor, Tensor]


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


@torch.no_grad()
def mine(emb_ND: Tensor, labels_N: Tensor, *, ref_emb_MD: Tensor | None = None, ref_labels_M: Tensor | None = None) -> Triplets:
    """Return anchors, positives and negatives: int64, ascending anchors, ties to the first index. Rule: BatchHardMiner.

    Positives and negatives index the reference rows if there are any. Raises PmlkitError for labels that do not fit
    the rows, or for half a reference set.
    """
    refs_MD, refs_M, dtype = reference_set(emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    if not len(labels_N) or not len(refs_M):
        none = torch.zeros(0, dtype=torch.int64, device=emb_ND.device)
        return none, none, none
    positive_NM = labels_N[:, None] == refs_M[None, :]
    negative_NM = ~positive_NM
    if ref_emb_MD is None:
        positive_NM.fill_diagonal_(False)
    y_ND, z_MD = unit_rows(emb_ND.to(dtype)), unit_rows(refs_MD.to(dtype))
    sq_NM = squared_distances(y_ND, z_MD, positive_NM | negative_NM)
    anchors_T = (positive_NM.any(1) & negative_NM.any(1)).nonzero()[:, 0]
    sq_NM = sq_NM[:, _first_copies(z_MD)]
    farthest_N = sq_NM.masked_fill(~positive_NM, -torch.inf).argmax(1)
    nearest_N = sq_NM.masked_fill(~negative_NM, torch.inf).argmin(1)
    return anchors_T, farthest_N[anchors_T], nearest_N[anchors_T]


def _first_copies(rows_MD: Tensor) -> Tensor:
    """Return for every row the first index of an identical row.

    A matrix product may round equal columns differently, so copies would otherwise not tie.
    """
    # NaN has no order and must not reach the sort.
    _, copy_M = torch.unique(rows_MD.nan_to_num(), dim=0, return_inverse=True)
    index_M = torch.arange(len(rows_MD), device=rows_MD.device)
    return torch.full_like(index_M, len(rows_MD)).scatter_reduce(0, copy_M, index_M, "amin")[copy_M]


# Triplets nearer than this are added to their targets' gradients by differences, the others by a product. float32: as
# the reference. Half-precision gradients: where float32 sums of unit rows still give 1e-5.
_NEAR = {torch.float32: 0.05**0.5, torch.bfloat16: 0.01, torch.float16: 0.01}
_STATS = 8  # numbers a row: two of row_stats and the six that _judge writes


@triton.jit
def _forward_kernel(
    x_ptr, label_ptr, z_ptr, z_label_ptr, room_ptr, loss_ptr,
    N, M, D, at_x, at_z, at_sums, at_scale, at_keys, at_counters, margin,
    SELF: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Mine, then judge the triplets of a row block in the last program that shares it. Reads N·M/BM rows.

    Programs hand each other keys, (rank of the distance << 32) | rank of the column: the largest is the first of the equal
    best columns. A distance that is not negative is ordered as its bits are. Negative: no column.
    """
    x_stats, z_stats, counter_ptr = floats(room_ptr, at_x), floats(room_ptr, at_z), counters(room_ptr, at_counters)
    sums_ptr, scale_ptr, keys_ptr = room_ptr + at_sums, room_ptr + at_scale, (room_ptr + at_keys).to(tl.pointer_type(tl.int64))
    split, block = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    inside = tl.arange(0, BM)
    rows = block * BM + inside
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    sq_x = tl.load(x_stats + N + rows, mask=rows < N, other=1.0)
    label = tl.load(label_ptr + rows, mask=rows < N, other=0)
    high, low = tl.full([BM], -1.0, tl.float32), tl.full([BM], FAR, tl.float32)
    at_high, at_low = tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32)
    x = ready_rows(x_ptr, rows, N, inv_x, D, 0, BK)
    share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
    for first in range(split * share, tl.minimum(split * share + share, M), BN):
        columns = first + tl.arange(0, BN)
        inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
        sq_z = tl.load(z_stats + M + columns, mask=columns < M, other=1.0)
        label_z = tl.load(z_label_ptr + columns, mask=columns < M, other=0)
        z = load_rows(z_ptr, columns, M, D, 0, BK)
        tile = cosines(x, x_ptr, rows, N, inv_x, -2.0, z, z_ptr, columns, M, inv_z, D, BM, BN, BK, ONE, PREC)
        squares = tl.maximum(tile + sq_z[None, :] + sq_x[:, None], 0.0)  # NaN has no order: 0, like copies
        if edge(block * BM, first, N, M, SELF, BM, BN):
            wanted = (rows < N)[:, None] & (columns < M)[None, :]
            if SELF:
                wanted &= rows[:, None] != columns[None, :]
            squares = tl.where(wanted, squares, FAR)
        if any_of(halves_equal(label, label_z)):  # most tiles of a large batch have no positive
            same = label[:, None] == label_z[None, :]
            held = tl.where(same & (squares < FAR), squares, -1.0)
            best = tl.max(held, 1)
            at = tl.min(tl.where(held == best[:, None], columns[None, :], 0x7FFFFFFF), 1)
            at_high = tl.where(best > high, at, at_high)
            high = tl.maximum(best, high)
            squares = tl.where(same, FAR, squares)
        best = tl.min(squares, 1)
        at = tl.min(tl.where(squares == best[:, None], columns[None, :], 0x7FFFFFFF), 1)
        at_low = tl.where(best < low, at, at_low)
        low = tl.minimum(best, low)
    far_rank, near_rank = high.to(tl.int32, bitcast=True), 0x7FFFFFFF - low.to(tl.int32, bitcast=True)
    farthest = tl.where(high >= 0, (far_rank.to(tl.int64) << 32) | (0x7FFFFFFF - at_high).to(tl.int64), -1)
    nearest = tl.where(low < FAR, (near_rank.to(tl.int64) << 32) | (0x7FFFFFFF - at_low).to(tl.int64), -1)
    blocks = tl.num_programs(0) // SPLITS
    if SPLITS > 1:
        place = keys_ptr + block * SPLITS * 2 * BM + inside
        tl.store(place + split * 2 * BM, farthest)
        tl.store(place + split * 2 * BM + BM, nearest)
        if arrive(counter_ptr + 1 + block, SPLITS):
            for other in range(SPLITS):
                farthest = tl.maximum(farthest, tl.load(place + other * 2 * BM))
                nearest = tl.maximum(nearest, tl.load(place + other * 2 * BM + BM))
            _judge(
                farthest, nearest, x_ptr, x_stats, z_ptr, z_stats, sums_ptr, scale_ptr, counter_ptr, loss_ptr,
                rows, block, blocks, N, M, D, margin, SELF, BM,
            )  # fmt: skip
    else:
        _judge(
            farthest, nearest, x_ptr, x_stats, z_ptr, z_stats, sums_ptr, scale_ptr, counter_ptr, loss_ptr,
            rows, block, blocks, N, M, D, margin, SELF, BM,
        )  # fmt: skip


@triton.jit
def _judge(
    farthest, nearest, x_ptr, x_stats, z_ptr, z_stats, sums_ptr, scale_ptr, counter_ptr, loss_ptr,
    rows, block, blocks, N, M, D, margin, SELF: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write p, n, 1/d_ip, 1/d_in and the parts of u and w along y_i of a row block, and its part of the loss.

    p and n are -1 for an anchor that is left out; the others are 0 where there is no gradient. The last block divides.
    """
    kept = (rows < N) & (farthest >= 0) & (nearest >= 0)
    p = tl.where(kept, 0x7FFFFFFF - (farthest & 0x7FFFFFFF), M).to(tl.int32)
    n = tl.where(kept, 0x7FFFFFFF - (nearest & 0x7FFFFFFF), M).to(tl.int32)
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    distance_p, along_p = _apart(  # pyright: ignore[reportGeneralTypeIssues]
        x_ptr, rows, N, inv_x, z_ptr, p, M, z_stats, D, BM
    )
    distance_n, along_n = _apart(x_ptr, rows, N, inv_x, z_ptr, n, M, z_stats, D, BM)
    violation = distance_p - distance_n + margin
    active = kept & (violation > 0)
    pull = tl.where(active & (distance_p > 0), 1.0 / tl.where(distance_p > 0, distance_p, 1.0), 0.0)
    push = tl.where(active & (distance_n > 0), 1.0 / tl.where(distance_n > 0, distance_n, 1.0), 0.0)
    tl.store(x_stats + 2 * N + rows, tl.where(kept, p, -1).to(tl.float32), mask=rows < N)  # exact: M is at most 2^20
    tl.store(x_stats + 3 * N + rows, tl.where(kept, n, -1).to(tl.float32), mask=rows < N)
    tl.store(x_stats + 4 * N + rows, pull, mask=rows < N)
    tl.store(x_stats + 5 * N + rows, push, mask=rows < N)
    tl.store(x_stats + 6 * N + rows, along_p * pull, mask=rows < N)
    tl.store(x_stats + 7 * N + rows, along_n * push, mask=rows < N)
    poison = tl.sum(inv_x * 0.0, 0)  # NaN for a row with NaN or Inf: it makes the loss and every gradient NaN
    if SELF == 0:
        share = tl.cdiv(M, blocks)
        for first in range(block * share, tl.minimum(block * share + share, M), 512):
            at = first + tl.arange(0, 512)
            poison += tl.sum(tl.load(z_stats + at, mask=at < M, other=0.0) * 0.0, 0)
    tl.store(sums_ptr + block, tl.sum(tl.where(active, violation, 0.0).to(tl.float64), 0) + poison)
    tl.store(sums_ptr + blocks + block, tl.sum(active.to(tl.float64), 0))
    if arrive(counter_ptr, blocks):
        sums = totals(sums_ptr, blocks, 2)
        violations = pick(sums, 0)
        scale = 1.0 / tl.maximum(pick(sums, 1), 1.0) + violations * 0.0
        tl.store(scale_ptr, scale)
        tl.store(loss_ptr, (violations * scale).to(tl.float32))


@triton.jit
def _apart(x_ptr, rows, N, inv_x, z_ptr, others, M, z_stats, D, BM: tl.constexpr):
    """Return |z - y_i| and <y_i, z - y_i> of every row with one other of its own, by differences, which keep digits."""
    squares, along = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    inv_z = tl.load(z_stats + others, mask=others < M, other=1.0)
    for k in range(0, D, 32):
        y = unit(load_rows(x_ptr, rows, N, D, k, 32), inv_x)
        apart = unit(load_rows(z_ptr, others, M, D, k, 32), inv_z) - y
        squares += tl.sum(apart * apart, 1)
        along += tl.sum(y * apart, 1)
    return tl.sqrt(squares), along


@triton.jit
def _add_own(sums, along, x_ptr, rows, N, inv_x, x_stats, push: tl.constexpr, z_ptr, z_stats, M, D, at_d, DC: tl.constexpr):
    """Add what rows get as anchors from their positives (push = 0) or their negatives (push = 1)."""
    y = unit(load_rows(x_ptr, rows, N, D, at_d, DC), inv_x)
    other = tl.load(x_stats + (2 + push) * N + rows, mask=rows < N, other=-1.0).to(tl.int32)
    other = tl.where(other < 0, M, other)
    z = unit(load_rows(z_ptr, other, M, D, at_d, DC), tl.load(z_stats + other, mask=other < M, other=1.0))
    weight = tl.load(x_stats + (4 + push) * N + rows, mask=rows < N, other=0.0) * (2 * push - 1)
    part = tl.load(x_stats + (6 + push) * N + rows, mask=rows < N, other=0.0) * (2 * push - 1)
    return sums + weight[:, None] * (z - y), along + part


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, label_ptr, z_ptr, z_label_ptr, room_ptr, out_ptr,
    N, M, D, at_x, at_z, at_scale, at_counters, at_partial,
    ANCHORS: tl.constexpr, TARGETS: tl.constexpr, NEAR: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of rows: as anchors (gathers p and n) and as targets of the z rows' triplets.

    Every program looks through the p and n of its share of anchors for its own rows: no atomics, no sort. Reads 6·M
    numbers a block, and the rows of anchors that have a target in it.
    """
    x_stats, z_stats, scale_ptr = floats(room_ptr, at_x), floats(room_ptr, at_z), room_ptr + at_scale
    chunk, split = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS % SPLITS
    block = tl.program_id(0) // (CHUNKS * SPLITS)
    rows = block * BM + tl.arange(0, BM)
    at_d = chunk * DC
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    scale = tl.load(grad_ptr).to(tl.float32) * tl.load(scale_ptr).to(tl.float32)
    sums, along = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32)
    if ANCHORS:  # noqa: SIM102  (known when compiling; the inner one is not)
        if split == 0:
            sums, along = _add_own(sums, along, x_ptr, rows, N, inv_x, x_stats, 0, z_ptr, z_stats, M, D, at_d, DC)
            sums, along = _add_own(sums, along, x_ptr, rows, N, inv_x, x_stats, 1, z_ptr, z_stats, M, D, at_d, DC)
    if TARGETS:
        share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
        drawn = tl.zeros([BM], tl.float32)
        for first in range(split * share, tl.minimum(split * share + share, M), BN):
            columns = first + tl.arange(0, BN)
            p = tl.load(z_stats + 2 * M + columns, mask=columns < M, other=-1.0).to(tl.int32)
            n = tl.load(z_stats + 3 * M + columns, mask=columns < M, other=-1.0).to(tl.int32)
            pull = tl.load(z_stats + 4 * M + columns, mask=columns < M, other=0.0)
            push = tl.load(z_stats + 5 * M + columns, mask=columns < M, other=0.0)
            hits = ((p // BM == block) & (pull > 0)) | ((n // BM == block) & (push > 0))
            if tl.max(hits.to(tl.int32), 0) > 0:
                # <z_p, y_c - z_p> is -(d² + <y_c, z_p - y_c>), here over d
                toward_p = tl.load(z_stats + 6 * M + columns, mask=columns < M, other=0.0) + 1.0 / tl.maximum(pull, 1e-30)
                toward_n = tl.load(z_stats + 7 * M + columns, mask=columns < M, other=0.0) + 1.0 / tl.maximum(push, 1e-30)
                hit_p = (p[None, :] == rows[:, None]) & (pull > 0)[None, :]
                hit_n = (n[None, :] == rows[:, None]) & (push > 0)[None, :]
                weight = tl.where(hit_n, push[None, :], 0.0) - tl.where(hit_p, pull[None, :], 0.0)
                along += tl.sum(tl.where(hit_p, toward_p[None, :], 0.0) - tl.where(hit_n, toward_n[None, :], 0.0), 1)
                near = tl.abs(weight) * NEAR > 1.0
                while tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:  # the first near anchor of every row at once
                    at = tl.argmax(near.to(tl.int32), 1)
                    here = near & (columns[None, :] == (first + at)[:, None])
                    alone = tl.sum(tl.where(here, weight, 0.0), 1)
                    c = tl.where(alone != 0, first + at, M)
                    inv_c = tl.load(z_stats + c, mask=c < M, other=1.0)
                    z = unit(load_rows(z_ptr, c, M, D, at_d, DC), inv_c)
                    sums += alone[:, None] * (z - unit(load_rows(x_ptr, rows, N, D, at_d, DC), inv_x))
                    weight = tl.where(here, 0.0, weight)
                    near &= here == 0
                drawn += tl.sum(weight, 1)
                inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
                z = unit(load_rows(z_ptr, columns, M, D, at_d, DC), inv_z)
                sums = tl.dot(weight, z, sums, input_precision="tf32x3")  # TF32 would lose what near pairs need
        sums -= drawn[:, None] * unit(load_rows(x_ptr, rows, N, D, at_d, DC), inv_x)
    finish_rows(
        sums * scale, along * scale, x_ptr, rows, N, inv_x, D, at_d, block, split, chunk, scale * 0.0,
        counters(room_ptr, at_counters), floats(room_ptr, at_partial), out_ptr, SPLITS, CHUNKS, BM, DC,
    )  # fmt: skip


def _gradient_tiles(rows: int, others: int, width: int, dtype: torch.dtype, tf32: bool = False) -> Tiles:
    """Return tiles of the backward pass: small, for its sums and gathered rows are float32 and all stay in registers."""
    t = tiles(rows, others, width, dtype)
    return replace(t, BM=min(t.BM, 64), BN=32)


def _plan(s: Shape) -> Plan:
    t = tiles(s.rows, s.others, s.width, s.dtype, s.tf32)
    blocks, room = t.row_blocks(s.rows), Room()
    at_x = room.floats(_STATS * s.rows)  # first: `mined` reads them there
    at_z = room.floats(_STATS * s.others) if s.reference_set else at_x
    at_sums, at_scale = room.doubles(2 * blocks), room.doubles(1)
    at_keys = room.doubles(2 * t.programs(s.rows) * t.BM if t.splits > 1 else 0)
    back = Backward(s, room, at_x, at_z, least=1 + blocks, tiles=_gradient_tiles)
    sizes = (s.rows, s.others, s.width, at_x, at_z, at_sums, at_scale, at_keys, back.at_counters, *s.settings)
    rows = {"ANCHORS": True, "TARGETS": not s.reference_set, "NEAR": _NEAR[s.dtype]}
    return Plan(
        forward=(
            row_stats(s, at_x, at_z, back.at_counters, back.counters),
            Launch(_forward_kernel, t.programs(s.rows), t, sizes, {"SELF": not s.reference_set}),
        ),
        backward=back.launches(_backward_kernel, (at_scale,), (), rows, {**rows, "ANCHORS": False, "TARGETS": True}),
        room=room.words,
    )


register("batch_hard_triplet", _plan)


def mined(loss: Tensor) -> Triplets:
    """Return what a fused loss, computed eagerly of rows that need a gradient, has picked: as `mine` does."""
    emb_ND, *_, room = loss.grad_fn.saved_tensors  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    rows = emb_ND.shape[0]
    positive_N, negative_N = room.view(torch.float32)[2 * rows : 4 * rows].view(2, rows).long()
    anchors_T = (positive_N >= 0).nonzero()[:, 0]
    return anchors_T, positive_N[anchors_T], negative_N[anchors_T]


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
