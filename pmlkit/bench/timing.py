"""Timing: warm-up, inner iterations, interleaved blocks of each phase, raw nanoseconds."""

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pmlkit.bench.clocks import Clock
from pmlkit.losses.bind import Bound
from pmlkit.protocol import Protocol
from pmlkit.record import Timer

_LADDER = [step * 10**power for power in range(6) for step in (1, 2, 5)]

_QUIET_PAIRS = 10

Samples = dict[str, list[list[int]]]


def warm_up(bound: Bound, protocol: Protocol, clock: Clock) -> Timer:
    """Run pairs until the count and the seconds of the protocol are reached and nothing is being set up any more.

    On a GPU that is: the last ten pairs compiled nothing and took no memory from the driver (for at most ten times the
    protocol's seconds). `inner` is the protocol's, or the smallest of 1, 2, 5, 10, ... that makes a block of pairs last
    `block_s` at the fastest pace seen.
    """
    started = time.perf_counter_ns()
    fastest, count, elapsed, changed = float("inf"), 0, 0, -_QUIET_PAIRS
    state = _state(protocol)
    least_ns, most_ns = protocol.warmup_s * 1e9, 10e9 * protocol.warmup_s
    # A clock may go backwards: then the seconds cannot be waited for.
    while count < protocol.warmup or 0 <= elapsed < least_ns or (0 <= elapsed < most_ns and count < changed + _QUIET_PAIRS):
        fastest = min(fastest, clock.total(bound.pair, 1)[""])
        elapsed = time.perf_counter_ns() - started
        count += 1
        if (now := _state(protocol)) != state:
            state, changed = now, count
    inner = next((n for n in _LADDER if n * fastest >= protocol.block_s * 1e9), _LADDER[-1]) if fastest > 0 else 1
    return Timer(
        method="graph_replay" if bound.replay is not None else clock.method,
        cache=protocol.cache,
        warmup=count,
        warmup_s=elapsed / 1e9,
        inner=protocol.inner or inner,
        resolution_ns=clock.resolution_ns(),
    )


def time_phases(
    bound: Bound,
    inner: int,
    blocks: int,
    clock: Clock,
    reset: Callable[[], object] | None = None,
    glance: Callable[[], object] = int,
) -> Samples:
    """Return samples of pair, forward and backward, each timed on its own; one sample = `inner` iterations of one phase.

    The phases take turns, so that a slow moment falls on all alike. Nothing is derived by subtraction. A captured pair
    has no phases. What else the clock saw of the pair comes under `pair_wall` and `pair_enqueue`.
    reset: runs before every iteration and is not timed; None = iterations follow each other. glance: runs between blocks.
    """
    samples: Samples = {}
    loss: list[Tensor] = []

    def prepare() -> None:
        bound.clear()
        loss[:] = [bound.forward()]
        if reset is not None:
            reset()

    def total(work: Callable[[], object]) -> dict[str, int]:
        return clock.total(work, inner) if reset is None else {"": clock.apart(reset, work, inner)}

    for _ in range(blocks):
        for suffix, nanoseconds in total(bound.pair).items():
            samples.setdefault(f"pair{suffix}", []).append([nanoseconds])
        if bound.replay is None:
            samples.setdefault("forward", []).append([total(bound.forward)[""]])
            samples.setdefault("backward", []).append([clock.apart(prepare, lambda: bound.backward(loss[0]), inner)])
        glance()
    return samples


def _state(protocol: Protocol) -> tuple[int, int]:
    """Return how often anything was compiled and memory was taken from the driver so far; nothing counts that on a CPU."""
    if protocol.device == "cpu":
        return 0, 0
    dynamo = sys.modules.get("torch._dynamo.utils")
    compiled = dynamo.counters["frames"]["total"] if dynamo is not None else 0
    return compiled, torch.cuda.memory_stats().get("num_device_alloc", 0)
