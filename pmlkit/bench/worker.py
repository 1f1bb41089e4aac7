"""One process, one case: bind the subject, prove its answer, time it, report one line.

Protocol with the runner: it sends the job as one JSON line, the worker imports what it needs and answers `ready`, the
runner says `go`, the worker answers its outcome as one JSON line and exits. Everything that anybody prints goes to
standard error, so that it cannot mix with the answer.
"""

import os
import sys
from importlib import import_module
from typing import Any

import msgspec

from pmlkit.campaign import Job
from pmlkit.environment import installed
from pmlkit.record import Check, Conditions, Flag, Memory, Status, Timer
from pmlkit.registry import resolve


class Outcome(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a worker saw. The runner adds identity and makes it a record."""

    status: Status
    reason: str | None = None
    flags: list[Flag] = []
    check: Check | None = None
    timer: Timer | None = None
    samples_ns: dict[str, list[list[int]]] | None = None
    memory: list[Memory] | None = None
    conditions: list[Conditions] | None = None


class Unsupported(Exception):
    """The subject cannot run this case; the message says why."""


def main() -> None:
    """Serve one job on standard input and output."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    if job.subject.path:
        sys.path.insert(0, job.subject.path)
    prepared, problem = None, None
    try:
        prepared = prepare(job)
    except Exception as error:
        problem = failure(error)
    print('"ready"', file=answer, flush=True)
    if sys.stdin.readline().strip() != "go":
        return
    outcome = problem or run(job, prepared)
    print(msgspec.json.encode(outcome).decode(), file=answer, flush=True)
    sys.stderr.flush()
    os._exit(0)  # all is said; tearing torch down would take longer than most measurements


def prepare(job: Job) -> Any:
    """Import torch and the subject (the slow part of a start), so that `go` starts at work. Returns the binder."""
    subject = job.subject
    version = installed(subject.package) if subject.package else subject.version
    if version != subject.version:
        raise Unsupported(f"{subject.package} {subject.version} is not installed (found {version}): pip install it")
    if job.case.precision not in subject.precisions:
        raise Unsupported(f"{subject.name} has no {job.case.precision} path")
    import torch

    torch.set_num_threads(job.protocol.threads)
    if job.protocol.device == "cuda":
        torch.zeros(1, device="cuda")  # the context, 0.1 to 0.4 s on one H200
    for module in subject.imports:
        import_module(module)
    return resolve(subject.bind)


def run(job: Job, bind: Any) -> Outcome:
    """Check, then time, then profile. Every failure becomes an outcome with a typed status."""
    from pmlkit.bench.check import check_answer
    from pmlkit.bench.clocks import clock_for
    from pmlkit.bench.device import Monitor
    from pmlkit.bench.memory import peak_memory
    from pmlkit.bench.timing import time_phases, warm_up
    from pmlkit.losses.bind import make_inputs

    outcome = Outcome(status="ok")
    device = job.protocol.device
    try:
        clock, monitor = clock_for(device), Monitor(device)
        inputs = make_inputs(job.case, device)
        bound = bind(job.case, inputs)
        outcome.check = check_answer(job.case, inputs, bound)
        if not outcome.check.passed:
            error, limit = outcome.check.rms_rel, outcome.check.limit
            size = "is not finite" if error is None else f"differs by {error:.2e}, limit {limit:.0e}"
            outcome.status, outcome.reason = "wrong_result", f"the answer {size} ({outcome.check.reference})"
            return outcome
        outcome.timer = warm_up(bound, job.protocol, clock)
        monitor.read()
        outcome.samples_ns = time_phases(bound, outcome.timer.inner, job.protocol.blocks, clock)
        monitor.read()
        outcome.conditions = [monitor.conditions]
        outcome.flags = monitor.flags()
        outcome.memory = [peak_memory(bound, device)]
        judge_timer(outcome)
        return outcome
    except Exception as error:
        failed = failure(error)
        failed.check = outcome.check
        return failed


def judge_timer(outcome: Outcome) -> None:
    """Set status and flags that follow from the samples: not positive = timer_error, under 1,000 ticks = a flag."""
    assert outcome.timer and outcome.samples_ns
    least = min(value for samples in outcome.samples_ns.values() for ranks in samples for value in ranks)
    if least <= 0:
        outcome.status, outcome.reason = "timer_error", f"a block of {outcome.timer.inner} iterations took {least} ns"
    elif least < 1000 * outcome.timer.resolution_ns:
        outcome.flags.append("below_resolution")


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
    return Outcome(status="error", reason=text)


if __name__ == "__main__":
    main()
