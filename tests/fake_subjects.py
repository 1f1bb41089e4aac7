"""Subjects that misbehave on purpose, for the runner's tests. Each is a binder: (case, inputs) -> Bound."""

import itertools
import os
import signal
import sys
import time

import torch

from pmlkit.case import Case
from pmlkit.losses.bind import Bound, LossInputs, bind_reference


def fine(case: Case, inputs: LossInputs) -> Bound:
    print("a subject may print")
    return bind_reference(case, inputs)


def wrong(case: Case, inputs: LossInputs) -> Bound:
    bound = bind_reference(case, inputs)
    return Bound(lambda: bound.forward() * 1.5, bound.leaves)


def not_finite(case: Case, inputs: LossInputs) -> Bound:
    bound = bind_reference(case, inputs)
    return Bound(lambda: bound.forward() * float("nan"), bound.leaves)


def hangs(case: Case, inputs: LossInputs) -> Bound:
    time.sleep(600)
    return bind_reference(case, inputs)


def killed(case: Case, inputs: LossInputs) -> Bound:
    os.kill(os.getpid(), signal.SIGKILL)
    return bind_reference(case, inputs)


def aborts(case: Case, inputs: LossInputs) -> Bound:
    os.abort()
    return bind_reference(case, inputs)


def silent(case: Case, inputs: LossInputs) -> Bound:
    os._exit(0)
    return bind_reference(case, inputs)


def garbage(case: Case, inputs: LossInputs) -> Bound:
    for fd in range(3, 64):  # the worker's answer is one of these
        try:
            os.write(fd, b"all is well\n")
        except OSError:
            continue
    sys.stdout.flush()
    return bind_reference(case, inputs)


def out_of_memory(case: Case, inputs: LossInputs) -> Bound:
    torch.empty(1 << 60)
    return bind_reference(case, inputs)


def device_out_of_memory(case: Case, inputs: LossInputs) -> Bound:
    raise torch.OutOfMemoryError("tried to allocate 407.00 GiB")
    return bind_reference(case, inputs)


def raises(case: Case, inputs: LossInputs) -> Bound:
    raise RuntimeError(f"broken in {__file__}")


def unsupported(case: Case, inputs: LossInputs) -> Bound:
    raise NotImplementedError("no such kernel")


def clock_goes_backwards(case: Case, inputs: LossInputs) -> Bound:
    real, calls = time.perf_counter_ns, itertools.count()
    time.perf_counter_ns = lambda: real() - 1_000_000_000 * (next(calls) // 3)
    return bind_reference(case, inputs)


def names_its_process(case: Case, inputs: LossInputs) -> Bound:
    print(f"process {os.getpid()}")
    return bind_reference(case, inputs)
