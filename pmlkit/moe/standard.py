"""The bf16 layer of one rank in separate launches: route, gather, W13 with SwiGLU, W2, combine, and the same backward.

Forward reads and writes, beside the weights, 4·R·D + 2·R·F values (6·F more where h1 is kept) for R = T·K routes. Rounding
to bf16: h1, h2, each route's output, the layer's; backward: the gradient of h1, the scored h2 and each row's dx.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pmlkit.moe.combine import combine, gather, sum_parts
from pmlkit.moe.grouped import project, project_back, project_up
from pmlkit.moe.routing import Routing
from pmlkit.moe.swiglu import SwiGLU
from pmlkit.moe.wgrad import weight_gradient


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of x [T, D], scores [T, K] float32, w13 [E, 2F, D] and w2 [E, D, F]; None for what was not asked for."""

    x_TD: Tensor | None
    scores_TK: Tensor | None
    w13: Tensor | None
    w2: Tensor | None


def forward(
    x_TD: Tensor, scores_TK: Tensor, w13: Tensor, w2: Tensor, routing: Routing, activation: SwiGLU, keep: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the layer's output [T, D], and what backward needs: the gathered rows [R, D] and h1 [R, 2F]."""
    x_RD = gather(x_TD, routing)
    h1, h2 = project_up(x_RD, w13, routing, activation, keep)
    out_TD = combine(project(h2, w2, routing), routing, scores_TK)
    return out_TD, [] if h1 is None else [x_RD, h1]


def backward(
    grad_TD: Tensor, scores_TK: Tensor, w13: Tensor, w2: Tensor, saved: list[Tensor], routing: Routing, activation: SwiGLU,
    *, weights: bool = True, rows: bool = True, dtype: torch.dtype = torch.bfloat16,
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Gradients:  # fmt: skip
    """Return the gradients of one layer.

    weights, rows: whether those of the weights, and those of x, are wanted. dtype: of the weights' gradients. into:
    gradients of w13 and w2 to add to in place, in their own type.
    """
    x_RD, h1 = saved
    grad_RD = gather(grad_TD, routing)
    dh1, scored_h2, parts = project_back(grad_RD, w2, h1, scores_TK, routing, activation)
    dw2 = weight_gradient(grad_RD, scored_h2, routing, dtype, into[1]) if weights else None
    dw13 = weight_gradient(dh1, x_RD, routing, dtype, into[0]) if weights else None
    dx_TD = combine(project(dh1, w13, routing, transposed=True), routing, None) if rows else None
    return Gradients(dx_TD, sum_parts(parts, routing), dw13, dw2)
