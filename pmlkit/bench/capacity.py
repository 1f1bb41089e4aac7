"""How large a batch may be: one pair at a time, twice as many rows until one fails, then halfway between."""

import time
from collections.abc import Callable

import msgspec
import torch

from pmlkit.bench.check import check_answer
from pmlkit.bench.memory import cuda_memory
from pmlkit.bench.outcome import Outcome, failure, judge
from pmlkit.campaign import Job
from pmlkit.case import Case
from pmlkit.losses.bind import Bound, LossInputs, make_inputs
from pmlkit.record import Capacity, Memory, Timer

_FIRST = 512  # rows of the batch whose answer is proved, and of the first attempt
_CLOSE = 1.02  # the search ends when the batch that failed is at most this much larger than the one that ran


def find_capacity(job: Job, bind: Callable[[Case, LossInputs], Bound], forget: Callable[[], object]) -> Outcome:
    """Return the largest batch of which a pair runs, up to the case's N, with its time and memory; one sample.

    A pair that runs but leaves a gradient that is not finite counts as one that failed. forget: gives memory back.
    """
    outcome = Outcome(status="ok")
    most, step = job.case.shape["N"], job.case.shape.get("per_class", 1)
    first = _with_rows(job.case, min(_FIRST, most))
    inputs = make_inputs(first, job.protocol.device)
    outcome.check = check_answer(first, inputs, bind(first, inputs))
    if not judge(outcome, outcome.check, "before the search"):
        return outcome
    del inputs
    rows, found = first.shape["N"], Capacity(largest=0)
    while rows > found.largest:
        forget()
        ended = _attempt(_with_rows(job.case, rows), job.protocol.device, bind)
        if isinstance(ended, Outcome):
            found.refused, found.reason = rows, ended.reason
            outcome.status, outcome.reason = (ended.status, ended.reason) if found.largest == 0 else ("ok", None)
        else:
            found.largest = rows
            nanoseconds, memory = ended
            outcome.samples_ns, outcome.memory = {"pair": [[nanoseconds]]}, memory and [memory]
        rows = _next(found, most, step)
    outcome.capacity = found
    if found.largest:
        cache, resolution = job.protocol.cache, time.get_clock_info("perf_counter").resolution * 1e9
        outcome.timer = Timer(method="wall", cache=cache, warmup=1, warmup_s=0.0, inner=1, resolution_ns=resolution)
    return outcome


def _next(found: Capacity, most: int, step: int) -> int:
    """Return how many rows to try next; no more than already ran ends the search."""
    if found.refused is None:
        return min(2 * found.largest, most)
    if found.refused <= max(_CLOSE * found.largest, found.largest + step):
        return found.largest
    return (found.largest + found.refused) // 2 // step * step


def _attempt(case: Case, device: str, bind: Callable[[Case, LossInputs], Bound]) -> tuple[int, Memory | None] | Outcome:
    """Return nanoseconds and memory of a pair of the case, or the outcome that its failure is."""
    try:
        bound = bind(case, make_inputs(case, device))
        memory = cuda_memory(bound) if device == "cuda" else None
        begin = time.perf_counter_ns()
        bound.pair()
        if device == "cuda":
            torch.cuda.synchronize()
        nanoseconds = time.perf_counter_ns() - begin
        finite = all(leaf.grad is not None and bool(torch.isfinite(leaf.grad).all()) for leaf in bound.leaves)
        return (nanoseconds, memory) if finite else Outcome(status="wrong_result", reason="a gradient is not finite")
    except Exception as error:
        return failure(error)


def _with_rows(case: Case, rows: int) -> Case:
    return msgspec.structs.replace(case, shape=case.shape | {"N": rows})
