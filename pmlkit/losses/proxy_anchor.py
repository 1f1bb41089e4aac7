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

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.losses.elementary import any_of, power, power_of_two
from pmlkit.losses.fused import fusable, fused_loss, register
from pmlkit.losses.handover import arrive, counters, floats, pick, totals
from pmlkit.losses.launch import Backward, Launch, Plan, Room, Shape
from pmlkit.losses.lengths import row_stats
from pmlkit.losses.module import FusedLoss, check_rows
from pmlkit.losses.rows import tied, unit_rows
from pmlkit.losses.tiles import add_weighted, cosines, finish_rows, load_rows, ready_rows, unit
from pmlkit.losses.tiling import tiles


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


@triton.jit
def _forward_kernel(
    emb_ptr, label_ptr, proxy_ptr, proxy_label_ptr, room_ptr, loss_ptr,
    N, C, D, at_rows, at_proxies, at_sums, at_scale, at_factors, at_partial, at_counters, margin, alpha,
    SHIFT: tl.constexpr, SPLITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Sum the exponentials of every proxy; its last program takes the logarithms, the last of all divides. Reads N·C/BM rows.

    A pair is pulled or pushed, so one exponential does: exp2 of its cosine times alpha·log2(e), minus for pulled ones. The
    margin comes in afterwards. With SHIFT the largest exponent so far, rounded up, is taken off: any alpha is safe.
    """
    emb_stats, proxy_stats, factor_ptr = floats(room_ptr, at_rows), floats(room_ptr, at_proxies), floats(room_ptr, at_factors)
    sums_ptr, scale_ptr = room_ptr + at_sums, room_ptr + at_scale
    counter_ptr, partial_ptr = counters(room_ptr, at_counters), floats(room_ptr, at_partial)
    program, block = tl.program_id(0), tl.program_id(0) // SPLITS
    blocks = tl.num_programs(0) // SPLITS
    inside = tl.arange(0, BM)
    classes = block * BM + inside
    inv_q = tl.load(proxy_stats + classes, mask=classes < C, other=1.0)
    steep = alpha * _LOG2E
    pulled, pushed = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    top_pull = tl.zeros([BM], tl.float32)
    if SHIFT:  # below every exponent
        top_pull -= tl.ceil(tl.abs(steep) * 1.01)
    top_push = top_pull
    poison = tl.zeros([BN], tl.float32)
    q = ready_rows(proxy_ptr, classes, C, inv_q, D, 0, BK)
    share = tl.cdiv(tl.cdiv(N, BN), SPLITS) * BN
    begin = program % SPLITS * share
    for first in range(begin, tl.minimum(begin + share, N), BN):
        rows = first + tl.arange(0, BN)
        inv_y = tl.load(emb_stats + rows, mask=rows < N, other=1.0)
        label = tl.load(label_ptr + rows, mask=rows < N, other=-1)
        strange = (label < 0) | (label >= C)
        poison += tl.where((rows < N) & strange, float("nan"), inv_y * 0.0)
        label = tl.where(strange, -1, label)  # so that 32 bits hold it
        y = load_rows(emb_ptr, rows, N, D, 0, BK)
        tile = _cosines(q, proxy_ptr, classes, C, inv_q, steep, y, emb_ptr, rows, N, inv_y, D, BM, BN, BK, ONE, PREC)
        own = classes[:, None] == label.to(tl.int32)[None, :]
        if SHIFT:
            pulled, top_pull = _add_shifted(pulled, top_pull, -tile, own)
            pushed, top_push = _add_shifted(pushed, top_push, tile, (rows < N)[None, :] & (own == 0))
        else:
            grown = power(tile + tl.where(rows < N, 0.0, float("-inf"))[None, :])
            if any_of(own):
                pulled += tl.sum(tl.where(own, power(-tile), 0.0), 1)
                grown = tl.where(own, 0.0, grown)
            pushed += tl.sum(grown, 1)
    place = partial_ptr + program.to(tl.int64) * 4 * BM + inside
    tl.store(place, pulled)
    tl.store(place + BM, top_pull)
    # A row or proxy with NaN or Inf, or a label without a proxy, makes the loss and every gradient NaN.
    tl.store(place + 2 * BM, pushed + inv_q * 0.0 + tl.sum(poison, 0))
    tl.store(place + 3 * BM, top_push)
    if arrive(counter_ptr + 1 + block, SPLITS):
        shares = partial_ptr + block.to(tl.int64) * SPLITS * 4 * BM
        pull, pull_factor, top_pull = _logarithm(shares, margin, alpha, SPLITS, BM)
        push, push_factor, top_push = _logarithm(shares + 2 * BM, margin, alpha, SPLITS, BM)
        wanted = classes < C
        tl.store(factor_ptr + classes, pull_factor, mask=wanted)
        tl.store(factor_ptr + C + classes, push_factor, mask=wanted)
        tl.store(factor_ptr + 2 * C + classes, top_pull, mask=wanted)
        tl.store(factor_ptr + 3 * C + classes, top_push, mask=wanted)
        tl.store(sums_ptr + block, tl.sum(tl.where(wanted, pull, 0.0), 0))
        tl.store(sums_ptr + blocks + block, tl.sum(tl.where(wanted, push, 0.0), 0))
        tl.store(sums_ptr + 2 * blocks + block, tl.sum((wanted & (pull > 0)).to(tl.float64), 0))
        tl.store(sums_ptr + 3 * blocks + block, 0.0)
        if arrive(counter_ptr, blocks):
            sums = totals(sums_ptr, blocks, 4)  # the fourth is 0: Triton counts in powers of two
            pulls, pushes = pick(sums, 0), pick(sums, 1)
            per_pull = 1.0 / tl.maximum(pick(sums, 2), 1.0) + pushes * 0.0
            per_push = 1.0 / tl.cast(C, tl.float64) + pushes * 0.0
            tl.store(scale_ptr, per_pull * alpha)
            tl.store(scale_ptr + 1, per_push * alpha)
            tl.store(loss_ptr, (pulls * per_pull + pushes * per_push).to(tl.float32))


@triton.jit
def _add_shifted(sums, top, exponents, kept):
    """Add 2^(exponent - top) of the kept pairs, top being the largest exponent so far, rounded up; return sums and top."""
    higher = tl.maximum(top, tl.ceil(tl.max(tl.where(kept, exponents, top[:, None]), 1)))
    grown = tl.where(kept, power(exponents - higher[:, None]), 0.0)
    return sums * power(top - higher) + tl.sum(grown, 1), higher


@triton.jit
def _logarithm(place, margin, alpha, SPLITS: tl.constexpr, BM: tl.constexpr):
    """Return log(1 + sum of all shares) of BM proxies, and what a pair's gradient is made of: factor and top.

    exp(alpha·(margin ± cosine)) / (1 + sum) = factor · exp2(±alpha·log2(e)·cosine - top). Few numbers, so in float64: a
    loss near 0 keeps its digits, and the factor carries all that exponents of 50 would lose in float32.
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
    return tl.where(none, 0.0, log), tl.where(none, 0.0, base / (one + grown)).to(tl.float32), top


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, x_label_ptr, z_ptr, z_label_ptr, room_ptr, out_ptr,
    N, M, D, at_x, at_z, at_scale, at_factors, at_counters, at_partial, alpha,
    PROXIES: tl.constexpr, SHIFT: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, DC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the proxies against the rows, or of the rows against the proxies. Builds W again."""
    x_stats, z_stats, factor_ptr = floats(room_ptr, at_x), floats(room_ptr, at_z), floats(room_ptr, at_factors)
    scale_ptr = room_ptr + at_scale
    chunk, split = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS % SPLITS
    block = tl.program_id(0) // (CHUNKS * SPLITS)
    rows = block * BM + tl.arange(0, BM)
    at_d = chunk * DC
    inv_x = tl.load(x_stats + rows, mask=rows < N, other=1.0)
    steep = alpha * _LOG2E
    per_steep = tl.where(steep == 0, 0.0, 1.0 / tl.where(steep == 0, 1.0, steep))
    grad = tl.load(grad_ptr).to(tl.float32)
    per_pull, per_push = grad * tl.load(scale_ptr).to(tl.float32), grad * tl.load(scale_ptr + 1).to(tl.float32)
    sums, along = tl.zeros([BM, DC], tl.float32), tl.zeros([BM], tl.float32)
    x = ready_rows(x_ptr, rows, N, inv_x, D, 0, BK)
    share = tl.cdiv(tl.cdiv(M, BN), SPLITS) * BN
    for first in range(split * share, tl.minimum(split * share + share, M), BN):
        columns = first + tl.arange(0, BN)
        inv_z = tl.load(z_stats + columns, mask=columns < M, other=1.0)
        z = load_rows(z_ptr, columns, M, D, 0, BK)
        tile = _cosines(x, x_ptr, rows, N, inv_x, steep, z, z_ptr, columns, M, inv_z, D, BM, BN, BK, ONE, PREC)
        if PROXIES:
            classes, C = rows[:, None], N
            own = classes == tl.load(z_label_ptr + columns, mask=columns < M, other=-1).to(tl.int32)[None, :]
        else:
            classes, C = columns[None, :], M
            own = classes == tl.load(x_label_ptr + rows, mask=rows < N, other=-1).to(tl.int32)[:, None]
        pull = -per_pull * tl.load(factor_ptr + classes, mask=classes < C, other=0.0)
        push = per_push * tl.load(factor_ptr + C + classes, mask=classes < C, other=0.0)
        if SHIFT:
            top_pull = tl.load(factor_ptr + 2 * C + classes, mask=classes < C, other=0.0)
            top_push = tl.load(factor_ptr + 3 * C + classes, mask=classes < C, other=0.0)
            weight = tl.where(own, pull, push) * power(tl.where(own, -tile - top_pull, tile - top_push))
            # Columns that are not there have a power of up to +146, and infinity times 0 is NaN.
            weight = tl.where((columns < M)[None, :] & (tl.where(own, pull, push) != 0), weight, 0.0)
        else:
            weight = push * power(tile)
            if any_of(own):
                weight = tl.where(own, pull * power(-tile), weight)
        sums, along = _add(
            sums, along, weight, tile * per_steep, z, x_ptr, z_ptr, columns, M, inv_z, D, at_d, CHUNKS, BK, DC, PREC
        )  # fmt: skip
    finish_rows(
        sums, along, x_ptr, rows, N, inv_x, D, at_d, block, split, chunk, per_push * 0.0,
        counters(room_ptr, at_counters), floats(room_ptr, at_partial), out_ptr, SPLITS, CHUNKS, BM, DC,
    )  # fmt: skip


@triton.jit
def _halves(y, kind):
    """Return two half-precision parts whose sum is y to 16 digits (bfloat16) or 22 (float16)."""
    high = y.to(kind)
    return high, (y - high.to(tl.float32)).to(kind)


@triton.jit
def _cosines(
    x, x_ptr, rows, N, inv_x, steep, z, z_ptr, columns, M, inv_z, D,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """As `cosines` with the factor `steep`, also of half-precision rows with float32 ones, made unit rows in two halves."""
    if x_ptr.dtype.element_ty == z_ptr.dtype.element_ty:
        tile = cosines(x, x_ptr, rows, N, inv_x, steep, z, z_ptr, columns, M, inv_z, D, BM, BN, BK, ONE, PREC)
    else:
        tile = _in_halves(x, z, inv_z, tl.zeros([BM, BN], tl.float32))
        if not ONE:
            for k in range(BK, D, BK):
                x = ready_rows(x_ptr, rows, N, inv_x, D, k, BK)
                tile = _in_halves(x, load_rows(z_ptr, columns, M, D, k, BK), inv_z, tile)
        if x_ptr.dtype.element_ty == tl.float32:
            tile = tile * (inv_z * steep)[None, :]
        elif x_ptr.dtype.element_ty == tl.bfloat16:
            tile = tile * (inv_x / power_of_two(inv_x) * steep)[:, None]
        else:
            tile = tile * (inv_x * steep)[:, None]
    return tile


@triton.jit
def _in_halves(x, z, inv_z, tile):
    if x.dtype == tl.float32:
        high, low = _halves(x, z.dtype)  # pyright: ignore[reportGeneralTypeIssues]
        return tl.dot(low, tl.trans(z), tl.dot(high, tl.trans(z), tile))
    else:
        high, low = _halves(unit(z, inv_z), x.dtype)  # pyright: ignore[reportGeneralTypeIssues]
        return tl.dot(x, tl.trans(low), tl.dot(x, tl.trans(high), tile))


@triton.jit
def _add(
    sums, along, weight, tile, z, x_ptr, z_ptr, columns, M, inv_z, D, at_d,
    CHUNKS: tl.constexpr, BK: tl.constexpr, DC: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """As add_weighted; what is float32 beside bfloat16 goes in two halves: proxies, or the weights of their gradient."""
    if CHUNKS > 1 or BK != DC:  # else it is what was multiplied before
        z = load_rows(z_ptr, columns, M, D, at_d, DC)
    if (x_ptr.dtype.element_ty == tl.bfloat16) & (z_ptr.dtype.element_ty == tl.float32):
        high, low = _halves(unit(z, inv_z), tl.bfloat16)  # pyright: ignore[reportGeneralTypeIssues]
        scaled = weight.to(tl.bfloat16)
        sums = tl.dot(scaled, low, tl.dot(scaled, high, sums))
        if CHUNKS > 1:
            along += tl.sum(scaled.to(tl.float32) * tile, 1)  # rounded like the sums, so that the difference keeps its digits
    elif (x_ptr.dtype.element_ty == tl.float32) & (z_ptr.dtype.element_ty == tl.bfloat16):
        high, low = _halves(weight * inv_z[None, :], tl.bfloat16)  # pyright: ignore[reportGeneralTypeIssues]
        sums = tl.dot(low, z, tl.dot(high, z, sums))
        if CHUNKS > 1:
            along += tl.sum((high.to(tl.float32) + low.to(tl.float32)) * tile * (1.0 / inv_z)[None, :], 1)
    else:
        sums, along = add_weighted(  # pyright: ignore[reportGeneralTypeIssues]
            sums, along, weight, tile, z, z_ptr, columns, M, inv_z, D, at_d, CHUNKS, BK, DC, PREC
        )  # fmt: skip
    return sums, along


def _shifted(alpha: float, margin: float) -> bool:
    """Return whether exponents must be kept small: else 2^20 terms stay below 2^100, and none is below 2^-64."""
    return abs(alpha) * (1 + abs(margin)) > 44


def _plan(s: Shape) -> Plan:
    margin, alpha = s.settings
    t, room = tiles(s.others, s.rows, s.width, s.wide, s.tf32), Room()
    blocks, programs = t.row_blocks(s.others), t.programs(s.others)
    at_rows, at_proxies, at_sums = room.floats(2 * s.rows), room.floats(2 * s.others), room.doubles(4 * blocks)
    at_scale, at_factors, at_partial = room.doubles(2), room.floats(4 * s.others), room.floats(4 * programs * t.BM)
    back = Backward(s, room, at_rows, at_proxies, least=1 + blocks)
    places = (at_rows, at_proxies, at_sums, at_scale, at_factors, at_partial, back.at_counters)
    shift = {"SHIFT": _shifted(alpha, margin)}
    return Plan(
        forward=(
            row_stats(s, at_rows, at_proxies, back.at_counters, back.counters),
            Launch(_forward_kernel, programs, t, (s.rows, s.others, s.width, *places, margin, alpha), shift),
        ),
        backward=back.launches(
            _backward_kernel, (at_scale, at_factors), (alpha,), {**shift, "PROXIES": False}, {**shift, "PROXIES": True}
        ),
        room=room.words,
    )


register("proxy_anchor", _plan, mixed=True)


def proxy_anchor_loss(
    embeddings: Tensor, labels: Tensor, proxies: Tensor, *, margin: float = 0.1, alpha: float = 32, tf32: bool = False
) -> Tensor:
    """Return what `ProxyAnchorLoss` with these settings and proxies [C, D] returns, without a module."""
    labels, _ = check_rows(embeddings, labels, None, None)
    if embeddings.shape[1] != proxies.shape[1] or embeddings.device != proxies.device:
        raise PmlkitError(
            f"proxies {tuple(proxies.shape)} on {proxies.device} do not fit embeddings "
            f"{tuple(embeddings.shape)} on {embeddings.device}: same width and device needed"
        )
    if fusable(embeddings, proxies):
        return fused_loss("proxy_anchor", (float(margin), float(alpha)), tf32, embeddings, labels, proxies)
    return reference(embeddings, labels, proxies, margin=margin, alpha=alpha)


class ProxyAnchorLoss(FusedLoss):
    """Proxy Anchor loss as ProxyAnchorLoss of pytorch-metric-learning, fused: memory O(N + C), no host synchronisation.

    Called with embeddings [N, D] (float32, bfloat16 or float16 on a CUDA device; D to 1024, N and C to 2^20; other rows
    go to the plain reference) and labels [N] of any integer type with values in [0, C). Returns a float32 scalar;
    gradients have the type of their rows. `proxies` [C, D] is a float32 parameter and stays one. Deterministic.

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
