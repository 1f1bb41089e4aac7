"""The block-scaled layers of one rank in separate launches: quantise, gather, W13 and SwiGLU, W2, combine."""

import torch
from torch import Tensor

from pmlkit.moe import decoded, folded
from pmlkit.moe.combine import combine, gather
from pmlkit.moe.formats import NVFP4, Folded
from pmlkit.moe.prepare import Prepared
from pmlkit.moe.quantise import quantise_folded
from pmlkit.moe.routing import LOST, Routing
from pmlkit.moe.swiglu import SwiGLU


def forward(
    x_TD: Tensor, scores_TK: Tensor, weights: Prepared, routing: Routing, activation: SwiGLU, promote: bool = False
) -> Tensor:
    """Return the layer's output [T, D] in bf16. A token is quantised once, not once a route."""
    w13, w2 = weights.w13, weights.w2
    if isinstance(w13, NVFP4) and isinstance(w2, NVFP4):
        return combine(_nvfp4(x_TD, w13, w2, routing, activation), routing, scores_TK)
    assert isinstance(w13, Folded) and isinstance(w2, Folded)
    return combine(_mxfp8(x_TD, w13, w2, routing, activation, promote), routing, scores_TK)


def _mxfp8(x_TD: Tensor, w13: Folded, w2: Folded, routing: Routing, activation: SwiGLU, promote: bool) -> Tensor:
    """Return each row's output. Values that lose digits to folding are counted in the status word."""
    lost = routing.status[LOST.value :]
    x = quantise_folded(x_TD, lost=lost)
    rows_RD = gather(x.values.view(torch.bfloat16), routing).view(torch.float8_e4m3fn)
    h2, top_R, _ = folded.project_up(rows_RD, x.scale, w13, routing, activation, promote)
    return folded.project(folded.fold_rows(h2, top_R, routing, lost), w2, routing, promote)


def _nvfp4(x_TD: Tensor, w13: NVFP4, w2: NVFP4, routing: Routing, activation: SwiGLU) -> Tensor:
    """Return each row's output; h1 is rounded to bf16 and its activation quantised from float32."""
    x, amax_T = decoded.decoded_rows(x_TD)
    h1 = decoded.project(gather(x, routing), amax_T, routing.source_R, w13, routing)
    h2, amax_R = decoded.activated_rows(h1, routing, activation)
    return decoded.project(h2, amax_R, None, w2, routing)
