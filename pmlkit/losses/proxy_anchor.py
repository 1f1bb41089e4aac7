"""Proxy Anchor loss: every class has a learnt proxy, pulled to its rows and pushed from all others.

With y = row / max(|row|, 1e-12), q the same of the proxies, s_ic = <y_i, q_c> and C classes:

    U_c = log(1 + sum_{i: label c} exp(alpha (margin - s_ic)))        0 for a class that the batch lacks
    V_c = log(1 + sum_{i: other label} exp(alpha (margin + s_ic)))    0 if there is no such row
    loss = 1/#{classes in the batch} sum_c U_c + 1/C sum_c V_c

This is ProxyAnchorLoss of pytorch-metric-learning 2.9.0 (Kim et al. 2020), except that the proxies keep their type and
their gradient has it too, labels may be of any integer type, a row or proxy shorter than 1e-12 has gradient 0, and a
NaN or Inf anywhere makes the loss and every gradient NaN.

Cost of the reference: three products of 2·N·C·D operations a pair, about seven N x C matrices alive at the peak.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.losses.arrange import arrange
from pmlkit.losses.elementary import power
from pmlkit.losses.fused import fusable, fused_again, fused_loss, register
from pmlkit.losses.handover import arrive, counters, floats, largest, pick, totals
from pmlkit.losses.launch import Backward, Launch, Plan, Room
from pmlkit.losses.module import FusedLoss, check_rows
from pmlkit.losses.rows import tied, unit_rows
from pmlkit.losses.sides import (
    BEGIN,
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
from pmlkit.losses.tiles import add_weighted, cosines, finish_rows, share
from pmlkit.losses.tiling import Shape, Tiles, fresh, tiles


def reference(emb_ND: Tensor, labels_N: Tensor, proxies_CD: Tensor, *, margin: float = 0.1, alpha: float = 32) -> Tensor:
    """Return the loss as a scalar: float64 for float64 rows, else float32. Formula: pytorch-metric-learning 2.9.0.

    emb_ND, proxies_CD: floating-point rows; labels_N: any integer type, values in [0, C).
    Raises PmlkitError for labels that do not fit the rows or the proxies.
    """
    classes = len(proxies_CD)
    if labels_N.shape != emb_ND.shape[:1]:
        raise PmlkitError(f"need one label a row: labels {tuple(labels_N.shape)}, rows {tuple(emb_ND.shape)}")
    labels_N = labels_N.long()
    if len(labels_N) and (labels_N.min() < 0 or labels_N.max() >= classes):
        raise PmlkitError(f"a label is outside 0..{classes - 1}: every label needs its proxy")
    dtype = torch.promote_types(torch.promote_types(emb_ND.dtype, proxies_CD.dtype), torch.float32)
    cosine_NC = unit_rows(emb_ND.to(dtype)) @ unit_rows(proxies_CD.to(dtype)).T
    own_NC = labels_N[:, None] == torch.arange(classes, device=labels_N.device)
    pull_C = _log1p_sum(alpha * (margin - cosine_NC), own_NC)
    push_C = _log1p_sum(alpha * (margin + cosine_NC), ~own_NC)
    present = own_NC.any(0).sum().clamp(min=1)
    return tied(pull_C.sum() / present + push_C.sum() / max(classes, 1), emb_ND, proxies_CD)


def _log1p_sum(exponent_NC: Tensor, kept_NC: Tensor) -> Tensor:
    """Return log(1 + sum over kept rows of exp(exponent)) per column."""
    one_1C = exponent_NC.new_zeros(1, exponent_NC.shape[1])
    return torch.cat([exponent_NC.masked_fill(~kept_NC, -torch.inf), one_1C]).logsumexp(0)


_LOG2E, _LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)
# Numbers of a proxy, for pulls and for pushes: what a power of its pairs is multiplied by, and what is taken off exponents.
_PULL, _PUSH, _TOP_PULL, _TOP_PUSH = (tl.constexpr(OWN.value + i) for i in range(4))
_CLASS = BEGIN  # of a row: nothing is sorted here, and a proxy's class is its index


@triton.jit
def _forward_kernel(
    emb_ptr, label_ptr, proxy_ptr, proxy_label_ptr, room_ptr, loss_ptr,
    N, C, D, at_x, at_z, ready_x, ready_z, at_sums, at_scale, at_partial, at_counters, margin, alpha,
    SHIFT: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Sum the exponentials of every proxy; its last program takes the logarithms, the last of all divides. Reads N·C/BM rows.

    A pair is pulled or pushed, so one exponential does: exp2 of its cosine times alpha·log2(e), minus for pulled ones. The
    margin comes in afterwards. With SHIFT the largest exponent so far, rounded up, is taken off: any alpha is safe.
    """
    y, q = side(emb_ptr, room_ptr, at_x, ready_x, N), side(proxy_ptr, room_ptr, at_z, ready_z, C)
    program, block, split = tl.program_id(0), tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    inside = tl.arange(0, BM)
    classes = block * BM + inside
    steep = alpha * _LOG2E
    fit_q, q_parts = left_fit(q, classes, steep, READY), left_rows(q, classes, D, 0, BK, W, PARTS, READY)
    pulled, pushed = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    top_pull = tl.zeros([BM], tl.float32)
    if SHIFT:  # below every exponent
        top_pull -= tl.ceil(tl.abs(steep) * 1.01)
    top_push = top_pull
    poison = tl.zeros([BN], tl.float32)
    from_tile, to_tile = share(0, tl.cdiv(N, BN), split, SPLITS)
    for k in range(from_tile, to_tile):
        rows = k * BN + tl.arange(0, BN)
        label = tl.load(integers(y, _CLASS) + rows)
        poison += tl.where((rows < N) & (label < 0), float("nan"), tl.load(numbers(y, INV) + rows) * 0.0)
        y_parts, fit_y = right_rows(y, rows, D, 0, BK, W, PARTS, READY), right_fit(y, rows, READY)
        tile = cosines(q, classes, q_parts, fit_q, y, rows, y_parts, fit_y, D, BM, BN, BK, W, PARTS, READY)
        own = (classes[:, None] == label[None, :]) & (rows < N)[None, :]
        if SHIFT:
            pulled, top_pull = _add_shifted(pulled, top_pull, -tile, own)
            pushed, top_push = _add_shifted(pushed, top_push, tile, (rows < N)[None, :] & (own == 0))
        else:
            grown = power(tl.where(own, -tile, tile))
            pulled += tl.sum(tl.where(own, grown, 0.0), 1)
            pushed += tl.sum(tl.where(own | (rows >= N)[None, :], 0.0, grown), 1)
    place = floats(room_ptr, at_partial) + program.to(tl.int64) * 4 * BM + inside
    tl.store(place, pulled)
    tl.store(place + BM, top_pull)
    # A row or proxy with NaN or Inf, or a label without a proxy, makes the loss and every gradient NaN.
    tl.store(place + 2 * BM, pushed + tl.load(numbers(q, INV) + classes) * 0.0 + tl.sum(poison, 0))
    tl.store(place + 3 * BM, top_push)
    if arrive(counters(room_ptr, at_counters) + 1 + block, SPLITS):
        shares = floats(room_ptr, at_partial) + block.to(tl.int64) * SPLITS * 4 * BM
        _total(
            q, classes, block, tl.num_programs(0) // SPLITS, shares, margin, alpha,
            room_ptr + at_sums, room_ptr + at_scale, counters(room_ptr, at_counters), loss_ptr, SPLITS, BM,
        )  # fmt: skip


