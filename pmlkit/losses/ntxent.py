"""NT-Xent loss: the cross entropy of each positive against all negatives of its anchor.

With y = row / max(|row|, 1e-12), z the same of the reference rows (y itself without them) and
a_ij = <y_i, z_j> / temperature:

    L_i = log sum_{j: other label} exp(a_ij)
    loss = mean over ordered positives (i, p) of -log(exp(a_ip) / (exp(a_ip) + exp(L_i)))
         = mean of log(1 + exp(L_i - a_ip))

Positives have equal labels (without reference rows i != p). The anchor's other positives are in no denominator. A
positive of an anchor without negatives is a term of 0 that counts in the mean. This is NTXentLoss of
pytorch-metric-learning 2.9.0, except that nothing is added inside the logarithm (2.9.0 adds the smallest normal number
of the type and so saturates, at 87.3 in float32), a row shorter than 1e-12 has gradient 0, a NaN or Inf anywhere makes
the loss and every gradient NaN, and a single pair is a pair.

Cost of the reference: three products of 2·N·M·D operations a pair, about six N x M matrices alive at the peak.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import logsigmoid

from pmlkit.errors import PmlkitError
from pmlkit.losses.elementary import any_of, inverse, power
from pmlkit.losses.fused import register
from pmlkit.losses.handover import arrive, counters, floats, pick, poison_of, totals
from pmlkit.losses.launch import Backward, Launch, Plan, Room, Shape
from pmlkit.losses.lengths import row_stats
from pmlkit.losses.module import FusedLoss, evaluate
from pmlkit.losses.rows import reference_set, tied, unit_rows
from pmlkit.losses.tiles import add_weighted, cosines, finish_rows, halves_equal, load_rows, ready_rows
from pmlkit.losses.tiling import Tiles, tiles


def reference(
    emb_ND: Tensor,
    labels_N: Tensor,
    *,
    temperature: float = 0.07,
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
    same_NM = labels_N[:, None] == refs_M[None, :]

    logits_NM = y_ND @ z_MD.T / temperature
    against_N = logits_NM.masked_fill(same_NM, -torch.inf).logsumexp(1)  # -inf, with gradient 0, without negatives
    if ref_emb_MD is None:
        same_NM = same_NM.clone().fill_diagonal_(False)
    i_P, p_P = same_NM.nonzero(as_tuple=True)
    total = -logsigmoid(logits_NM[i_P, p_P] - against_N[i_P]).sum()
    return tied(total / max(len(i_P), 1), emb_ND, ref_emb_MD)


# The kernels work in base 2: `slope` is log2(e) / temperature, so that a pair of cosine c has the logit slope·c and costs
# one exp2. L_i is kept as `top`, the largest logit of the negatives of i (_NONE without any), and `mass`, the sum of
# exp2(logit - top) over them (0 without any): one number would round at the size of the logits.
# Statistics of N rows: inv, top (in place of the squared length, which cosines do not need), mass, and T_i / mass with
# T_i = sum of sigmoid(L_i - a_ip) over the positives p; only anchors have the last three. The weights of the gradient are
#     W_ij = (-[positive] mass / (mass + exp2(logit - top)) + [negative] T_i / mass · exp2(logit - top)) / (temperature · P)
_LN2 = tl.constexpr(math.log(2))
_FLAT = 50.0  # up to this slope `top` is the slope itself, the largest logit there can be: sums stay above 2^-100
_NONE = tl.constexpr(-1e38)  # far below every logit; -inf from -inf would be NaN


@triton.jit
def _against_kernel(
    x_ptr, label_ptr, z_ptr, z_label_ptr, room_ptr, loss_ptr,
    N, M, D, at_x, at_z, at_sums, at_scale, at_partial, at_counters, slope,
    SELF: tl.constexpr, FLAT: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Write top and mass of the negatives of every row. Reads N·M/BM rows."""
    x_stats, z_stats, partial_ptr = floats(room_ptr, at_x), floats(room_ptr, at_z), floats(room_ptr, at_partial)
    program = tl.program_id(0)
    block, split = program // SPLITS, program % SPLITS
    rows = block * BM + tl.arange(0, BM)
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    label = tl.load(label_ptr + rows, mask=rows < N, other=0)
    top, mass = tl.full([BM], _NONE, tl.float32), tl.zeros([BM], tl.float32)
    x = ready_rows(x_ptr, rows, N, inv_x, D, 0, BK)
    share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
    for first in range(split * share, tl.minimum(split * share + share, M), BN):
        columns = first + tl.arange(0, BN)
        inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
        label_z = tl.load(z_label_ptr + columns, mask=columns < M, other=0)
        z = load_rows(z_ptr, columns, M, D, 0, BK)
        tile = cosines(x, x_ptr, rows, N, inv_x, slope, z, z_ptr, columns, M, inv_z, D, BM, BN, BK, ONE, PREC)
        logits = tile + tl.where(columns < M, -slope if FLAT else 0.0, float("-inf"))[None, :]
        if any_of(halves_equal(label, label_z)):
            logits = tl.where(label[:, None] == label_z[None, :], float("-inf"), logits)
        if FLAT:
            mass += tl.sum(power(logits), 1)
        else:
            higher = tl.maximum(top, tl.max(logits, 1))
            mass = mass * power(top - higher) + tl.sum(power(logits - higher[:, None]), 1)
            top = higher
    if FLAT:
        top = tl.where(mass > 0, slope, _NONE)
    mine = rows < N
    if SPLITS > 1:
        masses_ptr = partial_ptr + tl.num_programs(0) * BM
        tl.store(partial_ptr + program * BM + tl.arange(0, BM), top)
        tl.store(masses_ptr + program * BM + tl.arange(0, BM), mass)
        last = arrive(counters(room_ptr, at_counters) + 1 + block, SPLITS)
        if last:
            at = (block * SPLITS + tl.arange(0, SPLITS))[:, None] * BM + tl.arange(0, BM)[None, :]
            tops = tl.load(partial_ptr + at)
            top = tl.max(tops, 0)
            mass = tl.sum(tl.load(masses_ptr + at) * power(tops - top[None, :]), 0)
        mine &= last
    tl.store(x_stats + N + rows, top, mask=mine)
    tl.store(x_stats + 2 * N + rows, mass, mask=mine)


