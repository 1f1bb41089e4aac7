"""What one worker does with one case: prove the answer, warm up, time, prove it again, then look at kernels and memory."""

import gc
import math
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from pmlkit.bench.capacity import find_capacity
from pmlkit.bench.clocks import clock_for
from pmlkit.bench.device import Monitor
from pmlkit.bench.kernels import see_kernels
from pmlkit.bench.memory import peak_memory
from pmlkit.bench.outcome import Outcome, failure, judge
from pmlkit.bench.rotate import Rotating, flusher, sets_beyond_cache
from pmlkit.bench.timing import Samples, time_phases, warm_up
from pmlkit.campaign import Job
from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.losses.bind import Bound, with_loss_scale
from pmlkit.registry import op, resolve

_WINDOWS = 15  # fewer cannot tell a slope from chance: with five, tau is 0.6 in 23 % of steady series
_TRIES = 4  # the first and three with more warm-up


def measure(job: Job, bind: Callable[[Case, Any], Bound]) -> Outcome:
    """Return what was seen. Every failure becomes an outcome with a typed status."""
    outcome, bind = Outcome(status="ok"), with_loss_scale(bind)
    try:
        if job.protocol.seeks == "capacity":
            return find_capacity(job, bind, forget)
        make_inputs, check_answer = (resolve(path) for path in (op(job.case.op).inputs, op(job.case.op).check))
        inputs = make_inputs(job.case, job.protocol.device)
        first = bind(job.case, inputs)
        if not judge(outcome, check := check_answer(job.case, inputs, first), "before timing"):
            return outcome
        outcome.check = check
        bound = _rotating(job, bind, first, inputs, make_inputs) if job.protocol.cache == "rotating" else first
        _time(job, bound, outcome)
        if isinstance(bound, Rotating):
            bound.pair_of_each()
        after = check_answer(job.case, inputs, first)
        if not all(leaf.grad is not None and bool(torch.isfinite(leaf.grad).all()) for leaf in bound.leaves):
            after.rms_rel = None
        if not judge(outcome, after, "after timing"):
            outcome.samples_ns = outcome.timer = None
            return outcome
        if job.protocol.device == "cuda":
            outcome.kernels = [see_kernels(first)]
            _judge_pace(outcome)
        memory = peak_memory(first, job.protocol.device)
        memory.saved_bytes = getattr(first, "saved_bytes", None)
        outcome.memory = [memory]
        judge_timer(outcome)
        return outcome
    except Exception as error:
        failed = failure(error)
        failed.check = outcome.check
        return failed


def forget() -> None:
    """Give back what the last job held, so that the next one in this process finds the memory of a fresh one."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _rotating(job: Job, bind: Callable[[Case, Any], Bound], first: Bound, inputs: Any, make_inputs: Any) -> Rotating:
    """Return the subject bound to as many inputs as overflow the cache, which take turns."""
    bytes_each = 2 * sum(leaf.numel() * leaf.element_size() for leaf in inputs.leaves)  # read, and gradients written
    others = [make_inputs(job.case, job.protocol.device) for _ in range(sets_beyond_cache(bytes_each) - 1)]
    return Rotating([first, *(bind(job.case, other) for other in others)])


def _time(job: Job, bound: Bound, outcome: Outcome) -> None:
    """Warm up and time, up to three times more while the windows still drift. Gradients are poisoned before each pass."""
    protocol, device = job.protocol, job.protocol.device
    reset = None
    if protocol.cache == "cold":
        reset = flusher()
    elif protocol.cache == "hot":
        reset = bound.replay or bound.forward
    clock, warmup, warmup_s = clock_for(device), 0, 0.0
    for _ in range(_TRIES):
        timer = warm_up(bound, protocol, clock)
        warmup, warmup_s = warmup + timer.warmup, warmup_s + timer.warmup_s
        bound.poison()
        monitor = Monitor(device)
        monitor.read()
        samples = time_phases(bound, timer.inner, protocol.blocks, clock, reset, monitor.glance)
        monitor.read()
        outcome.samples_ns, outcome.conditions, outcome.flags = samples, [monitor.conditions], monitor.flags()
        timer.warmup, timer.warmup_s = warmup, warmup_s
        outcome.timer = timer
        if not drifts(samples):
            return
    outcome.flags.append("unsteady")


def drifts(samples: Samples) -> bool:
    """Return whether the pair's windows have a trend: the last third off the first by over 1 %, and |tau| at least 0.5."""
    windows = [max(ranks) for ranks in samples["pair"]]
    third = len(windows) // 3
    if len(windows) < _WINDOWS or min(windows) <= 0:
        return False
    if abs(math.log(median(windows[-third:]) / median(windows[:third]))) <= 0.01:
        return False
    from pmlkit.stats import kendall_tau  # scipy takes a second to import, and few series come this far

    return abs(kendall_tau(windows)) >= 0.5


def judge_timer(outcome: Outcome) -> None:
    """Set status and flags that follow from the samples: not positive = timer_error; under 1,000 ticks, or several
    samples without any spread = a flag, for then the clock is too coarse.
    """
    assert outcome.timer and outcome.samples_ns
    values = [value for samples in outcome.samples_ns.values() for ranks in samples for value in ranks]
    pairs = [ranks[0] for ranks in outcome.samples_ns["pair"]]
    if min(values) <= 0:
        outcome.status, outcome.reason = "timer_error", f"a block of {outcome.timer.inner} iterations took {min(values)} ns"
    elif min(values) < 1000 * outcome.timer.resolution_ns or (len(pairs) > 2 and len(set(pairs)) == 1):
        outcome.flags.append("below_resolution")


def _judge_pace(outcome: Outcome) -> None:
    """Flag whether the host or the device sets the pace: device busy under 70 % or over 90 % of the wall time."""
    assert outcome.timer and outcome.samples_ns and outcome.kernels
    walls = outcome.samples_ns.get("pair_wall")
    if walls is None:
        return
    wall = median(ranks[0] for ranks in walls) / outcome.timer.inner
    busy = outcome.kernels[0].busy_ns / outcome.kernels[0].pairs / wall
    if busy < 0.7:
        outcome.flags.append("host_bound")
    elif busy > 0.9:
        outcome.flags.append("device_bound")


def refuse(job: Job) -> None:
    """Raise PmlkitError for a protocol that cannot be kept here."""
    if job.protocol.device == "cpu" and job.protocol.cache != "as-in-loop":
        raise PmlkitError(f"protocol {job.protocol.name}: {job.protocol.cache!r} caches are made on CUDA devices only")
