"""One process: for each job bind the subject, prove its answer, time it, report one line.

Protocol with the runner: it sends a job as one JSON line, the worker imports what it needs and answers `ready`, the
runner says `go`, the worker answers its outcome as one JSON line; then another job, or the end. Everything that anybody
prints goes to standard error, so that it cannot mix with the answer.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module

import msgspec

from pmlkit.bench.cores import keep_to, quiet_cores
from pmlkit.bench.outcome import Outcome, Unsupported, failure
from pmlkit.campaign import Job
from pmlkit.environment import installed
from pmlkit.registry import resolve


def main() -> None:
    """Serve jobs on standard input and output until there are no more."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    quiet = quiet_cores()
    keep_to([core for core in os.sched_getaffinity(0) if core not in quiet] if quiet else [])
    while line := sys.stdin.readline():
        job = msgspec.json.decode(line, type=Job)
        prepared: Callable[[], Outcome]
        try:
            prepared = prepare(job)
        except Exception as error:
            prepared = partial(failure, error)
        print('"ready"', file=answer, flush=True)
        if sys.stdin.readline().strip() != "go":
            break
        keep_to(quiet)
        print(msgspec.json.encode(prepared()).decode(), file=answer, flush=True)
    sys.stderr.flush()
    os._exit(0)  # all is said; tearing torch down would take longer than most measurements


def prepare(job: Job) -> Callable[[], Outcome]:
    """Import torch, the engine and the subject (the slow part of a start), so that `go` starts at work.

    Nothing here may touch the device: other workers wait in the same state while one measures. Returns the measurement.
    """
    subject = job.subject
    if subject.path and subject.path not in sys.path:
        sys.path.insert(0, subject.path)
    version = installed(subject.package) if subject.package else subject.version
    if version != subject.version:
        raise Unsupported(f"{subject.package} {subject.version} is not installed (found {version}): pip install it")
    if job.case.precision not in subject.precisions:
        raise Unsupported(f"{subject.name} has no {job.case.precision} path")
    import torch

    from pmlkit.bench.measure import forget, measure, refuse

    refuse(job)
    forget()
    torch.set_num_threads(job.protocol.threads)
    measuring = ("pmlkit.stats", "pynvml") if job.protocol.device == "cuda" else ()
    for module in (*measuring, *subject.imports):
        import_module(module)
    measured = partial(measure, job, resolve(subject.bind))

    def and_forget() -> Outcome:
        outcome = measured()
        forget()  # before the answer: then another process measures, and needs the memory
        return outcome

    return and_forget if job.protocol.lasting else measured


if __name__ == "__main__":
    main()