@triton.jit
def _forward_kernel(
    x_ptr, label_ptr, z_ptr, z_label_ptr, room_ptr, loss_ptr,
    N, M, D, at_x, at_z, at_sums, at_scale, at_partial, at_counters, slope,
    SELF: tl.constexpr, FLAT: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Sum the terms of the positives, count them, and write T_i / mass. The last program divides. Reads to N·M/BM rows."""
    x_stats, z_stats, partial_ptr = floats(room_ptr, at_x), floats(room_ptr, at_z), floats(room_ptr, at_partial)
    sums_ptr, counter_ptr = room_ptr + at_sums, counters(room_ptr, at_counters)
    program, programs = tl.program_id(0), tl.num_programs(0)
    block, split = program // SPLITS, program % SPLITS
    rows = block * BM + tl.arange(0, BM)
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    label = tl.load(label_ptr + rows, mask=rows < N, other=0)
    top = tl.load(x_stats + N + rows, mask=rows < N, other=0.0)
    mass = tl.load(x_stats + 2 * N + rows, mask=rows < N, other=1.0)
    mass = tl.where(mass == 0, 1.0, mass)
    level = top + tl.log2(mass)
    terms, pull, count = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.int32)
    x = ready_rows(x_ptr, rows, N, inv_x, D, 0, BK)
    share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
    for first in range(split * share, tl.minimum(split * share + share, M), BN):
        columns = first + tl.arange(0, BN)
        label_z = tl.load(z_label_ptr + columns, mask=columns < M, other=0)
        if any_of(halves_equal(label, label_z)):  # few tiles of a large batch have a positive
            positive = (label[:, None] == label_z[None, :]) & (rows < N)[:, None] & (columns < M)[None, :]
            if SELF:
                positive &= rows[:, None] != columns[None, :]
            inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
            z = load_rows(z_ptr, columns, M, D, 0, BK)
            tile = cosines(x, x_ptr, rows, N, inv_x, slope, z, z_ptr, columns, M, inv_z, D, BM, BN, BK, ONE, PREC)
            term, sigmoid = _softplus(level[:, None] - tile)
            terms += tl.sum(tl.where(positive, term, 0.0), 1)
            pull += tl.sum(tl.where(positive, sigmoid, 0.0), 1)
            count += tl.sum(positive.to(tl.int32), 1)
    poison = inv_x * 0.0  # NaN for a row with NaN or Inf: it makes the loss and every gradient NaN
    if SELF == 0:
        poison += poison_of(z_stats, M, program, programs)
    tl.store(sums_ptr + program, tl.sum((terms + poison).to(tl.float64), 0))
    tl.store(sums_ptr + programs + program, tl.sum(count.to(tl.float64), 0))
    mine = rows < N
    if SPLITS > 1:
        tl.store(partial_ptr + program * BM + tl.arange(0, BM), pull)
        last = arrive(counter_ptr + 1 + block, SPLITS)
        if last:
            at = (block * SPLITS + tl.arange(0, SPLITS))[:, None] * BM + tl.arange(0, BM)[None, :]
            pull = tl.sum(tl.load(partial_ptr + at), 0)
        mine &= last
    tl.store(x_stats + 3 * N + rows, pull / mass, mask=mine)
    if arrive(counter_ptr, programs):
        sums = totals(sums_ptr, programs, 2)
        term_sum = pick(sums, 0)
        per_pair = 1.0 / tl.maximum(pick(sums, 1), 1.0) + term_sum * 0.0
        tl.store(room_ptr + at_scale, per_pair * (slope * _LN2))
        tl.store(loss_ptr, (term_sum * per_pair).to(tl.float32))


@triton.jit
def _softplus(v):
    """Return log(1 + 2^v) and 2^v / (1 + 2^v), 0 and 0 at _NONE. Both keep their digits where they are small.

    The logarithm is 2·atanh(e / (2 + e)) as a series (next term 1e-8): log2(1 + e) would lose what 1 + e rounds off.
    """
    e = power(-tl.abs(v))
    t = e * inverse(2.0 + e)
    s = t * t
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13))))))
    return tl.maximum(v, 0.0) * _LN2 + 2.0 * t * series, tl.where(v >= 0, 1.0, e) * inverse(1.0 + e)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, label_ptr, z_ptr, z_label_ptr, room_ptr, out_ptr,
    N, M, D, at_x, at_z, at_scale, at_counters, at_partial, slope,
    SELF: tl.constexpr, FLAT: tl.constexpr, ROW_ANCHOR: tl.constexpr, COL_ANCHOR: tl.constexpr,
    SPLITS: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, DC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows: sum_j W_ij y_j without its part along y_i, over the length. Builds W again."""
    x_stats, z_stats = floats(room_ptr, at_x), floats(room_ptr, at_z)
    chunk, split = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS % SPLITS
    block = tl.program_id(0) // (CHUNKS * SPLITS)
    rows = block * BM + tl.arange(0, BM)
    at_d = chunk * DC
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    label = tl.load(label_ptr + rows, mask=rows < N, other=0)
    per_pair = tl.load(grad_ptr).to(tl.float32) * tl.load(room_ptr + at_scale).to(tl.float32)
    top_x = tl.load(x_stats + N + rows, mask=rows < N, other=0.0)
    mass_x = tl.load(x_stats + 2 * N + rows, mask=rows < N, other=1.0)
    push_x = tl.load(x_stats + 3 * N + rows, mask=rows < N, other=0.0) * per_pair
    sums, along = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32)
    x = ready_rows(x_ptr, rows, N, inv_x, D, 0, BK)
    share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
    for first in range(split * share, tl.minimum(split * share + share, M), BN):
        columns = first + tl.arange(0, BN)
        inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
        label_z = tl.load(z_label_ptr + columns, mask=columns < M, other=0)
        push_z = tl.load(z_stats + 3 * M + columns, mask=columns < M, other=0.0) * per_pair
        z = load_rows(z_ptr, columns, M, D, 0, BK)
        tile = cosines(x, x_ptr, rows, N, inv_x, slope, z, z_ptr, columns, M, inv_z, D, BM, BN, BK, ONE, PREC)
        if FLAT:
            by_row = power(tile - slope)
            by_column = by_row
        else:
            top_z = tl.load(z_stats + M + columns, mask=columns < M, other=0.0)
            by_row, by_column = power(tile - top_x[:, None]), power(tile - top_z[None, :])
        # Columns that are not there have rows of 0 and no push. An anchor without negatives has no push either, but
        # infinite powers where top is _NONE, as a column that is not there has where all negatives lie far below 0.
        weight = tl.zeros([BM, BN], tl.float32)
        if ROW_ANCHOR:
            weight += by_row * push_x[:, None]
        if COL_ANCHOR:
            weight += by_column * push_z[None, :]
        if not FLAT:
            weight = tl.where((columns < M)[None, :] & (weight == weight), weight, 0.0)
        if any_of(halves_equal(label, label_z)):  # most tiles of a large batch have no positive
            mass_z = tl.load(z_stats + 2 * M + columns, mask=columns < M, other=1.0)
            positive = label[:, None] == label_z[None, :]
            sigmoids = tl.zeros([BM, BN], tl.float32)
            if ROW_ANCHOR:
                sigmoids += inverse(1.0 + by_row * inverse(mass_x)[:, None])
            if COL_ANCHOR:
                sigmoids += inverse(1.0 + by_column * inverse(mass_z)[None, :])
            weight = tl.where(positive, sigmoids * -per_pair, weight)
            if SELF:
                weight = tl.where(rows[:, None] == columns[None, :], 0.0, weight)
        sums, along = add_weighted(
            sums, along, weight, tile / slope, z, z_ptr, columns, M, inv_z, D, at_d, CHUNKS, BK, DC, PREC
        )
    finish_rows(
        sums, along, x_ptr, rows, N, inv_x, D, at_d, block, split, chunk, per_pair * 0.0,
        counters(room_ptr, at_counters), floats(room_ptr, at_partial), out_ptr, SPLITS, CHUNKS, BM, DC,
    )  # fmt: skip


