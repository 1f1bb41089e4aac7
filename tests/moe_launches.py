"""Runs the expert layer in every pipeline on tensors without data, for whoever writes down what it launches."""

import torch

from pmlkit.moe import mega, staged, standard, trained
from pmlkit.moe.both_ways import both_ways
from pmlkit.moe.formats import Folded
from pmlkit.moe.operators import rows_of_block
from pmlkit.moe.prepare import prepare_weights
from pmlkit.moe.routing import route
from pmlkit.moe.swiglu import SwiGLU


def everything(routes: int, experts: int = 6, width: int = 7168, inner: int = 3072, top_k: int = 6) -> None:
    """Run forward and backward passes of a layer of so many routes."""
    with torch.device("meta"):
        tokens, bf16 = routes // top_k, torch.bfloat16
        x_TD, ids, scores = torch.empty(tokens, width, dtype=bf16), torch.empty(tokens, top_k).int(), torch.empty(tokens, top_k)
        w13, w2 = torch.empty(experts, 2 * inner, width, dtype=bf16), torch.empty(experts, width, inner, dtype=bf16)
        routing = route(ids, experts, tile=rows_of_block(routes, experts))
        for activation in (SwiGLU(), SwiGLU(7.0)):
            out, saved = standard.forward(x_TD, scores, w13, w2, routing, activation, keep=True)
            standard.backward(out, scores, w13, w2, saved, routing, activation)
            weights = prepare_weights(w13, w2)
            assert isinstance(weights.w13, Folded) and isinstance(weights.w2, Folded)
            for promote in (False, True):
                mega.forward(x_TD, scores, weights.w13, weights.w2, routing, activation, promote)
            staged.forward(x_TD, scores, weights, routing, activation)
            staged.forward(x_TD, scores, prepare_weights(w13, w2), routing, activation, promote=True)
            staged.forward(x_TD, scores, prepare_weights(w13, w2, "nvfp4"), routing, activation)
            for promote in (False, True):
                both = both_ways(w13), both_ways(w2)
                out, h1 = trained.forward(x_TD, scores, *both, routing, activation, promote, keep=True)
                assert h1 is not None
                trained.backward(out, x_TD, scores, *both, h1, routing, activation, promote)
