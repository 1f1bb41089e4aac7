"""What a worker saw, before the runner adds identity; and which status an exception is."""

import msgspec

from pmlkit.record import Capacity, Check, Conditions, Flag, Kernels, Memory, Status, Timer


class Outcome(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a worker saw. The runner adds identity and makes it a record."""

    status: Status
    reason: str | None = None
    flags: list[Flag] = []
    check: Check | None = None
    timer: Timer | None = None
    samples_ns: dict[str, list[list[int]]] | None = None
    memory: list[Memory] | None = None
    kernels: list[Kernels] | None = None
    conditions: list[Conditions] | None = None
    capacity: Capacity | None = None


class Unsupported(Exception):
    """The subject cannot run this case; the message says why."""


def failure(error: Exception) -> Outcome:
    """Map an exception to its status; the reason is the first line of its message."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, Unsupported):
        return Outcome(status="unsupported", reason=str(error))
    if isinstance(error, NotImplementedError):
        return Outcome(status="unsupported", reason=text)
    if type(error).__name__ == "OutOfMemoryError":
        return Outcome(status="oom", reason=text)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return Outcome(status="host_oom", reason=text)
    if "captur" in text and isinstance(error, RuntimeError):
        return Outcome(status="graph_capture_failed", reason=text)
    return Outcome(status="error", reason=text)


def judge(outcome: Outcome, check: Check, when: str) -> bool:
    """Return whether the answer is right; if not, make the outcome say so."""
    if not check.passed:
        outcome.check = check
        size = "is not finite" if check.rms_rel is None else f"differs by {check.rms_rel:.2e}, limit {check.limit:.0e}"
        if check.graph_accepted is False:
            size = "of a replayed graph is not that of the same calls"
        outcome.status, outcome.reason = "wrong_result", f"the answer {size} {when} ({check.reference})"
    return check.passed
