"""Other ways that were tried where a target was missed, kept as subjects so that records show what they reach.

Of the eager pair: the registered operator, and `torch.compile`. Of small graphs: taller tiles, fewer or more programs a row
block, more warps.
"""

from collections.abc import Callable
from dataclasses import replace
from sys import modules
from typing import Any

import torch
from torch import Tensor

from pmlkit.case import Case
from pmlkit.losses.bind import Bound, LossInputs
from pmlkit.losses.bind_fused import bind_fused, bind_fused_graph
from pmlkit.losses.tiling import Tiles
from pmlkit.losses.tiling import tiles as chosen


def bind_operator(case: Case, inputs: LossInputs) -> Bound:
    """Return the fused loss through its registered operator, which `torch.compile` sees, called eagerly.

    Raises NotImplementedError as `bind_fused` does.
    """
    bound = bind_fused(case, inputs)
    loss: Any = bound.forward.func  # pyright: ignore[reportFunctionMemberAccess]
    settings, proxies = list(loss.settings.values()), bound.leaves[1] if len(bound.leaves) > 1 else None

    def forward() -> Tensor:
        return torch.ops.pmlkit.fused_loss(case.op, settings, loss.tf32, inputs.emb_ND, inputs.labels_N, proxies, None)[0]

    return replace(bound, forward=forward)


def bind_compiled(case: Case, inputs: LossInputs) -> Bound:
    """Return the fused loss under `torch.compile`, whole and for static shapes."""
    bound = bind_fused(case, inputs)
    return replace(bound, forward=torch.compile(bound.forward, fullgraph=True, dynamic=False))


def change_tiles(change: Callable[[Tiles], Tiles]) -> None:
    """Change every tile choice of this process that is made from here on."""

    def changed(*arguments: Any) -> Tiles:
        return change(chosen(*arguments))

    for name, module in list(modules.items()):
        if name.startswith("pmlkit.losses.") and name != __name__ and hasattr(module, "tiles"):
            vars(module)["tiles"] = changed


def bind_taller(case: Case, inputs: LossInputs) -> Bound:
    """Return the captured pair with row blocks twice as high."""
    change_tiles(lambda tiles: replace(tiles, BM=2 * tiles.BM))
    return bind_fused_graph(case, inputs)


def bind_fewer_programs(case: Case, inputs: LossInputs) -> Bound:
    """Return the captured pair with half as many programs a row block, which then exchange half as many sums."""
    change_tiles(lambda tiles: replace(tiles, splits=max(1, tiles.splits // 2)))
    return bind_fused_graph(case, inputs)


def bind_more_warps(case: Case, inputs: LossInputs) -> Bound:
    """Return the captured pair with twice as many warps a program."""
    change_tiles(lambda tiles: replace(tiles, warps=2 * tiles.warps))
    return bind_fused_graph(case, inputs)
