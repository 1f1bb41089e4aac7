"""Operands of weight gradients in mxfp8: rows of an expert are the contraction, so that blocks are 32 rows of one column.

A tensor core's fp8 operands have the contraction along memory. So they are written transposed, [C, slots]: each expert's
rows begin at a slot that 128 divides, and what lies between one's last row and the next one's first is zero, which adds
nothing and is in no block's maximum. Scales are folded (`formats.fold`), one a column and expert left.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.moe.formats import Folded
from pmlkit.moe.launch import launch
from pmlkit.moe.quantise import e8m0_codes, magnitude_bits, power, to_e4m3
from pmlkit.moe.routing import Routing
from pmlkit.moe.swiglu import SwiGLU, swiglu_backward

SLOT = tl.constexpr(128)  # rows that an expert's slots are a multiple of: what a product takes at once
_COLUMNS = 64


def slots(routes: int, experts: int) -> int:
    """Return how many slots hold so many rows of experts, however they are spread."""
    return -(-(routes + min(experts, routes) * (SLOT.value - 1)) // SLOT.value) * SLOT.value


def token_columns(x_TC: Tensor, routing: Routing, lost: Tensor) -> Folded:
    """Return each row's token of [T, C] by columns: values [C, slots], scale [E, C]."""
    return _start(x_TC, x_TC, x_TC, routing, lost, SwiGLU(), "token", x_TC.shape[1])


def activation_columns(h1: Tensor, scores_TK: Tensor, routing: Routing, activation: SwiGLU, lost: Tensor) -> Folded:
    """Return the activation of gate and up [R, 2F] times the score, by columns: values [F, slots], scale [E, F]."""
    return _start(h1, h1, scores_TK, routing, lost, activation, "activation", h1.shape[1] // 2)


def slope_columns(h1: Tensor, dh2: Tensor, scores_TK: Tensor, routing: Routing, activation: SwiGLU, lost: Tensor) -> Folded:
    """Return the gradient of h1 [R, 2F], from that of the activation before scores [R, F], by columns: [2F, slots]."""
    return _start(h1, dh2, scores_TK, routing, lost, activation, "slope", h1.shape[1])


KINDS = ("token", "activation", "slope")


def _start(
    x: Tensor, grad: Tensor, scores: Tensor, routing: Routing, lost: Tensor, activation: SwiGLU, kind: str, width: int
) -> Folded:
    experts, room = len(routing.offsets_E1) - 1, slots(len(routing.source_R), len(routing.offsets_E1) - 1)
    values = torch.empty(width, room, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(experts, width, dtype=torch.float32, device=x.device)
    launch(
        _columns_kernel, (experts, -(-width // _COLUMNS)),
        x, grad, scores, routing.source_R, routing.route_R, routing.offsets_E1, values, scale, lost, width, room,
        *activation.numbers, KINDS.index(kind), activation.limit is not None, triton.next_power_of_2(experts), _COLUMNS,
        num_warps=8,
    )  # fmt: skip
    return Folded(values, scale, lost)


@triton.jit
def first_slot(offsets_ptr, expert, EXPERTS: tl.constexpr):
    """Return the first slot of an expert's rows."""
    earlier = tl.arange(0, EXPERTS)
    begin = tl.load(offsets_ptr + earlier, mask=earlier < expert, other=0)
    end = tl.load(offsets_ptr + earlier + 1, mask=earlier < expert, other=0)
    return tl.sum((end - begin + SLOT - 1) // SLOT * SLOT, 0)


@triton.jit
def _tile(
    x_ptr, grad_ptr, score_ptr, source_ptr, route_ptr, row, end, at, C, alpha, limit,
    KIND: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """Return 128 rows of some columns in float32, zero where there are none."""
    rows = row + tl.arange(0, SLOT)
    there, mask = rows < end, (rows < end)[:, None] & (at < C)[None, :]
    if KIND == 0:
        source = tl.load(source_ptr + rows, mask=there, other=0)
        return tl.load(x_ptr + source[:, None].to(tl.int64) * C + at[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        F = C if KIND == 1 else C // 2
        column = at % F
        place = rows[:, None].to(tl.int64) * (2 * F) + column[None, :]
        gate = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + place + F, mask=mask, other=0.0).to(tl.float32)
        h2, by_gate, by_up = swiglu_backward(gate, up, alpha, limit, CLAMPED)  # pyright: ignore[reportGeneralTypeIssues]
        score = tl.load(score_ptr + tl.load(route_ptr + rows, mask=there, other=0), mask=there, other=0.0)[:, None]
        if KIND == 2:
            place = rows[:, None].to(tl.int64) * F + column[None, :]
            grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
            h2 = grad * tl.where((at < F)[None, :], by_gate, by_up)
        return tl.where(mask, h2 * score, 0.0)


@triton.jit
def _columns_kernel(
    x_ptr, grad_ptr, score_ptr, source_ptr, route_ptr, offsets_ptr, values_ptr, scale_ptr, lost_ptr, C, room, alpha, limit,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, EXPERTS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Look at an expert's rows once for the largest scale of every column, and once more to write them."""
    expert, at = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    top = tl.zeros([BC], tl.int32)
    for row in range(begin, end, SLOT):
        x = _tile(x_ptr, grad_ptr, score_ptr, source_ptr, route_ptr, row, end, at, C, alpha, limit, KIND, CLAMPED)
        codes = e8m0_codes(tl.max(magnitude_bits(x).reshape(SLOT // 32, 32, BC), 1))
        top = tl.maximum(top, tl.max(tl.where(codes == 255, 0, codes), 0))
    tl.store(scale_ptr + expert * C + at, power(top - 127), mask=at < C)
    slot, lost = first_slot(offsets_ptr, expert, EXPERTS), tl.zeros([BC], tl.int32)
    for row in range(begin, end, SLOT):
        x = _tile(x_ptr, grad_ptr, score_ptr, source_ptr, route_ptr, row, end, at, C, alpha, limit, KIND, CLAMPED)
        x = x.reshape(SLOT // 32, 32, BC)
        codes = e8m0_codes(tl.max(magnitude_bits(x), 1))
        bad = (codes == 255)[:, None, :]
        values = to_e4m3(x * power(tl.maximum(127 - codes, -126))[:, None, :], bad)
        shift = power(tl.maximum(tl.where(codes == 255, 0, codes) - top[None, :], -126))
        exact = values.to(tl.float32) * shift[:, None, :]
        folded = to_e4m3(exact, bad)
        lost += tl.sum(tl.sum(((folded.to(tl.float32) != exact) & (bad == 0)).to(tl.int32), 1), 0)
        place = at[:, None].to(tl.int64) * room + slot + row - begin + tl.arange(0, SLOT)[None, :]
        tl.store(values_ptr + place, folded.reshape(SLOT, BC).T, mask=(at < C)[:, None])
    total = tl.sum(lost, 0)
    tl.atomic_add(lost_ptr, total, mask=total > 0, sem="relaxed")
