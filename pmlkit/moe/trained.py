"""The mxfp8 layer of one rank for training in separate launches: every product's operands are quantised along its contraction.

Forward keeps h1 in bf16 beside the input. Backward quantises the output's gradient by rows (for the product with W2) and by
columns (for W2's gradient), the gradient of h1 likewise, and x and the activation by columns.
"""

import torch
from torch import Tensor

from pmlkit.moe import folded
from pmlkit.moe.both_ways import BothWays
from pmlkit.moe.columns import activation_columns, slope_columns, token_columns
from pmlkit.moe.combine import combine, gather
from pmlkit.moe.quantise import quantise_folded
from pmlkit.moe.routing import LOST, Routing
from pmlkit.moe.slope import slope_rows
from pmlkit.moe.standard import Gradients
from pmlkit.moe.swiglu import SwiGLU
from pmlkit.moe.wgrad import folded_weight_gradient


def forward(
    x_TD: Tensor,
    scores_TK: Tensor,
    w13: BothWays,
    w2: BothWays,
    routing: Routing,
    activation: SwiGLU,
    promote: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [T, D] in bf16 and, if it is to be kept, h1 [R, 2F]."""
    lost = routing.status[LOST.value :]
    x = quantise_folded(x_TD, lost=lost)
    rows_RD = gather(x.values.view(torch.bfloat16), routing).view(torch.float8_e4m3fn)
    h2, top_R, h1 = folded.project_up(rows_RD, x.scale, w13.rows, routing, activation, promote, keep)
    out = folded.project(folded.fold_rows(h2, top_R, routing, lost), w2.rows, routing, promote)
    return combine(out, routing, scores_TK), h1


def backward(
    grad_TD: Tensor, x_TD: Tensor, scores_TK: Tensor, w13: BothWays, w2: BothWays, h1: Tensor, routing: Routing,
    activation: SwiGLU, promote: bool, *, weights: bool = True, rows: bool = True, dtype: torch.dtype = torch.bfloat16,
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Gradients:  # fmt: skip
    """Return the gradients of one layer; arguments as `standard.backward` has them."""
    lost = routing.status[LOST.value :]
    dh2 = folded.project(quantise_folded(grad_TD, routing, lost), w2.columns, routing, promote)
    dh1, dscores = slope_rows(h1, dh2, scores_TK, routing, activation, lost)
    dx = combine(folded.project(dh1, w13.columns, routing, promote), routing, None) if rows else None
    if not weights:
        return Gradients(dx, dscores, None, None)
    dw2 = folded_weight_gradient(
        token_columns(grad_TD, routing, lost), activation_columns(h1, scores_TK, routing, activation, lost),
        routing, promote, dtype, into[1],
    )  # fmt: skip
    dw13 = folded_weight_gradient(
        slope_columns(h1, dh2, scores_TK, routing, activation, lost), token_columns(x_TD, routing, lost),
        routing, promote, dtype, into[0],
    )  # fmt: skip
    return Gradients(dx, dscores, dw13, dw2)
