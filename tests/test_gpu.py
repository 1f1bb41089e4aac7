"""What only a GPU can show: run with `python -m pytest -m gpu` on a machine that has one."""

import pytest
import torch

from pmlkit.bench.check import check_answer
from pmlkit.bench.clocks import Clock, EventClock, WallClock
from pmlkit.bench.device import Monitor
from pmlkit.bench.memory import cuda_memory
from pmlkit.bench.timing import time_phases, warm_up
from pmlkit.campaign import PROTOCOLS, loss_case
from pmlkit.losses.bind import Bound, make_inputs
from pmlkit.losses.dense import bind_compiled, bind_dense, bind_graph
from pmlkit.registry import LOSSES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # compilers and drivers warn about matters that are not ours
]
NANOSECONDS = 20_000_000  # long against a launch on a slow host, which takes 0.1 ms on the device time line


def sleeper():
    """Return a call that keeps the device busy for exactly NANOSECONDS by its own wall clock, whatever the SM clock is."""
    import triton
    import triton.language as tl

    @triton.jit
    def spin(length: tl.constexpr):
        begin = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1)
        now = begin
        while now - begin < length:  # pyright: ignore
            now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1)

    def work() -> None:
        spin[(1,)](NANOSECONDS)  # pyright: ignore

    work()
    torch.cuda.synchronize()
    return work


@pytest.mark.parametrize("times", [1, 10])
def test_a_device_sleep_of_known_length(times: int) -> None:
    """20 ms on the device are timed within 2 % by events, by the wall around a synchronisation, and by graph replay."""
    work = sleeper()
    seen = EventClock().total(work, times)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    replayed = EventClock().total(graph.replay, times)
    for name, value in (("events", seen[""]), ("wall", seen["_wall"]), ("graph", replayed[""])):
        assert value / times == pytest.approx(NANOSECONDS, rel=0.02), name
    assert EventClock().apart(lambda: None, work, times) / times == pytest.approx(NANOSECONDS, rel=0.02)
    assert seen["_enqueue"] < seen["_wall"]


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bind", [bind_dense, bind_compiled, bind_graph])
def test_the_dense_forms_are_right_on_the_device(op: str, precision: str, bind) -> None:
    """Eager, compiled and captured, each agrees with float64; a captured pair rewrites poisoned gradients."""
    case = loss_case(op, 512, precision)
    inputs = make_inputs(case, "cuda")
    bound = bind(case, inputs)
    for _ in range(2):  # the second check finds gradients that a replay did not write
        check = check_answer(case, inputs, bound)
        assert check.passed, check


def test_a_replay_reads_new_inputs() -> None:
    """Changing the input in place changes what the captured pair computes."""
    case = loss_case("ntxent", 128, "fp32")
    inputs = make_inputs(case, "cuda")
    bound = bind_graph(case, inputs)
    with torch.no_grad():
        inputs.emb_ND.copy_(torch.randn_like(inputs.emb_ND))
    assert check_answer(case, inputs, bound).passed


def test_memory_is_taken_apart() -> None:
    """A pair that keeps 64 MiB more than its leaf peaks there; a product's workspace is shown beside it."""
    leaf = torch.randn(1024, 1024, device="cuda", requires_grad=True)

    def forward() -> torch.Tensor:
        held = torch.ones(16, 1024, 1024, device="cuda")
        return (leaf @ leaf).sum() + held[0, 0, 0]

    bound = Bound(forward, (leaf,))
    bound.pair()
    memory = cuda_memory(bound)
    assert memory.workspace_bytes is not None
    assert memory.workspace_bytes >= 8 * 2**20
    beyond = memory.allocated_peak_bytes - memory.baseline_bytes - memory.workspace_bytes
    assert 64 * 2**20 <= beyond <= 84 * 2**20


def test_conditions_are_read_from_this_card() -> None:
    """Clock, temperature, power and energy are positive; readings come in pairs; no flag is invented."""
    monitor = Monitor("cuda")
    monitor.read()
    (torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")).sum().item()
    monitor.read()
    conditions = monitor.conditions
    assert len(conditions.sm_mhz) == len(conditions.power_w) == 2
    assert min(conditions.sm_mhz + conditions.power_w + conditions.temp_c) > 0
    assert (conditions.energy_j or 0) >= 0
    assert set(monitor.flags()) <= {"throttled", "contended", "contention_unknown"}


@pytest.mark.parametrize("clock", [EventClock(), WallClock()], ids=["events", "wall"])
def test_phases_of_a_real_subject(clock: Clock) -> None:
    """Every phase has its blocks; event timing carries wall and enqueue beside it; a captured pair has no phases."""
    case = loss_case("contrastive", 128, "fp32")
    inputs = make_inputs(case, "cuda")
    timer = warm_up(bind_dense(case, inputs), PROTOCOLS["pmlkit"], clock)
    samples = time_phases(bind_dense(case, inputs), timer.inner, 3, clock)
    assert {"pair", "forward", "backward"} <= set(samples)
    assert all(len(blocks) == 3 and min(b[0] for b in blocks) > 0 for blocks in samples.values())
    captured = time_phases(bind_graph(case, inputs), 10, 3, clock)
    assert "forward" not in captured