def _positive_tiles(t: Tiles) -> Tiles:
    """Return tiles of the pass over positives: small ones for a large batch, since few of them have any."""
    return replace(t, BM=64, BN=32, warps=4) if t.splits == 1 and t.BM > 64 else t


def _plan(s: Shape) -> Plan:
    t, slope = tiles(s.rows, s.others, s.width, s.dtype, s.tf32), math.log2(math.e) / s.settings[0]
    few, room = _positive_tiles(t), Room()
    programs = few.programs(s.rows)
    at_x = room.floats(4 * s.rows)
    at_z = room.floats(4 * s.others) if s.reference_set else at_x
    at_sums, at_scale, at_partial = room.doubles(2 * programs), room.doubles(1), room.floats(2 * t.programs(s.rows) * t.BM)
    back = Backward(s, room, at_x, at_z, least=1 + few.row_blocks(s.rows))
    sizes = (s.rows, s.others, s.width, at_x, at_z, at_sums, at_scale, at_partial, back.at_counters, slope)
    side = {"SELF": not s.reference_set, "FLAT": slope <= _FLAT}
    rows = {**side, "ROW_ANCHOR": True, "COL_ANCHOR": not s.reference_set}
    others = {**side, "ROW_ANCHOR": False, "COL_ANCHOR": True}
    return Plan(
        forward=(
            row_stats(s, at_x, at_z, back.at_counters, back.counters),
            Launch(_against_kernel, t.programs(s.rows), t, sizes, side),
            Launch(_forward_kernel, programs, few, sizes, side),
        ),
        backward=back.launches(_backward_kernel, (at_scale,), (slope,), rows, others),
        room=room.words,
    )


