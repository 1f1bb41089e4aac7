"""Gradients of expert weights: for every expert the product of two sets of rows over the expert's rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.moe.columns import first_slot
from pmlkit.moe.formats import Folded
from pmlkit.moe.grouped import Tile, described, halves
from pmlkit.moe.launch import launch, processors
from pmlkit.moe.routing import Routing


def wgrad_tile() -> Tile:
    """Return the tile: BM of the left columns by BN of the right ones, BK rows at once."""
    return Tile(128, 256, 64, 8, 3)


def folded_wgrad_tile() -> Tile:
    """Return the tile of mxfp8 operands; BK divides what experts' slots are a multiple of."""
    return Tile(128, 256, 128, 8, 3)


def weight_gradient(
    left_RM: Tensor, right_RN: Tensor, routing: Routing, dtype: torch.dtype = torch.bfloat16, into: Tensor | None = None
) -> Tensor:
    """Return left' right over the rows of each expert, [E, M, N] in `dtype`; 0 for an expert without rows.

    into: a gradient [E, M, N] to add to in place, in its own type; it is returned.
    """
    experts, M, N, t = len(routing.offsets_E1) - 1, left_RM.shape[1], right_RN.shape[1], wgrad_tile()
    out = left_RM.new_empty(experts, M, N, dtype=dtype) if into is None else into
    launch(
        _wgrad_kernel, (processors(left_RM),),
        described(left_RM, [t.BK, t.BM]), described(right_RN, [t.BK, t.BN]), left_RM, right_RN, out, routing.offsets_E1,
        experts, M, N, into is not None, t.BM, t.BN, t.BK, **t.options,
    )  # fmt: skip
    return out


def folded_weight_gradient(
    left: Folded, right: Folded, routing: Routing, promote: bool,
    dtype: torch.dtype = torch.bfloat16, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the same of mxfp8 operands by columns (`columns.py`): left [M, slots], right [N, slots], scales [E, M], [E, N]."""
    experts, M, N, t = len(routing.offsets_E1) - 1, len(left.values), len(right.values), folded_wgrad_tile()
    out = torch.empty(experts, M, N, dtype=dtype, device=left.scale.device) if into is None else into
    launch(
        _folded_kernel, (processors(out),),
        described(left.values, [t.BM, t.BK]), described(right.values, [t.BN, t.BK]), left.scale, right.scale, out,
        routing.offsets_E1, experts, M, N, into is not None, promote, triton.next_power_of_2(experts), t.BM, t.BN, t.BK,
        **t.options,
    )  # fmt: skip
    return out


@triton.jit
def _wgrad_kernel(
    left, right, left_ptr, right_ptr, out_ptr, offsets_ptr, experts, M, N,
    ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), experts * down * across, tl.num_programs(0), flatten=True):
        expert, inside = tile // (down * across), tile % (down * across)
        m, n = inside % down * BM, inside // down * BN
        begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
        whole = begin + (end - begin) // BK * BK
        sums = tl.zeros([BM, BN], tl.float32)
        for k in range(begin, whole, BK):
            sums = tl.dot(left.load([k, m]).T, right.load([k, n]), sums)
        at_m, at_n = m + tl.arange(0, BM), n + tl.arange(0, BN)
        if whole < end:  # rows behind the expert's last are another's, or nobody's
            rows = whole + tl.arange(0, BK)
            there = (rows < end)[:, None]
            place = rows[:, None].to(tl.int64)
            a = tl.load(left_ptr + place * M + at_m[None, :], mask=there & (at_m < M)[None, :], other=0.0)
            b = tl.load(right_ptr + place * N + at_n[None, :], mask=there & (at_n < N)[None, :], other=0.0)
            sums = tl.dot(a.T, b, sums)
        _write(sums, out_ptr, expert, at_m, n, M, N, ADD, BN)


@triton.jit
def _folded_kernel(
    left, right, left_scale_ptr, right_scale_ptr, out_ptr, offsets_ptr, experts, M, N,
    ADD: tl.constexpr, PROMOTE: tl.constexpr, EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), experts * down * across, tl.num_programs(0), flatten=True):
        expert, inside = tile // (down * across), tile % (down * across)
        m, n = inside % down * BM, inside // down * BN
        slot = first_slot(offsets_ptr, expert, EXPERTS)
        length = tl.load(offsets_ptr + expert + 1) - tl.load(offsets_ptr + expert)
        sums = tl.zeros([BM, BN], tl.float32)
        for k in range(slot, slot + length, BK):
            sums = tl.dot(left.load([m, k]), right.load([n, k]).T, sums, max_num_imprecise_acc=BK if PROMOTE else None)
        at_m, at_n = m + tl.arange(0, BM), n + tl.arange(0, BN)
        of_left = tl.load(left_scale_ptr + expert * M + at_m, mask=at_m < M, other=0.0)
        of_right = tl.load(right_scale_ptr + expert * N + at_n, mask=at_n < N, other=0.0)
        _write(sums * of_left[:, None] * of_right[None, :], out_ptr, expert, at_m, n, M, N, ADD, BN)


@triton.jit
def _write(sums, out_ptr, expert, at_m, n, M, N, ADD: tl.constexpr, BN: tl.constexpr):
    """Write or add a tile of an expert's gradient, in two halves of its columns."""
    HALF: tl.constexpr = BN // 2
    first, second = halves(sums)  # pyright: ignore[reportGeneralTypeIssues]
    base = out_ptr + expert.to(tl.int64) * M * N + at_m[:, None].to(tl.int64) * N
    for half in tl.static_range(2):
        at = n + half * HALF + tl.arange(0, HALF)
        mask = (at_m < M)[:, None] & (at < N)[None, :]
        value = first if half == 0 else second
        if ADD:
            value += tl.load(base + at[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(base + at[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)
