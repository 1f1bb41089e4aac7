"""Timing: warm-up, inner iterations, interleaved blocks of each phase, raw nanoseconds."""

import time

from torch import Tensor

from pmlkit.bench.clocks import Clock
from pmlkit.campaign import Protocol
from pmlkit.losses.bind import Bound
from pmlkit.record import Timer

_LADDER = [step * 10**power for power in range(6) for step in (1, 2, 5)]

Samples = dict[str, list[list[int]]]


def warm_up(bound: Bound, protocol: Protocol, clock: Clock) -> Timer:
    """Run pairs until both the count and the seconds of the protocol are reached; settle the inner iterations.

    `inner` is the protocol's, or the smallest of 1, 2, 5, 10, ... that makes a block of pairs last `block_s` at the
    fastest pace seen.
    """
    started = time.perf_counter_ns()
    fastest, count, elapsed = float("inf"), 0, 0
    while count < protocol.warmup or 0 <= elapsed < protocol.warmup_s * 1e9:  # a clock may go backwards
        fastest = min(fastest, clock.total(bound.pair, 1)[""])
        elapsed = time.perf_counter_ns() - started
        count += 1
    inner = next((n for n in _LADDER if n * fastest >= protocol.block_s * 1e9), _LADDER[-1]) if fastest > 0 else 1
    return Timer(
        method="graph_replay" if bound.replay is not None else clock.method,
        cache="as-in-loop",  # nothing is flushed between iterations
        warmup=count,
        warmup_s=elapsed / 1e9,
        inner=protocol.inner or inner,
        resolution_ns=clock.resolution_ns(),
    )


def time_phases(bound: Bound, inner: int, blocks: int, clock: Clock) -> Samples:
    """Return samples of pair, forward and backward, each timed on its own; one sample = `inner` iterations of one phase.

    The phases take turns, so that a slow moment falls on all alike. Nothing is derived by subtraction. A captured pair
    has no phases. What else the clock saw of the pair comes under `pair_wall` and `pair_enqueue`.
    """
    samples: Samples = {}
    loss: list[Tensor] = []

    def prepare() -> None:
        bound.clear()
        loss[:] = [bound.forward()]

    for _ in range(blocks):
        for suffix, nanoseconds in clock.total(bound.pair, inner).items():
            samples.setdefault(f"pair{suffix}", []).append([nanoseconds])
        if bound.replay is None:
            samples.setdefault("forward", []).append([clock.total(bound.forward, inner)[""]])
            samples.setdefault("backward", []).append([clock.apart(prepare, lambda: loss[0].backward(), inner)])
    return samples