@triton.jit
def _total(
    q, classes, block, blocks, shares, margin, alpha, sums_ptr, scale_ptr, counter_ptr, loss_ptr,
    SPLITS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a block of proxies; the last block writes the loss, and what pulls and pushes are worth.

    That is as large as weights in float16 may be; the third number takes it back.
    """
    pull, pull_factor, top_pull, pull_share, present = _logarithm(shares, margin, alpha, SPLITS, BM)  # pyright: ignore[reportGeneralTypeIssues]
    push, push_factor, top_push, push_share, _ = _logarithm(shares + 2 * BM, margin, alpha, SPLITS, BM)
    wanted = classes < q[3]
    tl.store(numbers(q, _PULL) + classes, pull_factor)
    tl.store(numbers(q, _PUSH) + classes, push_factor)
    tl.store(numbers(q, _TOP_PULL) + classes, top_pull)
    tl.store(numbers(q, _TOP_PUSH) + classes, top_push)
    tl.store(sums_ptr + block, tl.sum(tl.where(wanted, pull, 0.0), 0))
    tl.store(sums_ptr + blocks + block, tl.sum(tl.where(wanted, push, 0.0), 0))
    tl.store(sums_ptr + 2 * blocks + block, tl.sum((wanted & present).to(tl.float64), 0))
    tl.store(sums_ptr + 3 * blocks + block, 0.0)
    tl.store(sums_ptr + 4 * blocks + block, tl.max(tl.where(wanted, pull_share, 0.0), 0))
    tl.store(sums_ptr + 5 * blocks + block, tl.max(tl.where(wanted, push_share, 0.0), 0))
    if arrive(counter_ptr, blocks):
        sums = totals(sums_ptr, blocks, 4)  # the fourth is 0: Triton counts in powers of two
        pulls, pushes = pick(sums, 0), pick(sums, 1)
        per_pull = 1.0 / tl.maximum(pick(sums, 2), 1.0) + pushes * 0.0
        per_push = 1.0 / q[3].to(tl.float64) + pushes * 0.0
        most = tl.maximum(per_pull * largest(sums_ptr + 4 * blocks, blocks), per_push * largest(sums_ptr + 5 * blocks, blocks))
        lift = 16384.0 / tl.maximum(most, 1e-30)
        tl.store(scale_ptr, per_pull * lift)
        tl.store(scale_ptr + 1, per_push * lift)
        tl.store(scale_ptr + 2, tl.cast(alpha, tl.float64) / (lift * SCALE) + pushes * 0.0)  # a maximum drops NaN
        tl.store(loss_ptr, (pulls * per_pull + pushes * per_push).to(tl.float32))


@triton.jit
def _add_shifted(sums, top, exponents, kept):
    """Add 2^(exponent - top) of the kept pairs, top being the largest exponent so far, rounded up; return sums and top."""
    higher = tl.maximum(top, tl.ceil(tl.max(tl.where(kept, exponents, top[:, None]), 1)))
    grown = tl.where(kept, power(exponents - higher[:, None]), 0.0)
    return sums * power(top - higher) + tl.sum(grown, 1), higher


@triton.jit
def _logarithm(place, margin, alpha, SPLITS: tl.constexpr, BM: tl.constexpr):
    """Return log(1 + sum of all shares) of BM proxies, a pair's factor, top and bound, and whether there are any.

    exp(alpha·(margin ± cosine)) / (1 + sum) = factor · exp2(±alpha·log2(e)·cosine - top) <= sum / (1 + sum). Few numbers, so
    in float64: a loss near 0 keeps its digits, and the factor carries all that exponents of 50 would lose in float32.
    """
    at = tl.arange(0, SPLITS)[:, None] * 4 * BM + tl.arange(0, BM)[None, :]
    tops = tl.load(place + BM + at)
    top = tl.max(tops, 0)
    sums = tl.sum(tl.load(place + at).to(tl.float64) * tl.exp2(tops - top[None, :]).to(tl.float64), 0)
    power = tl.cast(alpha, tl.float64) * tl.cast(margin, tl.float64) + top.to(tl.float64) * _LN2
    high = tl.where(power > 40, power, 0.0)
    base, one = tl.exp(power - high), tl.exp(-high)
    grown = base * sums
    small = grown * (1.0 - grown * (0.5 - grown / 3.0))
    log = tl.where((grown < 1e-4) & (high == 0), small, high + tl.log(tl.where(sums == 0, 1.0, one + grown)))
    none = sums == 0  # no such row
    factor = tl.where(none, 0.0, base / (one + grown))
    return tl.where(none, 0.0, log), factor.to(tl.float32), top, factor * sums, sums > 0


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, z_ptr, room_ptr, out_x_ptr, out_z_ptr,
    N, M, D, at_x, at_z, ready_x, ready_z, at_scale, alpha, at_counters, at_partial, at_partial_z,
    SHIFT: tl.constexpr, SIDES: tl.constexpr, FRESH: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, SPLITS_Z: tl.constexpr, BM_Z: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, DC: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the rows (SIDES 1), of the proxies (2) or of both (3)."""
    x, z = side(x_ptr, room_ptr, at_x, ready_x, N), side(z_ptr, room_ptr, at_z, ready_z, M)
    program, blocks_z = tl.program_id(0), tl.cdiv(M, BM_Z) * CHUNKS
    counter_ptr, scale_ptr = counters(room_ptr, at_counters), room_ptr + at_scale
    per_pull, per_push = tl.load(scale_ptr).to(tl.float32), tl.load(scale_ptr + 1).to(tl.float32)
    factor = tl.load(grad_ptr).to(tl.float32) * tl.load(scale_ptr + 2).to(tl.float32)
    if SIDES == 1:
        _gradient(
            program, x, z, D, alpha, per_pull, per_push, factor, counter_ptr, floats(room_ptr, at_partial), out_x_ptr,
            False, SHIFT, FRESH, CHUNKS, SPLITS, BM, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip
    elif SIDES == 2 or program < blocks_z * SPLITS_Z:
        _gradient(
            program, z, x, D, alpha, per_pull, per_push, factor, counter_ptr, floats(room_ptr, at_partial_z), out_z_ptr,
            True, SHIFT, FRESH, CHUNKS, SPLITS_Z, BM_Z, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip
    else:
        _gradient(
            program - blocks_z * SPLITS_Z, x, z, D, alpha, per_pull, per_push, factor,
            counter_ptr + blocks_z, floats(room_ptr, at_partial), out_x_ptr,
            False, SHIFT, FRESH, CHUNKS, SPLITS, BM, BN, BK, W, DC, PARTS, READY,
        )  # fmt: skip


@triton.jit
def _gradient(
    program, x, z, D, alpha, per_pull, per_push, factor, counter_ptr, partial_ptr, out_ptr,
    PROXIES: tl.constexpr, SHIFT: tl.constexpr, FRESH: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, W: tl.constexpr, DC: tl.constexpr, PARTS: tl.constexpr, READY: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of proxies against the rows, or of rows against the proxies. Builds W again."""
    chunk, split, block = program % CHUNKS, program // CHUNKS % SPLITS, program // (CHUNKS * SPLITS)
    rows = block * BM + tl.arange(0, BM)
    steep = alpha * _LOG2E
    per_steep = tl.where(steep == 0, 0.0, 1.0 / tl.where(steep == 0, 1.0, steep))
    fit_x, x_parts = left_fit(x, rows, steep, READY), left_rows(x, rows, D, 0, BK, W, PARTS, READY)
    sums, along = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32)
    from_tile, to_tile = share(0, tl.cdiv(z[3], BN), split, SPLITS)
    for k in range(from_tile, to_tile):
        columns = k * BN + tl.arange(0, BN)
        z_parts, fit_z = right_rows(z, columns, D, 0, BK, W, PARTS, READY), right_fit(z, columns, READY)
        tile = cosines(x, rows, x_parts, fit_x, z, columns, z_parts, fit_z, D, BM, BN, BK, W, PARTS, READY)
        if PROXIES:
            q, classes = x, rows[:, None]
            own = classes == tl.load(integers(z, _CLASS) + columns)[None, :]
        else:
            q, classes = z, columns[None, :]
            own = classes == tl.load(integers(x, _CLASS) + rows)[:, None]
        there = classes < q[3]
        pull = -per_pull * tl.load(numbers(q, _PULL) + classes, mask=there, other=0.0)
        push = per_push * tl.load(numbers(q, _PUSH) + classes, mask=there, other=0.0)
        exponent = tl.where(own, -tile, tile)
        if SHIFT:
            top_pull = tl.load(numbers(q, _TOP_PULL) + classes, mask=there, other=0.0)
            top_push = tl.load(numbers(q, _TOP_PUSH) + classes, mask=there, other=0.0)
            exponent -= tl.where(own, top_pull, top_push)
        weight = tl.where(own, pull, push)
        # Columns that are not there have a power of up to +146, and infinity times 0 is NaN.
        weight = tl.where((columns < z[3])[None, :] & (weight != 0), weight * power(exponent), 0.0)
        sums, along = add_weighted(
            sums, along, weight, tile * per_steep, z, columns, z_parts, fit_z, D, chunk * DC, BK, W, DC, PARTS, READY, FRESH
        )
    finish_rows(
        sums * (factor * SCALE / scale_of(READY)), along * (factor * SCALE),
        x, rows, D, chunk * DC, block, split, chunk, factor * 0.0,
        counter_ptr, partial_ptr, out_ptr, SPLITS, CHUNKS, BM, DC,
    )  # fmt: skip


def _shifted(alpha: float, margin: float) -> bool:
    """Return whether exponents must be kept small: else 2^20 terms stay below 2^100, and none is below 2^-64."""
    return abs(alpha) * (1 + abs(margin)) > 44


def _forward_tiles(classes: int, rows: int, s: Shape) -> Tiles:
    """Return tiles of the forward pass, whose programs hand each other four numbers a proxy: so there may be many of them."""
    t, splits = tiles(classes, rows, s), 1
    while splits < 16 and 4 * splits * t.BN <= rows and splits * t.row_blocks(classes) < 400:
        splits *= 2
    return replace(t, splits=splits)


def _plan(s: Shape) -> Plan:
    margin, alpha = s.settings
    t, room = _forward_tiles(s.others, s.rows, s), Room()
    blocks, programs = t.row_blocks(s.others), t.programs(s.others)
    back = Backward(s, room, least=1 + blocks)
    arranged = arrange(s, room, own=0, own_others=4, by_label=False, taken=back.partial_bytes)
    at_sums, at_scale, at_partial = room.doubles(6 * blocks), room.doubles(3), room.floats(4 * programs * t.BM)
    own = {**arranged.constants, "SHIFT": _shifted(alpha, margin), "FRESH": fresh(s)}
    places = (*arranged.places, at_sums, at_scale, at_partial, back.at_counters, margin, alpha)
    return Plan(
        room=room.words,
        sort=False,
        forward=(arranged.launch(back.at_counters, back.counters), Launch(_forward_kernel, programs, t, places, own)),
        backward=back.launches(_backward_kernel, (*arranged.places, at_scale, alpha), own),
    )


register("proxy_anchor", _plan, mixed=True)


def proxy_anchor_loss(
    embeddings: Tensor, labels: Tensor, proxies: Tensor, *, margin: float = 0.1, alpha: float = 32, tf32: bool = False
) -> Tensor:
    """Return what `ProxyAnchorLoss` with these settings and proxies [C, D] returns, without a module."""
    settings = float(margin), float(alpha)
    loss = fused_again("proxy_anchor", settings, tf32, embeddings, labels, proxies)
    if loss is not None:
        return loss
    labels, _ = check_rows(embeddings, labels, None, None)
    if embeddings.shape[1] != proxies.shape[1] or embeddings.device != proxies.device:
        raise PmlkitError(
            f"proxies {tuple(proxies.shape)} on {proxies.device} do not fit embeddings "
            f"{tuple(embeddings.shape)} on {embeddings.device}: same width and device needed"
        )
    if fusable(embeddings, proxies):
        return fused_loss("proxy_anchor", settings, tf32, embeddings, labels, proxies)
    return reference(embeddings, labels, proxies, margin=margin, alpha=alpha)


class ProxyAnchorLoss(FusedLoss):
    """Proxy Anchor loss as ProxyAnchorLoss of pytorch-metric-learning, fused: memory O(N + C), no host synchronisation.

    Called with embeddings [N, D] (float32, bfloat16 or float16 on a CUDA device; D to 1024, N and C to 2^20; other rows
    go to the plain reference) and labels [N] of any integer type with values in [0, C). Returns a float32 scalar;
    gradients have the type of their rows. `proxies` [C, D] is a float32 parameter and stays one; beside bfloat16 rows it
    is multiplied with 11 digits, which costs the loss 2e-5. Deterministic.

    On a CUDA device a label outside [0, C) makes the loss and every gradient NaN, since raising would synchronise. Raises
    PmlkitError for a constructor argument, a tuple or a reference set that is not fused, and for rows that do not fit.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: float = 0.1,
        alpha: float = 32,
        *,
        tf32: bool = False,
        **unsupported: Any,
    ) -> None:
        settings = {"margin": float(margin), "alpha": float(alpha)}
        super().__init__("proxy_anchor", "losses.ProxyAnchorLoss", settings, tf32, unsupported)
        self.num_classes, self.embedding_size = num_classes, embedding_size
        self.proxies = torch.nn.Parameter(torch.empty(num_classes, embedding_size, dtype=torch.float32))
        torch.nn.init.kaiming_normal_(self.proxies, mode="fan_out")

    def extra_repr(self) -> str:
        """Return the settings as the constructor takes them."""
        return f"num_classes={self.num_classes}, embedding_size={self.embedding_size}, {super().extra_repr()}"

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss."""
        self.refuse_tuple(indices_tuple)
        if ref_emb is not None or ref_labels is not None:
            raise PmlkitError(f"no ref_emb: pytorch_metric_learning.{self.equivalent} too compares rows with its proxies only")
        return proxy_anchor_loss(embeddings, labels, self.proxies, **self.settings, tf32=self.tf32)
