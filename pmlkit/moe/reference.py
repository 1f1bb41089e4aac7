"""The expert layer in float64 with the kernels' rounding points: slow, plain and obviously right.

out[t] = sum over k of score[t, k] · W2[e] (silu(gate)·up), [gate, up] = W13[e] x[t], e = id[t, k], k ascending.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pmlkit.moe.formats import from_mxfp8, from_nvfp4, largest, mxfp8, nvfp4
from pmlkit.moe.standard import Gradients
from pmlkit.moe.swiglu import SwiGLU

Rounding = Callable[[Tensor], Tensor]


def exact(values: Tensor) -> Tensor:
    """Round nothing."""
    return values


def to_bf16(values: Tensor) -> Tensor:
    """Round to bfloat16 as the kernels do: from their float32 sums."""
    return values.float().bfloat16().double()


def to_mxfp8(values: Tensor) -> Tensor:
    """Round to mxfp8 along the last dimension, from float32."""
    return from_mxfp8(mxfp8(values.float())).double()


def to_nvfp4(values: Tensor) -> Tensor:
    """Round to nvfp4 along the last dimension, from float32: weights [E, N, C] with a maximum an expert, rows each with one."""
    values = values.float()
    amax = largest(values.flatten(1))[:, None] if values.ndim == 3 else None
    return from_nvfp4(nvfp4(values, amax)).double()


def reference(
    x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor, w13: Tensor, w2: Tensor, activation: SwiGLU | None = None,
    rounded: Rounding = to_bf16, operands: Rounding | None = None,
) -> Tensor:  # fmt: skip
    """Return the output [T, D] in float64, of which the caller rounds the last sum.

    w13: [E, 2F, D], gate first. w2: [E, D, F]. A route whose id is no expert adds nothing. With `exact` rounding it is
    differentiable by autograd. operands: rounding of x, of weights [1, N, C], and of activations to a block-scaled format;
    without it activations are `rounded`.
    """
    between, given = operands or rounded, operands or exact
    activation = activation or SwiGLU()
    x_TD, scores_TK = given(x_TD).double(), scores_TK.double()
    out_TD = torch.zeros_like(x_TD)
    for expert in range(len(w13)):
        tokens, k = torch.nonzero(ids_TK == expert, as_tuple=True)
        first, second = (given(weights[expert : expert + 1])[0].double() for weights in (w13, w2))  # float64 of one at a time
        gate, up = rounded(x_TD[tokens] @ first.T).chunk(2, dim=1)
        rows = rounded(between(activation(gate, up)) @ second.T)
        out_TD = out_TD.index_add(0, tokens, rows * scores_TK[tokens, k][:, None])
    return out_TD


def to_trained_mxfp8(values: Tensor) -> Tensor:
    """Round as `to_mxfp8`, weights [E, N, C] with one scale a tile of 32 x 32: forward and backward then share numbers."""
    return from_mxfp8(mxfp8(values.float(), (32, 32))).double() if values.ndim == 3 else to_mxfp8(values)


def reference_backward(
    grad_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor, w13: Tensor, w2: Tensor,
    activation: SwiGLU | None = None, rounded: Rounding = to_bf16, operands: Rounding | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients in float64 for the gradient of the output [T, D]; shapes as in `reference`.

    operands: rounding of every product's operands along its contraction, of weights [1, N, C]; for gradients of weights that
    is an expert's rows, from the first on. The gradient of the activation is then `rounded`, and both sides of the
    activation are taken in float64.
    """
    activation, given = activation or SwiGLU(), operands or exact
    grad_TD, x_TD, scores_TK = (t.double() for t in (grad_TD, x_TD, scores_TK))
    dx_TD, dscores_TK = torch.zeros_like(x_TD), torch.zeros_like(scores_TK)
    dw13, dw2 = (torch.zeros_like(weights, dtype=torch.float64) for weights in (w13, w2))
    for expert in range(len(w13)):
        tokens, k = torch.nonzero(ids_TK == expert, as_tuple=True)
        score, grads = scores_TK[tokens, k][:, None], grad_TD[tokens]
        first, second = (given(weights[expert : expert + 1])[0].double() for weights in (w13, w2))
        h1 = rounded(given(x_TD[tokens]) @ first.T).requires_grad_()
        with torch.enable_grad():
            h2 = activation(*h1.chunk(2, dim=1))
        dh2, h2_before = given(grads) @ second, h2.detach()
        dh2, act = (rounded(dh2), operands(h2_before)) if operands else (dh2, rounded(h2_before))
        dscores_TK[tokens, k] = (dh2 * act).sum(1)
        dh1 = torch.autograd.grad(h2, h1, dh2 * score)[0] if len(tokens) else torch.zeros_like(h1)
        dh1, scored = (dh1, h2_before * score) if operands else (rounded(dh1), rounded(act * score))
        dw2[expert] = _columns(grads, operands).T @ _columns(scored, operands)
        dw13[expert] = _columns(dh1, operands).T @ _columns(x_TD[tokens], operands)
        dx_TD.index_add_(0, tokens, rounded(given(dh1) @ first))
    return Gradients(dx_TD, dscores_TK, dw13, dw2)


def _columns(rows: Tensor, operands: Rounding | None) -> Tensor:
    """Return an expert's rows rounded along rows, in blocks from the first on; a last block is filled up with zeros."""
    if operands is None or not len(rows):
        return rows
    return operands(torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 32)).T.contiguous()).T[: len(rows)]
