"""Between tokens and rows: rows gathered for the experts, and what comes back summed over a token's routes.

Sums run over k in ascending order in float32, so that equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.moe.launch import launch
from pmlkit.moe.routing import NOT_FINITE, Routing

_COLUMNS = 1024  # of a program: 16 bytes a thread of four warps


def gather(x_TD: Tensor, routing: Routing) -> Tensor:
    """Return each row's token, [R, D]; rows that are not there are zero."""
    rows, width = len(routing.source_R), x_TD.shape[1]
    out_RD = x_TD.new_empty(rows, width)
    grid = (rows, -(-width // _COLUMNS))
    launch(_gather_kernel, grid, x_TD, routing.source_R, routing.offsets_E1[-1:], out_RD, width, _COLUMNS)
    return out_RD


def combine(rows_RD: Tensor, routing: Routing, scores_TK: Tensor | None) -> Tensor:
    """Return the sum of a token's rows [R, D], times scores [T, K] float32 where given: [T, D] in the rows' type.

    A route without a row adds nothing. Tokens with NaN or Inf are counted in the status word.
    """
    tokens, top_k = routing.row_TK.shape
    width = rows_RD.shape[1]
    out_TD = rows_RD.new_empty(tokens, width)
    grid = (tokens, -(-width // _COLUMNS))
    launch(
        _combine_kernel, grid,
        rows_RD, routing.row_TK, routing.row_TK if scores_TK is None else scores_TK, routing.status, out_TD, width,
        top_k, scores_TK is not None, NOT_FINITE, _COLUMNS,
    )  # fmt: skip
    return out_TD


def sum_parts(parts_RP: Tensor, routing: Routing) -> Tensor:
    """Return the sums of each row's parts [R, P] float32, at its route: [T, K]; 0 for a route without a row."""
    out_TK = torch.empty_like(routing.row_TK, dtype=torch.float32)
    count = parts_RP.shape[1]
    grid, width = (-(-out_TK.numel() // 128),), triton.next_power_of_2(count)
    launch(_parts_kernel, grid, parts_RP, routing.row_TK, out_TK, out_TK.numel(), count, width)
    return out_TK


@triton.jit
def _gather_kernel(x_ptr, source_ptr, rows_ptr, out_ptr, D, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < tl.load(rows_ptr)
    source = tl.load(source_ptr + row, mask=there, other=0).to(tl.int64)
    x = tl.load(x_ptr + source * D + columns, mask=(columns < D) & there, other=0.0)
    tl.store(out_ptr + row * D + columns, x, mask=columns < D)


@triton.jit
def _combine_kernel(
    rows_ptr, row_ptr, score_ptr, status_ptr, out_ptr, D, K, SCORED: tl.constexpr, BAD: tl.constexpr, COLUMNS: tl.constexpr
):
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for k in range(0, K):
        row = tl.load(row_ptr + token * K + k).to(tl.int64)
        x = tl.load(rows_ptr + row * D + columns, mask=(columns < D) & (row >= 0), other=0.0).to(tl.float32)
        if SCORED:  # a dropped route adds nothing, whatever its score
            x = tl.where(row >= 0, x * tl.load(score_ptr + token * K + k), 0.0)
        total += x
    tl.store(out_ptr + token * D + columns, total.to(out_ptr.dtype.element_ty), mask=columns < D)
    if SCORED:
        bad = tl.sum((total * 0.0 != 0.0).to(tl.int32), 0) > 0
        tl.atomic_add(status_ptr + BAD, 1, mask=bad, sem="relaxed")


@triton.jit
def _parts_kernel(parts_ptr, row_ptr, out_ptr, routes, count, COUNT: tl.constexpr):
    at, part = tl.program_id(0) * 128 + tl.arange(0, 128), tl.arange(0, COUNT)
    row = tl.load(row_ptr + at, mask=at < routes, other=-1).to(tl.int64)
    mask = (row >= 0)[:, None] & (part < count)[None, :]
    parts = tl.load(parts_ptr + row[:, None] * count + part[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + at, tl.sum(parts, 1), mask=at < routes)
