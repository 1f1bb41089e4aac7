"""Timing on the wall clock, for the CPU lane: warm-up, inner iterations, interleaved blocks, raw nanoseconds."""

import itertools
import time
from collections.abc import Callable

from torch import Tensor

from pmlkit.campaign import Protocol
from pmlkit.losses.bind import Bound
from pmlkit.record import Timer

_LADDER = [step * 10**power for power in range(6) for step in (1, 2, 5)]


def resolution_ns(readings: int = 2000) -> float:
    """Return the smallest non-zero difference between two successive clock readings."""
    times = [time.perf_counter_ns() for _ in range(readings)]
    return float(min(b - a for a, b in itertools.pairwise(times) if b > a))


def clear_gradients(leaves: tuple[Tensor, ...]) -> None:
    """Drop gradients, as an optimizer's `zero_grad(set_to_none=True)` does."""
    for leaf in leaves:
        leaf.grad = None


def pair(bound: Bound) -> None:
    """Run one forward and backward pair from cleared gradients."""
    clear_gradients(bound.leaves)
    bound.forward().backward()


def warm_up(bound: Bound, protocol: Protocol) -> Timer:
    """Run pairs until both the count and the seconds of the protocol are reached; choose the inner iterations.

    `inner` is the smallest of 1, 2, 5, 10, ... that makes a block of pairs last `block_s` at the fastest pace seen.
    """
    started = time.perf_counter_ns()
    fastest, count, elapsed = float("inf"), 0, 0
    while count < protocol.warmup or 0 <= elapsed < protocol.warmup_s * 1e9:  # a clock may go backwards
        begin = time.perf_counter_ns()
        pair(bound)
        fastest = min(fastest, time.perf_counter_ns() - begin)
        elapsed = time.perf_counter_ns() - started
        count += 1
    inner = next((n for n in _LADDER if n * fastest >= protocol.block_s * 1e9), _LADDER[-1]) if fastest > 0 else 1
    return Timer(
        method="wall",
        cache="as-in-loop",
        warmup=count,
        warmup_s=elapsed / 1e9,
        inner=inner,
        resolution_ns=resolution_ns(),
    )


def time_phases(bound: Bound, inner: int, blocks: int) -> dict[str, list[list[int]]]:
    """Return samples of pair, forward and backward, each timed on its own; one sample = `inner` iterations of one phase.

    The phases take turns, so that a slow moment falls on all three alike. Nothing is derived by subtraction.
    """
    phases: dict[str, Callable[[Bound, int], int]] = {"pair": _pairs, "forward": _forwards, "backward": _backwards}
    samples: dict[str, list[list[int]]] = {name: [] for name in phases}
    for _ in range(blocks):
        for name, run in phases.items():
            samples[name].append([run(bound, inner)])
    return samples


def _pairs(bound: Bound, inner: int) -> int:
    begin = time.perf_counter_ns()
    for _ in range(inner):
        pair(bound)
    return time.perf_counter_ns() - begin


def _forwards(bound: Bound, inner: int) -> int:
    """Time forward passes that build their graph, as training does."""
    begin = time.perf_counter_ns()
    for _ in range(inner):
        bound.forward()
    return time.perf_counter_ns() - begin


def _backwards(bound: Bound, inner: int) -> int:
    """Time backward passes alone: each needs a fresh graph, which is built outside the timed part."""
    total = 0
    for _ in range(inner):
        clear_gradients(bound.leaves)
        loss = bound.forward()
        begin = time.perf_counter_ns()
        loss.backward()
        total += time.perf_counter_ns() - begin
    return total
