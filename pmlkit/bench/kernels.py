"""What the device does for a pair: launches, busy time, and the time of work that was queued beforehand."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

# Not torch.profiler.profile: its start imports 900 modules (1.5 s, measured with torch 2.13) for the same events.
from torch.autograd.profiler import profile

from pmlkit.losses.bind import Bound
from pmlkit.record import Kernels

_PAIRS = 5
_SLEEP_CYCLES_PER_S = 2e9  # a little over the highest clock of any board, so that no sleep is too short
_LONGEST_SLEEP_S = 0.1


def see_kernels(bound: Bound) -> Kernels:
    """Return launches and busy time of five pairs under the profiler, and their time when queued beforehand."""
    profiler: Any = profile(use_device="cuda", use_cpu=False, use_kineto=True)  # its raw events are outside torch's type hints
    torch.cuda.synchronize()
    with profiler:
        for _ in range(_PAIRS):
            bound.pair()
        torch.cuda.synchronize()
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]
    return Kernels(pairs=_PAIRS, launches=len(spans), busy_ns=covered(spans), queued_ns=queued_ns(bound))


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return how much time at least one span covers; spans may overlap."""
    total = 0
    end = -(2**63)
    for begin, stop in sorted(spans):
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total


def queued_ns(bound: Bound) -> int | None:
    """Return the device time of five pairs that were all submitted while the device still slept, or None.

    The device sleeps three times as long as submitting took the first time. If it woke before everything was submitted
    (the subject waits for the device, or fills the queue), host gaps are inside and the time is worthless.
    """
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_PAIRS):
        bound.pair()
    seconds = min(3 * (time.perf_counter() - begin), _LONGEST_SLEEP_S)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(seconds * _SLEEP_CYCLES_PER_S))
    start.record()
    for _ in range(_PAIRS):
        bound.pair()
    end.record()
    asleep = not start.query()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) * 1e6) if asleep else None
