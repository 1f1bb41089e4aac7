"""Which processor cores a worker imports on, which it measures on, and how busy others keep the latter."""

import os
import time
from pathlib import Path

_APART_FROM = 8  # with fewer cores, keeping some free would leave too few to import on
_QUIET = 4  # the main thread, autograd's, and the driver's


def quiet_cores() -> list[int]:
    """Return the cores kept for the process that measures; [] = too few cores to keep any apart."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return allowed[:_QUIET] if len(allowed) >= _APART_FROM else []


def keep_to(cores: list[int]) -> None:
    """Keep this process to the cores; threads that exist already stay where they are."""
    if cores:
        os.sched_setaffinity(0, cores)


class Foreign:
    """Watches what others do on the cores that this process may use."""

    def __init__(self) -> None:
        self.cores = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
        self.begin = self._reading()

    def busy_cores(self) -> float | None:
        """Return how many of the cores others kept busy since the start, on average; None where nobody counts that."""
        (begin, own_begin, busy_begin), (now, own, busy) = self.begin, self._reading()
        if busy is None or busy_begin is None or now <= begin:
            return None
        return max(0.0, (busy - busy_begin) - (own - own_begin)) / (now - begin)

    def _reading(self) -> tuple[float, float, float | None]:
        """Return the time, this process's processor seconds, and everybody's on these cores."""
        times = os.times()
        return time.monotonic(), times.user + times.system, self._busy()

    def _busy(self) -> float | None:
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return None
        ticks = 0
        for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
            if name.removeprefix("cpu").isdecimal() and int(name.removeprefix("cpu")) in self.cores:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
                ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK")
