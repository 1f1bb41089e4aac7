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

from pmlkit.losses.fused import Batch, Buffers, Kernels, Side, register
from pmlkit.losses.module import FusedLoss, evaluate
from pmlkit.losses.rows import reference_set, root, squared_distances, tied, unit_rows
from pmlkit.losses.tiles import (
    add_weighted,
    arrive,
    cosines,
    differences,
    finish_rows,
    load_rows,
    poison_of,
    row_stats,
    total,
    unit,
    unit_column,
)
from pmlkit.losses.tiling import launch, tiles


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
    x_ptr, label_ptr, x_stats, z_ptr, z_label_ptr, z_stats, sums_ptr, scale_ptr, counter_ptr, loss_ptr,
    N, M, D, pos_margin, neg_margin,
    SELF: tl.constexpr, NEAR: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Sum what positives and negatives contribute, and count them. The last program divides. Reads N·M/BM rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    rows = program // SPLITS * BM + tl.arange(0, BM)
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    sq_x = tl.load(x_stats + N + rows, mask=rows < N, other=1.0)
    label = tl.load(label_ptr + rows, mask=rows < N, other=0)
    pulled, pushed = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    pulls, pushes = tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32)
    share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
    begin = program % SPLITS * share
    for first in range(begin, tl.minimum(begin + share, M), BN):
        columns = first + tl.arange(0, BN)
        inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
        sq_z = tl.load(z_stats + M + columns, mask=columns < M, other=1.0)
        same = label[:, None] == tl.load(z_label_ptr + columns, mask=columns < M, other=0)[None, :]
        wanted = (rows < N)[:, None] & (columns < M)[None, :]
        if SELF:
            wanted &= rows[:, None] != columns[None, :]
        tile = cosines(x_ptr, rows, N, inv_x, z_ptr, columns, M, inv_z, D, BM, BN, BK, PREC)
        squares = sq_x[:, None] + sq_z[None, :] - 2 * tile
        near = wanted & (squares < NEAR)
        while tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
            at = tl.argmax(tl.max(near.to(tl.int32), 0), 0)
            inv_c = tl.load(z_stats + first + at)
            exact, _ = differences(x_ptr, rows, N, inv_x, z_ptr, first + at, inv_c, D, BM)
            here = columns[None, :] == first + at
            squares = tl.where(near & here, exact[:, None], squares)
            near &= columns[None, :] != first + at
        distance = tl.sqrt(tl.maximum(squares, 0.0))
        pull, push = wanted & same & (distance > pos_margin), wanted & (same == 0) & (distance < neg_margin)
        pulled += tl.sum(tl.where(pull, distance - pos_margin, 0.0), 1)
        pushed += tl.sum(tl.where(push, neg_margin - distance, 0.0), 1)
        pulls += tl.sum(pull.to(tl.int32), 1)
        pushes += tl.sum(push.to(tl.int32), 1)
    poison = inv_x * 0.0  # NaN for a row with NaN or Inf: it makes the loss and every gradient NaN
    if SELF == 0:
        poison += poison_of(z_stats, M, program, programs)
    tl.store(sums_ptr + program, tl.sum((pulled + poison).to(tl.float64), 0))
    tl.store(sums_ptr + programs + program, tl.sum(pushed.to(tl.float64), 0))
    tl.store(sums_ptr + 2 * programs + program, tl.sum(pulls.to(tl.float64), 0))
    tl.store(sums_ptr + 3 * programs + program, tl.sum(pushes.to(tl.float64), 0))
    if arrive(counter_ptr, programs):
        pull_sum, pull_count = total(sums_ptr, programs), total(sums_ptr + 2 * programs, programs)
        push_sum, push_count = total(sums_ptr + programs, programs), total(sums_ptr + 3 * programs, programs)
        per_pull = 1.0 / tl.maximum(pull_count, 1.0) + pull_sum * 0.0
        per_push = 1.0 / tl.maximum(push_count, 1.0) + pull_sum * 0.0
        tl.store(scale_ptr, per_pull)
        tl.store(scale_ptr + 1, per_push)
        tl.store(loss_ptr, (pull_sum * per_pull + push_sum * per_push).to(tl.float32))


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, label_ptr, x_stats, z_ptr, z_label_ptr, z_stats, scale_ptr, counter_ptr, partial_ptr, out_ptr,
    N, M, D, pos_margin, neg_margin,
    SELF: tl.constexpr, NEAR: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows: sum_j W_ij y_j without its part along y_i, over the length. Builds W again."""
    chunk, split = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS % SPLITS
    block = tl.program_id(0) // (CHUNKS * SPLITS)
    rows = block * BM + tl.arange(0, BM)
    at_d = chunk * DC
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    sq_x = tl.load(x_stats + N + rows, mask=rows < N, other=1.0)
    label = tl.load(label_ptr + rows, mask=rows < N, other=0)
    grad = tl.load(grad_ptr).to(tl.float32) * (2.0 if SELF else 1.0)
    per_pull, per_push = grad * tl.load(scale_ptr).to(tl.float32), grad * tl.load(scale_ptr + 1).to(tl.float32)
    sums, along = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32)
    share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
    for first in range(split * share, tl.minimum(split * share + share, M), BN):
        columns = first + tl.arange(0, BN)
        inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
        sq_z = tl.load(z_stats + M + columns, mask=columns < M, other=1.0)
        same = label[:, None] == tl.load(z_label_ptr + columns, mask=columns < M, other=0)[None, :]
        wanted = (rows < N)[:, None] & (columns < M)[None, :]
        if SELF:
            wanted &= rows[:, None] != columns[None, :]
        tile = cosines(x_ptr, rows, N, inv_x, z_ptr, columns, M, inv_z, D, BM, BN, BK, PREC)
        squares = sq_x[:, None] + sq_z[None, :] - 2 * tile
        near = wanted & (squares < NEAR)
        weight = _weights(squares, wanted & (near == 0), same, pos_margin, neg_margin, per_pull, per_push)
        while tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
            at = tl.argmax(tl.max(near.to(tl.int32), 0), 0)
            here = near & (columns[None, :] == first + at)
            inv_c = tl.load(z_stats + first + at)
            exact, along_c = differences(x_ptr, rows, N, inv_x, z_ptr, first + at, inv_c, D, BM)
            alone = tl.sum(
                _weights(tl.broadcast_to(exact[:, None], [BM, BN]), here, same, pos_margin, neg_margin, per_pull, per_push), 1
            )
            d = at_d + tl.arange(0, DC)
            z = unit_column(z_ptr, first + at, inv_c, d, D)
            sums += alone[:, None] * (z[None, :] - unit(load_rows(x_ptr, rows, N, D, at_d, DC), inv_x))
            along += alone * along_c
            near &= columns[None, :] != first + at
        sums, along = add_weighted(sums, along, weight, tile, z_ptr, columns, M, inv_z, D, at_d, DC, PREC)
    finish_rows(
        sums,
        along,
        x_ptr,
        rows,
        N,
        inv_x,
        D,
        at_d,
        block,
        split,
        chunk,
        per_pull * 0.0,
        counter_ptr,
        partial_ptr,
        out_ptr,
        SPLITS,
        CHUNKS,
        BM,
        DC,
    )


@triton.jit
def _weights(squares, wanted, same, pos_margin, neg_margin, per_pull, per_push):
    """Return the derivative of the loss by the cosine, up to sign: how strongly y_j pulls y_i away (positive: from it)."""
    safe = tl.maximum(squares, 1e-30)
    inverse = tl.rsqrt(safe)
    distance = tl.where(squares > 0, safe * inverse, 0.0)
    pull = wanted & same & (distance > pos_margin)
    push = wanted & (same == 0) & (distance < neg_margin)
    weight = tl.where(push, per_push * inverse, 0.0) - tl.where(pull, per_pull * inverse, 0.0)
    return tl.where(squares > 0, weight, 0.0)


def _buffers(rows: int, others: int, width: int, dtype: torch.dtype, reference_set: bool) -> Buffers:
    """Two statistics a row; four sums a program, two scales, a counter for all programs and one for each block."""
    one, other = tiles(rows, others, width, dtype), tiles(others, rows, width, dtype)
    blocks = max(one.blocks(rows, width), other.blocks(others, width))
    return Buffers(stats=2 * (rows + others * reference_set), work=4 * one.row_blocks(rows) * one.splits + 3 + blocks)


def _forward(batch: Batch, loss: Tensor) -> None:
    x, z = batch.rows, batch.others
    t = tiles(x.count, z.count, x.width, x.dtype, tf32=bool(batch.settings[2]))
    programs = t.row_blocks(x.count) * t.splits
    scale, counters = batch.work[4 * programs :], batch.work[4 * programs + 2 :]
    row_stats(x.emb, x.stats, counters)
    if not batch.self_mode:
        row_stats(z.emb, z.stats, None)
    launch(
        _forward_kernel, programs, t, *x.arguments, *z.arguments, batch.work, scale, counters.view(torch.int32), loss,
        x.count, z.count, x.width, *batch.settings[:2], SELF=batch.self_mode, NEAR=_NEAR[x.dtype],
    )  # fmt: skip


def _backward(batch: Batch, grad: Tensor, x: Side, z: Side) -> Tensor:
    first = tiles(batch.rows.count, batch.others.count, x.width, x.dtype, tf32=bool(batch.settings[2]))
    programs = first.row_blocks(batch.rows.count) * first.splits
    t = tiles(x.count, z.count, x.width, x.dtype, tf32=bool(batch.settings[2]))
    out, partial = torch.empty_like(x.emb), t.partial(x.emb)
    scale, counters = batch.work[4 * programs :], batch.work[4 * programs + 3 :].view(torch.int32)
    launch(
        _backward_kernel, t.blocks(x.count, x.width) * t.splits, t, grad, *x.arguments, *z.arguments, scale, counters,
        partial, out, x.count, z.count, x.width, *batch.settings[:2],
        SELF=batch.self_mode, NEAR=_NEAR[x.dtype], CHUNKS=t.chunks(x.width),
    )  # fmt: skip
    return out


register("contrastive", Kernels(_buffers, _forward, _backward))


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
