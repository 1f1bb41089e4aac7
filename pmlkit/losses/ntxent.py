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
from pmlkit.losses.arrange import arrange
from pmlkit.losses.elementary import inverse, power
from pmlkit.losses.fused import register
from pmlkit.losses.handover import arrive, counters, floats, largest, pick, poison_of, totals
from pmlkit.losses.launch import Backward, Launch, Plan, Room
from pmlkit.losses.module import FusedLoss, evaluate
from pmlkit.losses.rows import reference_set, tied, unit_rows
from pmlkit.losses.sides import (
    BEGIN,
    END,
    INV,
    OWN,
    SCALE,
    integers,
    left_fit,
    left_rows,
    numbers,
    right_fit,
    right_rows,
    scale_of,
    side,
)
from pmlkit.losses.tiles import add_weighted, band, careful_tile, cosines, finish_rows, plain_tile, positives, share
from pmlkit.losses.tiling import Shape, Tiles, bands, forward_tiles, fresh, large, parts, tiles


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
# Rows keep top, mass and T_i / mass with T_i = sum of sigmoid(L_i - a_ip) over the positives p; only anchors have them. The
# weights of the gradient are, no larger than twice the largest T,
#     W_ij = (-[positive] mass / (mass + exp2(logit - top)) + [negative] T_i / mass · exp2(logit - top)) / (temperature · P)
_TOP, _MASS, _PUSH = OWN, tl.constexpr(OWN.value + 1), tl.constexpr(OWN.value + 2)
_LN2 = tl.constexpr(math.log(2))
_FLAT = 50.0  # up to this slope `top` is the slope itself, the largest logit there can be: sums stay above 2^-100
_NONE = tl.constexpr(-1e38)  # far below every logit; -inf from -inf would be NaN


