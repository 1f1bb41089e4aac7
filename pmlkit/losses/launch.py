"""What a call of a fused loss does, decided once for its sizes: kernels with their numbers, and one buffer for all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pmlkit.losses.tiling import Tiles, tiles


@dataclass(frozen=True)
class Shape:
    """What a plan depends on. others: number of reference rows or proxies, or of the rows themselves without them.

    settings: numbers of the loss, in the order of its constructor. tf32: whether float32 may be multiplied in TF32.
    """

    rows: int
    others: int
    width: int
    dtype: torch.dtype
    others_dtype: torch.dtype
    reference_set: bool
    settings: tuple[float, ...]
    tf32: bool = False

    @property
    def wide(self) -> torch.dtype:
        """The type that tiles are chosen for: float32 where one side is."""
        return torch.promote_types(self.dtype, self.others_dtype)


class Room:
    """Places in one buffer of float64 words: what the kernels of a call keep, and what they hand each other."""

    def __init__(self) -> None:
        self.words = 0

    def floats(self, count: int) -> int:
        """Return the place of float32 numbers, in words. Places are multiples of 16 words, so that Triton sees alignment."""
        return self.doubles(-(-count // 2))

    integers = floats

    def doubles(self, count: int) -> int:
        """Return the place of float64 numbers, in words."""
        place = self.words
        self.words += -(-count // 16) * 16
        return place


@dataclass(eq=False)
class Launch:
    """A kernel of which everything is decided but its tensors. Its parameters are tensors, then numbers, then constants.

    Triton inspects every argument of every launch: 10 to 14 microseconds on the host of an H200. Here nothing can differ
    from one call to the next but pointers that are aligned to 16 bytes, so that only the first goes that way.
    """

    kernel: Any
    programs: int
    tiles: Tiles
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    direct: bool = True
    _start: Callable[..., None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        known = {"SPLITS": self.tiles.splits, **vars(self.tiles), **self.constants}
        self.rest = (*self.numbers, *(known[name] for name in self.kernel.arg_names if name in known))

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside the arguments."""
        # Without a limit of its own ptxas 12.8 gives some float32 kernels 32 registers and spills kilobytes.
        return {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages, "maxnreg": 255}

    def __call__(self, *tensors: Tensor) -> None:
        """Start the kernel on the current stream of the current device."""
        if self._start is not None:
            self._start(*tensors, *self.rest)
            return
        compiled = self.kernel[(self.programs,)](*tensors, *self.rest, **self.options)
        if self.direct and compiled is not None:  # the interpreter compiles nothing
            self._start = compiled[(self.programs, 1, 1)]


@dataclass(frozen=True)
class Plan:
    """All launches of a loss. room: words of its buffer.

    forward: each takes emb, labels, others, their labels, room and loss. backward: the gradient of the rows, and that of the
    others if there are any; each takes the gradient of the loss, its rows, their labels, the other rows, theirs, room and out.
    """

    room: int
    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]


class Backward:
    """The gradient launches of a loss of pairs, one for each side that has a gradient: their tiles, counters and hand-overs.

    counters: how many the passes need, at_counters: where they are.
    """

    def __init__(
        self, shape: Shape, room: Room, at_x: int, at_z: int, least: int = 1, tiles: Callable[..., Tiles] = tiles
    ) -> None:
        sides = [(shape.rows, shape.others, at_x, at_z), (shape.others, shape.rows, at_z, at_x)]
        self.width = shape.width
        self.sides = [
            (n, m, at_n, at_m, tiles(n, m, shape.width, shape.wide, shape.tf32))
            for n, m, at_n, at_m in sides[: 1 + shape.reference_set]
        ]
        self.counters = max(least, *(t.blocks(n, shape.width) for n, *_, t in self.sides))
        self.at_counters = room.integers(self.counters)
        self.at_partial = room.floats(max(t.partial(n, shape.width) for n, *_, t in self.sides))

    def launches(
        self, kernel: Any, places: tuple[int, ...], numbers: tuple[float, ...], *constants: dict[str, Any]
    ) -> tuple[Launch, ...]:
        """Return a launch for each side. constants: those of each side, or one for all."""
        made = []
        for (n, m, at_n, at_m, t), own in zip(self.sides, constants * len(self.sides), strict=False):
            given = (n, m, self.width, at_n, at_m, *places, self.at_counters, self.at_partial, *numbers)
            programs = t.blocks(n, self.width) * t.splits
            made.append(Launch(kernel, programs, t, given, {"CHUNKS": t.chunks(self.width), **own}))
        return tuple(made)
