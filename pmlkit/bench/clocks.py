"""Clocks: the wall for the CPU, device events for a GPU. Both return whole nanoseconds."""

import itertools
import time
from collections.abc import Callable
from typing import Literal, Protocol

import torch


class Clock(Protocol):
    """Times work. method: its name in a record."""

    method: Literal["events", "wall"]

    def resolution_ns(self) -> float:
        """Return the smallest time that it can tell from zero."""
        ...

    def total(self, work: Callable[[], object], times: int) -> dict[str, int]:
        """Return the nanoseconds of `times` calls: "" for the clock's own, further suffixes for what else was seen."""
        ...

    def apart(self, prepare: Callable[[], object], work: Callable[[], object], times: int) -> int:
        """Return the summed nanoseconds of `times` calls of work alone, each after a call of prepare."""
        ...


class WallClock:
    """The processor's monotonic clock."""

    method: Literal["events", "wall"] = "wall"

    def resolution_ns(self) -> float:
        """Return the smallest non-zero difference between two successive readings."""
        times = [time.perf_counter_ns() for _ in range(2000)]
        return float(min(b - a for a, b in itertools.pairwise(times) if b > a))

    def total(self, work: Callable[[], object], times: int) -> dict[str, int]:
        """Return the time of the calls."""
        begin = time.perf_counter_ns()
        for _ in range(times):
            work()
        return {"": time.perf_counter_ns() - begin}

    def apart(self, prepare: Callable[[], object], work: Callable[[], object], times: int) -> int:
        """Return the time of work alone, by a reading before and after each call."""
        total = 0
        for _ in range(times):
            prepare()
            begin = time.perf_counter_ns()
            work()
            total += time.perf_counter_ns() - begin
        return total


class EventClock:
    """CUDA events on the current stream. They bracket launch gaps too: a host-bound loop is timed as the host's pace."""

    method: Literal["events", "wall"] = "events"

    def resolution_ns(self) -> float:
        """Return the smallest non-zero difference between intervals of back-to-back events."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(200)]
        for event in events:
            event.record()
        torch.cuda.synchronize()
        gaps = sorted({round(a.elapsed_time(b) * 1e6) for a, b in itertools.pairwise(events)})
        return float(min((b - a for a, b in itertools.pairwise(gaps) if b > a), default=gaps[0] or 1))

    def total(self, work: Callable[[], object], times: int) -> dict[str, int]:
        """Return device time, `_wall` (synchronised to synchronised) and `_enqueue` (until all is submitted)."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        start.record()
        for _ in range(times):
            work()
        end.record()
        enqueued = time.perf_counter_ns()
        torch.cuda.synchronize()
        finished = time.perf_counter_ns()
        return {"": round(start.elapsed_time(end) * 1e6), "_wall": finished - begin, "_enqueue": enqueued - begin}

    def apart(self, prepare: Callable[[], object], work: Callable[[], object], times: int) -> int:
        """Return the device time of work alone, by a pair of events around each call."""
        pairs = []
        for _ in range(times):
            prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return sum(round(start.elapsed_time(end) * 1e6) for start, end in pairs)


def clock_for(device: str) -> Clock:
    """Return the clock of a device."""
    return EventClock() if device == "cuda" else WallClock()