register("ntxent", _plan)


def ntxent_loss(
    embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None,
    *, temperature: float = 0.07, tf32: bool = False,
) -> Tensor:  # fmt: skip
    """Return what `NTXentLoss` with these settings returns, without a module."""
    return evaluate("ntxent", {"temperature": _positive(temperature)}, tf32, embeddings, labels, ref_emb, ref_labels)


def _positive(temperature: float) -> float:
    if temperature <= 0:
        raise PmlkitError(f"temperature={temperature!r}: similarities are divided by it, so it must be positive")
    return float(temperature)


class NTXentLoss(FusedLoss):
    """NT-Xent loss as NTXentLoss of pytorch-metric-learning, fused: memory O(N), no host synchronisation.

    Called with embeddings [N, D] (float32, bfloat16 or float16 on a CUDA device; D to 1024, N to 2^20; other rows go to
    the plain reference), labels [N] of any integer type, and optionally a reference set ref_emb [M, D] and ref_labels
    [M]. Returns a float32 scalar; gradients have the type of their rows. Deterministic. Raises PmlkitError for a
    constructor argument or a tuple that is not fused, and for labels that do not fit.
    """

    def __init__(self, temperature: float = 0.07, *, tf32: bool = False, **unsupported: Any) -> None:
        super().__init__("ntxent", "losses.NTXentLoss", {"temperature": _positive(temperature)}, tf32, unsupported)
