"""The layer's forward and backward as registered operators: what `torch.compile` and CUDA graphs see of it.

A definition with separate implementations costs a few microseconds a call; `torch.library.custom_op` about 40.
"""

from typing import Any

import torch
from torch import Tensor

from pmlkit.moe import standard
from pmlkit.moe.routing import STATUS_WORDS, WORDS, Routing, most_blocks, route
from pmlkit.moe.swiglu import SwiGLU

TABLES = 6  # tensors of a `Routing` that backward needs

_LIBRARY = torch.library.Library("pmlkit", "FRAGMENT")
_LIBRARY.define(
    "experts(Tensor x, Tensor ids, Tensor scores, Tensor w13, Tensor w2, float limit, float alpha, int capacity, bool keep)"
    " -> (Tensor, Tensor, Tensor[])"
)
_LIBRARY.define(
    "experts_backward(Tensor grad, Tensor scores, Tensor w13, Tensor w2, Tensor[] saved, float limit, float alpha, bool rows,"
    " bool weights, ScalarType dtype, Tensor(a!)? into13, Tensor(b!)? into2) -> (Tensor, Tensor, Tensor, Tensor)"
)


def rows_of_block(routes: int, experts: int) -> int:
    """Return rows of a block: the fewest a tensor core takes at once where most experts have fewer rows than that."""
    return 128 if routes >= 64 * experts else 64


def tables_of(routing: Routing) -> list[Tensor]:
    """Return what a backward pass needs of a routing."""
    return [routing.source_R, routing.route_R, routing.row_TK, routing.offsets_E1, routing.blocks_B8, routing.count]


def empty_tables(ids: Tensor, experts: int) -> list[Tensor]:
    """Return tensors of their sizes, for ids [T, K]."""
    routes = ids.numel()
    blocks = most_blocks(routes, experts, rows_of_block(routes, experts))
    sizes = [(routes,), (routes,), tuple(ids.shape), (experts + 1,), (blocks, WORDS.value), (1,)]
    return [ids.new_empty(size, dtype=torch.int32) for size in sizes]


def routing_of(saved: list[Tensor], experts: int) -> Routing:
    """Return the routing whose tables come first in `saved`, with a status word of its own."""
    status = torch.zeros(STATUS_WORDS, dtype=torch.int32, device=saved[0].device)
    return Routing(*saved[:TABLES], status=status, tile=rows_of_block(saved[2].numel(), experts))


def _forward(x, ids, scores, w13, w2, limit, alpha, capacity, keep):
    tile = rows_of_block(ids.numel(), len(w13))
    routing = route(ids, len(w13), tile=tile, capacity=None if capacity < 0 else capacity)
    if not ids.numel():
        return torch.zeros_like(x), routing.status, []
    out, saved = standard.forward(x, scores, w13, w2, routing, SwiGLU(limit or None, alpha), keep)
    return out, routing.status, [*tables_of(routing), *saved] if keep else []


def _forward_fake(x, ids, scores, w13, w2, limit, alpha, capacity, keep):
    status, routes = ids.new_empty(STATUS_WORDS, dtype=torch.int32), ids.numel()
    if not keep:
        return torch.empty_like(x), status, []
    tables = empty_tables(ids, w13.shape[0])
    return torch.empty_like(x), status, [*tables, x.new_empty(routes, x.shape[1]), x.new_empty(routes, w13.shape[1])]


def _backward(grad, scores, w13, w2, saved, limit, alpha, rows, weights, dtype, into13, into2):
    dx, dscores, dw13, dw2 = _backward_fake(grad, scores, w13, w2, saved, limit, alpha, rows, weights, dtype, into13, into2)
    if not scores.numel():
        return dx.zero_(), dscores.zero_(), dw13.zero_(), dw2.zero_()
    routing = routing_of(saved, len(w13))
    found = standard.backward(
        grad, scores, w13, w2, saved[TABLES:], routing, SwiGLU(limit or None, alpha),
        weights=weights, rows=rows, dtype=dtype, into=(into13, into2),
    )  # fmt: skip
    return (
        dx if found.x_TD is None else found.x_TD,
        found.scores_TK,
        dw13 if found.w13 is None or into13 is not None else found.w13,
        dw2 if found.w2 is None or into2 is not None else found.w2,
    )


def _backward_fake(grad, scores, w13, w2, saved, limit, alpha, rows, weights, dtype, into13, into2):
    def like(weight: Tensor, into: Any) -> Tensor:
        return torch.empty_like(weight, dtype=dtype) if weights and into is None else weight.new_empty(0, dtype=dtype)

    return torch.empty_like(grad) if rows else grad.new_empty(0), torch.empty_like(scores), like(w13, into13), like(w2, into2)


for _name, _run, _fake in (("experts", _forward, _forward_fake), ("experts_backward", _backward, _backward_fake)):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pmlkit::{_name}", _fake, lib=_LIBRARY)

experts, experts_backward = torch.ops.pmlkit.experts.default, torch.ops.pmlkit.experts_backward.default
