"""The activation's backward pass by rows, for mxfp8: the gradient of h1 as the next product's operand, and of the scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.moe.formats import MXFP8_BLOCK, Folded
from pmlkit.moe.launch import launch
from pmlkit.moe.quantise import e8m0_codes, folded_blocks, magnitude_bits, power, to_e4m3
from pmlkit.moe.routing import Routing
from pmlkit.moe.swiglu import SwiGLU, swiglu_backward


def slope_rows(
    h1: Tensor, dh2: Tensor, scores_TK: Tensor, routing: Routing, activation: SwiGLU, lost: Tensor
) -> tuple[Folded, Tensor]:
    """Return the gradient of h1 [R, 2F], folded mxfp8 along 2F, and that of the scores [T, K], float32.

    h1: gate and up in bf16. dh2 [R, F]: gradient of the activation before scores. A score's gradient is the row product of
    dh2 with the activation as the second projection saw it, in mxfp8. lost: as `quantise_folded` has it.
    """
    rows, F = dh2.shape
    values = torch.empty(rows, 2 * F, dtype=torch.float8_e4m3fn, device=h1.device)
    scale, dscores = torch.empty(rows, dtype=torch.float32, device=h1.device), torch.zeros_like(scores_TK)
    blocks = triton.next_power_of_2(-(-F // MXFP8_BLOCK))
    launch(
        _slope_kernel, (rows,), h1, dh2, scores_TK, routing.route_R, routing.offsets_E1[-1:], values, scale, dscores, lost, F,
        *activation.numbers, activation.limit is not None, blocks, num_warps=16 if blocks > 64 else 8 if blocks > 16 else 4,
    )  # fmt: skip
    return Folded(values, scale, lost), dscores


@triton.jit
def _slope_kernel(
    h1_ptr, dh2_ptr, score_ptr, route_ptr, count_ptr, values_ptr, scale_ptr, dscore_ptr, lost_ptr, F, alpha, limit,
    CLAMPED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count_ptr):
        at = tl.arange(0, BLOCKS)[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask, place = at < F, row * 2 * F + at
        gate = tl.load(h1_ptr + place, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h1_ptr + place + F, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dh2_ptr + row * F + at, mask=mask, other=0.0).to(tl.float32)
        h2, by_gate, by_up = swiglu_backward(gate, up, alpha, limit, CLAMPED)  # pyright: ignore[reportGeneralTypeIssues]
        h2 = tl.where(mask, h2, 0.0)
        codes = e8m0_codes(tl.max(magnitude_bits(h2), 1))
        seen = to_e4m3(h2 * power(tl.maximum(127 - codes, -126))[:, None], (codes == 255)[:, None]).to(tl.float32)
        route = tl.load(route_ptr + row)
        tl.store(dscore_ptr + route, tl.sum(tl.sum(grad * (seen * power(tl.minimum(codes, 254) - 127)[:, None]), 1), 0))
        grad *= tl.load(score_ptr + route)
        by_gate, by_up = tl.where(mask, grad * by_gate, 0.0), tl.where(mask, grad * by_up, 0.0)
        of_gate, of_up = e8m0_codes(tl.max(magnitude_bits(by_gate), 1)), e8m0_codes(tl.max(magnitude_bits(by_up), 1))
        known = tl.maximum(tl.where(of_gate == 255, 0, of_gate), tl.where(of_up == 255, 0, of_up))
        top = tl.max(known, 0)
        first, lost = folded_blocks(by_gate, of_gate, top)  # pyright: ignore[reportGeneralTypeIssues]
        second, more = folded_blocks(by_up, of_up, top)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(values_ptr + place, first, mask=mask)
        tl.store(values_ptr + place + F, second, mask=mask)
        tl.store(scale_ptr + row, power(top - 127))
        tl.atomic_add(lost_ptr, lost + more, mask=lost + more > 0, sem="relaxed")
