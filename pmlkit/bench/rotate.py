"""Cache states other than as-in-loop: inputs that take turns, and a cache overwritten between iterations."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pmlkit.losses.bind import Bound


class Rotating(Bound):
    """Several bounds of one case that take turns: with enough of them no input is in the cache when its turn comes."""

    def __init__(self, bounds: Sequence[Bound]) -> None:
        leaves = tuple(leaf for bound in bounds for leaf in bound.leaves)
        super().__init__(lambda: self.turn().forward(), leaves, scale=bounds[0].scale)
        object.__setattr__(self, "replay", bounds[0].replay)  # says that there are no phases; `pair` does not call it
        object.__setattr__(self, "bounds", tuple(bounds))
        object.__setattr__(self, "place", 0)

    bounds: tuple[Bound, ...]
    place: int

    def turn(self) -> Bound:
        """Return the bound whose turn it is."""
        bound = self.bounds[self.place]
        object.__setattr__(self, "place", (self.place + 1) % len(self.bounds))
        return bound

    def clear(self) -> None:
        """Drop the gradients of the next in turn only."""
        self.bounds[self.place].clear()

    def pair(self) -> Tensor:
        """Run one pair of the next in turn."""
        return self.turn().pair()

    def pair_of_each(self) -> None:
        """Run one pair of every set: timing alone may end before all have had a turn."""
        for _ in self.bounds:
            self.pair()


def sets_beyond_cache(bytes_each: int) -> int:
    """Return how many sets of this size hold five times the second-level cache, and one more."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return math.ceil(5 * cache / bytes_each) + 1


def flusher() -> Callable[[], object]:
    """Return a call that overwrites twice the second-level cache."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return torch.empty(2 * cache, dtype=torch.int8, device="cuda").zero_
