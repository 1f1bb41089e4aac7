"""The mxfp8 layer with gradients, for autograd and as registered operators; `experts.routed_experts` checks what comes in."""

from typing import Any

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.moe import trained
from pmlkit.moe.both_ways import BothWays, both_ways
from pmlkit.moe.config import ExpertsConfig
from pmlkit.moe.formats import Folded
from pmlkit.moe.operators import TABLES, empty_tables, routing_of, rows_of_block, tables_of
from pmlkit.moe.routing import STATUS_WORDS, route
from pmlkit.moe.swiglu import SwiGLU

_LIBRARY = torch.library.Library("pmlkit", "FRAGMENT")
_LIBRARY.define("both_ways(Tensor weights) -> Tensor[]")
_LIBRARY.define(
    "mxfp8_experts(Tensor x, Tensor ids, Tensor scores, Tensor[] w13, Tensor[] w2, float limit, float alpha, int capacity,"
    " bool promote, bool keep) -> (Tensor, Tensor, Tensor[])"
)
_LIBRARY.define(
    "mxfp8_experts_backward(Tensor grad, Tensor x, Tensor scores, Tensor[] w13, Tensor[] w2, Tensor[] saved, float limit,"
    " float alpha, bool promote, bool rows, bool weights, ScalarType dtype, Tensor(a!)? into13, Tensor(b!)? into2)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


Into = tuple[Tensor | None, Tensor | None]


def trained_experts(
    config: ExpertsConfig, into: Into, quantised: tuple[BothWays, BothWays] | None, *given: Tensor
) -> tuple[Tensor, Tensor]:
    """Return output and status word for x, ids, scores, w13 and w2, contiguous; quantised: what `both_ways` made of weights."""
    made = [both.storage for both in quantised] if quantised else [_quantise(weights.detach()) for weights in given[3:]]
    return _Experts.apply(config, into, *made[0], *made[1], *given)  # pyright: ignore[reportReturnType]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, config: ExpertsConfig, into: Into, *given: Tensor):
        w13, w2, (x, ids, scores, _, _) = list(given[:6]), list(given[6:12]), given[12:]
        keep = any(ctx.needs_input_grad)
        out, status, saved = _experts(x, ids, scores, w13, w2, *config.numbers, config.promote, keep)
        ctx.mark_non_differentiable(status)
        ctx.save_for_backward(x, scores, *w13, *w2, *saved)
        ctx.config, ctx.into = config, into
        return out, status

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        if torch.is_grad_enabled():
            raise PmlkitError("routed_experts is differentiable once: drop create_graph=True, or use pmlkit.moe.reference")
        x, scores, *rest = ctx.saved_tensors
        rows, _, _, *of_weights = ctx.needs_input_grad[14:]
        weights, inside = any(of_weights), ctx.into[0] is not None
        dx, dscores, dw13, dw2 = _experts_backward(
            grads[0].contiguous(), x, scores, rest[:6], rest[6:12], rest[12:], *ctx.config.numbers[:2],
            ctx.config.promote, rows, weights, ctx.config.grad_dtype, *ctx.into,
        )  # fmt: skip
        found = weights and not inside
        return *[None] * 14, dx if rows else None, None, dscores, dw13 if found else None, dw2 if found else None


def _both(storage: list[Tensor]) -> BothWays:
    return BothWays(Folded(*storage[:3]), Folded(*storage[3:]))


def _quantise_fake(weights):
    experts, N, C = weights.shape
    sizes = ((experts, N, C), (experts, N), (1,), (experts, C, N), (experts, C), (1,))
    types = (torch.float8_e4m3fn, torch.float32, torch.int32)
    return [weights.new_empty(size, dtype=types[place % 3]) for place, size in enumerate(sizes)]


def _forward(x, ids, scores, w13, w2, limit, alpha, capacity, promote, keep):
    tile = rows_of_block(ids.numel(), len(w13[0]))
    routing = route(ids, len(w13[0]), tile=tile, capacity=None if capacity < 0 else capacity)
    if not ids.numel():
        return torch.zeros_like(x), routing.status, []
    activation = SwiGLU(limit or None, alpha)
    out, h1 = trained.forward(x, scores, _both(w13), _both(w2), routing, activation, promote, keep)
    return out, routing.status, [] if h1 is None else [*tables_of(routing), h1]


def _forward_fake(x, ids, scores, w13, w2, limit, alpha, capacity, promote, keep):
    experts, inner, _ = w13[0].shape
    saved = [*empty_tables(ids, experts), x.new_empty(ids.numel(), inner)] if keep else []
    return torch.empty_like(x), ids.new_empty(STATUS_WORDS, dtype=torch.int32), saved


def _backward(grad, x, scores, w13, w2, saved, limit, alpha, promote, rows, weights, dtype, into13, into2):
    empty = _backward_fake(grad, x, scores, w13, w2, saved, limit, alpha, promote, rows, weights, dtype, into13, into2)
    if not scores.numel():
        return tuple(tensor.zero_() for tensor in empty)
    routing = routing_of(saved, len(w13[0]))
    found = trained.backward(
        grad, x, scores, _both(w13), _both(w2), saved[TABLES], routing, SwiGLU(limit or None, alpha), promote,
        weights=weights, rows=rows, dtype=dtype, into=(into13, into2),
    )  # fmt: skip
    fresh = (found.x_TD, found.scores_TK, None if into13 is not None else found.w13, None if into2 is not None else found.w2)
    return tuple(none if made is None else made for none, made in zip(empty, fresh, strict=True))


def _backward_fake(grad, x, scores, w13, w2, saved, limit, alpha, promote, rows, weights, dtype, into13, into2):
    def like(values: Tensor, into: Tensor | None) -> Tensor:
        return values.new_empty(values.shape if weights and into is None else 0, dtype=dtype)

    dx = torch.empty_like(grad) if rows else grad.new_empty(0)
    return dx, torch.empty_like(scores), like(w13[0], into13), like(w2[0], into2)


for _name, _run, _fake in (
    ("both_ways", lambda weights: both_ways(weights).storage, _quantise_fake),
    ("mxfp8_experts", _forward, _forward_fake),
    ("mxfp8_experts_backward", _backward, _backward_fake),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pmlkit::{_name}", _fake, lib=_LIBRARY)

_quantise, _experts = torch.ops.pmlkit.both_ways.default, torch.ops.pmlkit.mxfp8_experts.default
_experts_backward = torch.ops.pmlkit.mxfp8_experts_backward.default