@triton.jit
def _forward_kernel(
    x_ptr, x_label_ptr, z_ptr, z_label_ptr, room_ptr, loss_ptr,
    N, M, D, at_x, at_z, ready_x, ready_z, at_sums, at_scale, at_partial, at_counters, slope,
    SELF: tl.constexpr, FLAT: tl.constexpr, SPLITS: tl.constexpr, BANDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Sum the negatives of a row block; its last program then takes the terms of the positives. Reads N·M/BM rows."""
    x, z = side(x_ptr, room_ptr, at_x, ready_x, N), side(z_ptr, room_ptr, at_z, ready_z, M)
    partial_ptr = floats(room_ptr, at_partial)
    program = tl.program_id(0)
    block, split = program // SPLITS, program % SPLITS
    inside = tl.arange(0, BM)
    rows = block * BM + inside
    begin, end = tl.load(integers(x, BEGIN) + rows), tl.load(integers(x, END) + rows)
    fit_x = left_fit(x, rows, slope, READY)
    x_parts = left_rows(x, rows, D, 0, BK, W, PARTS, READY)
    top, mass = tl.full([BM], _NONE, tl.float32), tl.zeros([BM], tl.float32)
    first, wide, full = band(x, block, M, BM, BN, BANDS)
    from_tile, to_tile = share(0, full - wide, split, SPLITS)
    if BANDS:
        for k in range(from_tile, to_tile):
            columns = plain_tile(k, first, wide) * BN + tl.arange(0, BN)
            logits = _logits(x, rows, x_parts, fit_x, z, columns, D, BM, BN, BK, W, PARTS, READY)
            top, mass = _add_powers(top, mass, logits, slope, FLAT)
    for k in tl.range(split, wide + tl.cdiv(M, BN) - full, SPLITS, num_stages=1 if BANDS else None):
        columns = careful_tile(k, first, wide, full) * BN + tl.arange(0, BN)
        logits = _logits(x, rows, x_parts, fit_x, z, columns, D, BM, BN, BK, W, PARTS, READY)
        hidden = positives(begin, end, columns) | (columns >= M)[None, :]
        top, mass = _add_powers(top, mass, tl.where(hidden, float("-inf"), logits), slope, FLAT)
    if SPLITS > 1:
        masses_ptr = partial_ptr + tl.num_programs(0) * BM
        tl.store(partial_ptr + program * BM + inside, top)
        tl.store(masses_ptr + program * BM + inside, mass)
        if arrive(counters(room_ptr, at_counters) + 1 + block, SPLITS):
            at = (block * SPLITS + tl.arange(0, SPLITS))[:, None] * BM + inside[None, :]
            tops = tl.load(partial_ptr + at)
            top = tl.max(tops, 0)
            mass = tl.sum(tl.load(masses_ptr + at) * power(tops - top[None, :]), 0)
            _judge(
                top, mass, x, rows, x_parts, fit_x, begin, end, z, block, tl.num_programs(0) // SPLITS,
                room_ptr, at_sums, at_scale, at_counters, loss_ptr, D, slope, SELF, FLAT, BM, BN, BK, W, PARTS, READY,
            )  # fmt: skip
    else:
        _judge(
            top, mass, x, rows, x_parts, fit_x, begin, end, z, block, tl.num_programs(0),
            room_ptr, at_sums, at_scale, at_counters, loss_ptr, D, slope, SELF, FLAT, BM, BN, BK, W, PARTS, READY,
        )  # fmt: skip


@triton.jit
def _logits(
    x, rows, x_parts, fit_x, z, columns, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    z_parts, fit_z = right_rows(z, columns, D, 0, BK, W, PARTS, READY), right_fit(z, columns, READY)
    return cosines(x, rows, x_parts, fit_x, z, columns, z_parts, fit_z, D, BM, BN, BK, W, PARTS, READY)


@triton.jit
def _add_powers(top, mass, logits, slope, FLAT: tl.constexpr):
    """Return top and mass with the powers of a tile's logits; FLAT keeps top as it is and sums against the slope."""
    if FLAT:
        return top, mass + tl.sum(power(logits - slope), 1)
    else:
        higher = tl.maximum(top, tl.max(logits, 1))
        return higher, mass * power(top - higher) + tl.sum(power(logits - higher[:, None]), 1)


@triton.jit
def _judge(
    top, mass, x, rows, x_parts, fit_x, begin, end, z, block, blocks,
    room_ptr, at_sums, at_scale, at_counters, loss_ptr, D, slope, SELF: tl.constexpr, FLAT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Sum and count the terms of a block's positives, and write top, mass and T / mass. The last block divides."""
    if FLAT:
        top = tl.where(mass > 0, slope, _NONE)
    level = top + tl.log2(tl.where(mass == 0, 1.0, mass))
    terms, pull, count = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.int32)
    start = tl.load(integers(x, BEGIN) + block * BM) // BN * BN
    stop = tl.load(integers(x, END) + tl.minimum(block * BM + BM, x[3]) - 1)
    for at in tl.range(start, stop, BN, num_stages=1):
        columns = at + tl.arange(0, BN)
        positive = positives(begin, end, columns)
        if SELF:
            positive &= rows[:, None] != columns[None, :]
        logits = _logits(x, rows, x_parts, fit_x, z, columns, D, BM, BN, BK, W, PARTS, READY)
        term, sigmoid = _softplus(level[:, None] - logits)
        terms += tl.sum(tl.where(positive, term, 0.0), 1)
        pull += tl.sum(tl.where(positive, sigmoid, 0.0), 1)
        count += tl.sum(positive.to(tl.int32), 1)
    tl.store(numbers(x, _TOP) + rows, top)
    tl.store(numbers(x, _MASS) + rows, mass)
    tl.store(numbers(x, _PUSH) + rows, pull / tl.where(mass == 0, 1.0, mass))
    poison = tl.load(numbers(x, INV) + rows) * 0.0  # NaN for a row with NaN or Inf: it makes the loss and every gradient NaN
    if SELF == 0:
        poison += poison_of(numbers(z, INV), z[3], block, blocks)
    sums_ptr, scale_ptr = room_ptr + at_sums, room_ptr + at_scale
    tl.store(sums_ptr + block, tl.sum((terms + poison).to(tl.float64), 0))
    tl.store(sums_ptr + blocks + block, tl.sum(count.to(tl.float64), 0))
    tl.store(sums_ptr + 2 * blocks + block, tl.max(pull, 0).to(tl.float64))
    if arrive(counters(room_ptr, at_counters), blocks):
        sums = totals(sums_ptr, blocks, 2)
        term_sum = pick(sums, 0)
        per_pair = 1.0 / tl.maximum(pick(sums, 1), 1.0) + term_sum * 0.0
        # A pair of two anchors may weigh twice the largest T, and fits are below 2: 32,768 is half of float16's range.
        lift = 8192.0 / tl.maximum(largest(sums_ptr + 2 * blocks, blocks), 1e-30)
        tl.store(scale_ptr, per_pair * (slope * _LN2) / (lift * SCALE))
        tl.store(scale_ptr + 1, lift)
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
    grad_ptr, x_ptr, z_ptr, room_ptr, out_x_ptr, out_z_ptr,
    N, M, D, at_x, at_z, ready_x, ready_z, at_scale, slope, at_counters, at_partial, at_partial_z,
    SELF: tl.constexpr, FLAT: tl.constexpr, SIDES: tl.constexpr, FRESH: tl.constexpr, CHUNKS: tl.constexpr, BANDS: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, SPLITS_Z: tl.constexpr, BM_Z: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, DC: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows (SIDES 1), of the reference rows (2) or of both (3)."""
    x, z = side(x_ptr, room_ptr, at_x, ready_x, N), side(z_ptr, room_ptr, at_z, ready_z, M)
    program, blocks_z = tl.program_id(0), tl.cdiv(M, BM_Z) * CHUNKS
    counter_ptr, scale_ptr = counters(room_ptr, at_counters), room_ptr + at_scale
    lift = tl.load(scale_ptr + 1).to(tl.float32)
    factor = tl.load(grad_ptr).to(tl.float32) * tl.load(scale_ptr).to(tl.float32)
    if SIDES == 1:
        _gradient(
            program, x, z, D, slope, lift, factor, counter_ptr, floats(room_ptr, at_partial), out_x_ptr,
            True, SELF, FLAT, FRESH, CHUNKS, SPLITS, BANDS, BM, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip
    elif SIDES == 2 or program < blocks_z * SPLITS_Z:
        _gradient(
            program, z, x, D, slope, lift, factor, counter_ptr, floats(room_ptr, at_partial_z), out_z_ptr,
            False, True, FLAT, FRESH, CHUNKS, SPLITS_Z, BANDS, BM_Z, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip
    else:
        _gradient(
            program - blocks_z * SPLITS_Z, x, z, D, slope, lift, factor,
            counter_ptr + blocks_z, floats(room_ptr, at_partial), out_x_ptr,
            True, SELF, FLAT, FRESH, CHUNKS, SPLITS, BANDS, BM, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip


@triton.jit
def _gradient(
    program, x, z, D, slope, lift, factor, counter_ptr, partial_ptr, out_ptr,
    ROW_ANCHOR: tl.constexpr, COL_ANCHOR: tl.constexpr, FLAT: tl.constexpr, FRESH: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, BANDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, DC: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of rows: sum_j W_ij z_j without its part along y_i, over the length. Builds W again."""
    chunk, split, block = program % CHUNKS, program // CHUNKS % SPLITS, program // (CHUNKS * SPLITS)
    rows = block * BM + tl.arange(0, BM)
    begin, end = tl.load(integers(x, BEGIN) + rows), tl.load(integers(x, END) + rows)
    fit_x = left_fit(x, rows, slope, READY)
    x_parts = left_rows(x, rows, D, 0, BK, W, PARTS, READY)
    sums, along = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32)
    first, wide, full = band(x, block, z[3], BM, BN, BANDS)
    from_tile, to_tile = share(0, full - wide, split, SPLITS)
    if BANDS:
        for k in range(from_tile, to_tile):
            sums, along = _add_tile(
                sums, along, plain_tile(k, first, wide) * BN + tl.arange(0, BN), x, rows, x_parts, fit_x, begin, end,
                z, D, chunk * DC, slope, lift, False, ROW_ANCHOR, COL_ANCHOR, FLAT, FRESH, BM, BN, BK, W, DC, PARTS, READY,
            )  # fmt: skip
    for k in tl.range(split, wide + tl.cdiv(z[3], BN) - full, SPLITS, num_stages=1 if BANDS else None):
        sums, along = _add_tile(
            sums, along, careful_tile(k, first, wide, full) * BN + tl.arange(0, BN), x, rows, x_parts, fit_x, begin, end,
            z, D, chunk * DC, slope, lift, True, ROW_ANCHOR, COL_ANCHOR, FLAT, FRESH, BM, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip
    finish_rows(
        sums * (factor * SCALE / scale_of(READY)), along * (factor * SCALE),
        x, rows, D, chunk * DC, block, split, chunk, factor * 0.0,
        counter_ptr, partial_ptr, out_ptr, SPLITS, CHUNKS, BM, DC,
    )  # fmt: skip


@triton.jit
def _add_tile(
    sums, along, columns, x, rows, x_parts, fit_x, begin, end, z, D, at_d, slope, lift,
    CAREFUL: tl.constexpr, ROW_ANCHOR: tl.constexpr, COL_ANCHOR: tl.constexpr, FLAT: tl.constexpr, FRESH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, DC: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Add what a tile of pairs gives its rows. CAREFUL: there may be positives or columns that are not there."""
    z_parts, fit_z = right_rows(z, columns, D, 0, BK, W, PARTS, READY), right_fit(z, columns, READY)
    tile = cosines(x, rows, x_parts, fit_x, z, columns, z_parts, fit_z, D, BM, BN, BK, W, PARTS, READY)
    there_x, there_z = rows < x[3], columns < z[3]
    by_row = power(tile - slope)
    by_column = by_row
    push = tl.zeros([BM, BN], tl.float32)
    if ROW_ANCHOR:
        if not FLAT:
            by_row = power(tile - tl.load(numbers(x, _TOP) + rows, mask=there_x, other=0.0)[:, None])
        push += tl.load(numbers(x, _PUSH) + rows, mask=there_x, other=0.0)[:, None] * lift
    if FLAT:
        if COL_ANCHOR:
            push += (tl.load(numbers(z, _PUSH) + columns, mask=there_z, other=0.0) * lift)[None, :]
        weight = push * by_row
    else:
        weight = push * by_row
        if COL_ANCHOR:
            by_column = power(tile - tl.load(numbers(z, _TOP) + columns, mask=there_z, other=0.0)[None, :])
            weight += (tl.load(numbers(z, _PUSH) + columns, mask=there_z, other=0.0) * lift)[None, :] * by_column
    if CAREFUL:
        sigmoids = tl.zeros([BM, BN], tl.float32)
        if ROW_ANCHOR:
            mass = tl.load(numbers(x, _MASS) + rows, mask=there_x, other=1.0)
            sigmoids += inverse(1.0 + by_row * inverse(mass)[:, None])
        if COL_ANCHOR:
            mass = tl.load(numbers(z, _MASS) + columns, mask=there_z, other=1.0)
            sigmoids += inverse(1.0 + by_column * inverse(mass)[None, :])
        # An anchor without negatives has no push, but infinite powers where top is _NONE.
        weight = tl.where(there_z[None, :] & (weight == weight), weight, 0.0)
        weight = tl.where(positives(begin, end, columns), sigmoids * -lift, weight)
        if ROW_ANCHOR & COL_ANCHOR:
            weight = tl.where(rows[:, None] == columns[None, :], 0.0, weight)
    return add_weighted(sums, along, weight, tile / slope, z, columns, z_parts, fit_z, D, at_d, BK, W, DC, PARTS, READY, FRESH)


def _gradient_tiles(rows: int, others: int, s: Shape) -> Tiles:
    """Return tiles of the backward pass. NVIDIA H200, 2026-12-01, 32,768 bfloat16 rows: 64 x 128 940 us, 64 x 64 1,060."""
    t = tiles(rows, others, s)
    return replace(t, BN=128, stages=2) if large(rows) and parts(s) == 1 and t.W <= 128 else t


def _plan(s: Shape) -> Plan:
    t, slope, room = forward_tiles(s.rows, s.others, s), math.log2(math.e) / s.settings[0], Room()
    arranged, blocks, programs = arrange(s, room, own=3), t.row_blocks(s.rows), t.programs(s.rows)
    at_sums, at_scale, at_partial = (
        room.doubles(3 * blocks),
        room.doubles(2),
        room.floats(2 * programs * t.BM if t.splits > 1 else 0),
    )
    back = Backward(s, room, least=1 + blocks, tiles=_gradient_tiles)
    own = {**arranged.constants, "SELF": not s.reference_set, "FLAT": slope <= _FLAT, "BANDS": bands(s)}
    places = (*arranged.places, at_sums, at_scale, at_partial, back.at_counters, slope)
    return Plan(
        room=room.words,
        sort=arranged.sort,
        forward=(
            arranged.launch(back.at_counters, back.counters),
            Launch(_forward_kernel, programs, t, places, own),
        ),
        backward=back.launches(_backward_kernel, (*arranged.places, at_scale, slope), {**own, "FRESH": fresh(s)}),
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
