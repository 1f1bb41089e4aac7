"""What a call of a fused loss does, decided once for its sizes: kernels with their numbers, and one buffer for all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pmlkit.losses.tiling import Shape, Tiles, tiles


def places_of(numbers: int) -> int:
    """Return how many words of 8 bytes float32 numbers take: a multiple of 16, so that Triton sees alignment."""
    return -(-numbers // 32) * 16


class Room:
    """Places in one buffer of float64 words: what the kernels of a call keep, and what they hand each other."""

    def __init__(self) -> None:
        self.words = 0

    def floats(self, count: int) -> int:
        """Return the place of float32 numbers, in words."""
        place = self.words
        self.words += places_of(count)
        return place

    integers = floats

    def doubles(self, count: int) -> int:
        """Return the place of float64 numbers, in words."""
        return self.floats(2 * count)


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
            # Addresses: given a tensor, Triton's launcher asks the driver whether its memory belongs to a GPU.
            self._start(*[tensor.data_ptr() for tensor in tensors], *self.rest)
            return
        compiled = self.kernel[(self.programs,)](*tensors, *self.rest, **self.options)
        if self.direct and compiled is not None:  # the interpreter compiles nothing
            self._start = compiled[(self.programs, 1, 1)]


@dataclass(frozen=True)
class Plan:
    """All launches of a loss. room: words of its buffer. sort: whether labels are sorted on the host first.

    forward: each takes emb, labels, others, their labels, room and loss. backward: for the gradient of the rows and, of
    two sets, of the others, and of both; each takes the gradient of the loss, emb, others, room and the two results.
    """

    room: int
    sort: bool
    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]


class Backward:
    """The gradient launches of a loss of pairs: their tiles, counters and hand-overs.

    counters: how many the passes need, at_counters: where they are. partial_bytes: what programs hand over.
    """

    def __init__(self, shape: Shape, room: Room, least: int = 1, tiles: Callable[..., Tiles] = tiles) -> None:
        self.rows = tiles(shape.rows, shape.others, shape)
        self.others = tiles(shape.others, shape.rows, shape)
        self.blocks = [self.rows.blocks(shape.rows), self.others.blocks(shape.others)]
        self.counters = max(least, sum(self.blocks[: 1 + shape.reference_set]))
        self.at_counters = room.integers(self.counters)
        partial = [self.rows.partial(shape.rows), self.others.partial(shape.others) if shape.reference_set else 0]
        self.at_partial, self.others_partial = (room.floats(count) for count in partial)
        self.partial_bytes = 4 * sum(partial)
        self.reference_set = shape.reference_set

    def launches(self, kernel: Any, numbers: tuple[float, ...], constants: dict[str, Any]) -> tuple[Launch, ...]:
        """Return a launch for the rows and, of two sets, one for the others and one for both sides at once."""
        programs = [blocks * t.splits for blocks, t in zip(self.blocks, (self.rows, self.others), strict=True)]
        given = (*numbers, self.at_counters, self.at_partial, self.others_partial)
        own = {"CHUNKS": self.rows.chunks, "BM_Z": self.others.BM, "SPLITS_Z": self.others.splits, **constants}
        kinds = {1: programs[0], 2: programs[1], 3: sum(programs)} if self.reference_set else {1: programs[0]}
        return tuple(Launch(kernel, count, self.rows, given, {"SIDES": kind, **own}) for kind, count in kinds.items())
