"""What only a GPU can show: run with `python -m pytest -m gpu` on a machine that has one."""

import msgspec
import pytest
import torch

from pmlkit.bench.check import check_answer
from pmlkit.bench.clocks import Clock, EventClock, WallClock
from pmlkit.bench.device import Monitor
from pmlkit.bench.kernels import see_kernels
from pmlkit.bench.measure import measure
from pmlkit.bench.memory import cuda_memory
from pmlkit.bench.timing import time_phases, warm_up
from pmlkit.campaign import Job, loss_case
from pmlkit.losses.batch_hard_triplet import BatchHardTripletLoss
from pmlkit.losses.bind import Bound, exact, make_inputs
from pmlkit.losses.bind_fused import bind_fused, bind_fused_graph
from pmlkit.losses.contrastive import ContrastiveLoss
from pmlkit.losses.dense import bind_compiled, bind_dense, bind_graph
from pmlkit.losses.floor import bind_floor
from pmlkit.losses.mining import mine, mined
from pmlkit.losses.ntxent import NTXentLoss
from pmlkit.protocol import PROTOCOLS
from pmlkit.registry import LOSSES, resolve, subject

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
    assert set(conditions.held_back_ns) <= {"power", "thermal"}
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


def test_kernels_of_known_length() -> None:
    """Five launches of 20 ms are counted, found busy for 100 ms within 2 %, and last as long when queued beforehand."""
    work = sleeper()
    seen = see_kernels(Bound(lambda: torch.zeros(()), (), replay=work))
    assert seen.launches == seen.pairs == 5
    assert seen.busy_ns == pytest.approx(5 * NANOSECONDS, rel=0.02)
    assert seen.queued_ns == pytest.approx(5 * NANOSECONDS, rel=0.02)


def test_work_that_waits_for_the_device_cannot_be_queued() -> None:
    """A pair that reads a value back has no queued time, rather than a wrong one."""
    x = torch.ones(8, device="cuda")
    assert see_kernels(Bound(lambda: torch.zeros(()), (), replay=lambda: (x * 2).sum().item())).queued_ns is None


@pytest.mark.parametrize("cache", ["as-in-loop", "hot", "cold", "rotating"])
@pytest.mark.parametrize("key", ["dense", "dense-graph"])
def test_every_cache_state_is_measured(cache: str, key: str) -> None:
    """The record says which state ran; its answer is proved before and after; the host-bound eager form is flagged so."""
    protocol = next(p for p in PROTOCOLS.values() if p.device == "cuda" and p.cache in (cache, "as-in-loop"))
    protocol = msgspec.structs.replace(protocol, cache=cache, warmup_s=0.1, blocks=3, block_s=0.001)
    one = subject(key)
    case = loss_case("contrastive", 2048, "fp32")
    outcome = measure(Job(case=case, subject=one, arm="a", replicate=0, order=0, protocol=protocol), resolve(one.bind))
    assert outcome.status == "ok", outcome.reason
    assert outcome.timer is not None
    assert outcome.timer.cache == cache
    assert outcome.kernels is not None
    assert outcome.kernels[0].launches > 0
    assert ("host_bound" in outcome.flags) == (key == "dense" and cache in ("as-in-loop", "rotating"))


FUSED = {"contrastive": ContrastiveLoss, "batch_hard_triplet": BatchHardTripletLoss, "ntxent": NTXentLoss}
ERRORS = {"fp32": 2e-6, "bf16": 4e-3, "fp16": 1e-3}


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("n", [127, 512, 2048, 4097, 20000])
def test_fused_losses_on_the_device(op: str, precision: str, n: int) -> None:
    """Eager and captured, value and gradients agree with float64 at full sizes, and the second replay as the first."""
    case = loss_case(op, n, precision)
    for bind in (bind_fused, bind_fused_graph):
        inputs = make_inputs(case, "cuda")
        bound = bind(case, inputs)
        for _ in range(2):
            check = check_answer(case, inputs, bound)
            assert check.rms_rel is not None
            assert check.rms_rel <= ERRORS[precision], check


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("n", [127, 2048, 4097])
def test_fused_losses_of_float16_under_a_loss_scale(op: str, n: int) -> None:
    """Scaled by 65536, as float16 is trained, gradients agree with float64; unscaled ones leave its range."""
    case = loss_case(op, n, "fp16")
    inputs = make_inputs(case, "cuda")
    bound = bind_fused(case, inputs)
    (bound.forward() * 65536).backward()
    _, wanted = exact(case, inputs, bound.mined() if bound.mined else None)
    for leaf, reference in zip(bound.leaves, wanted, strict=True):
        assert leaf.grad is not None
        assert float((leaf.grad.double() / 65536 - reference).norm() / reference.norm()) <= ERRORS["fp16"]


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("n", [8192, 32768])
def test_fused_losses_need_little_memory(op: str, n: int) -> None:
    """Beyond inputs, output and gradients a pair takes at most 64 bytes a row or proxy, and 16 MiB."""
    case = loss_case(op, n, "bf16")
    inputs = make_inputs(case, "cuda")
    bound = bind_fused(case, inputs)
    bound.pair()
    memory = cuda_memory(bound)
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in bound.leaves)
    beyond = memory.allocated_peak_bytes - memory.baseline_bytes - (memory.workspace_bytes or 0) - gradients
    assert beyond > 0
    assert beyond <= 64 * (n + case.shape.get("C", 0)) + 16 * 2**20 + 4096


@pytest.mark.parametrize("op", LOSSES)
def test_fused_losses_never_wait_for_the_device(op: str) -> None:
    """A pair synchronises nothing, with labels of another integer type too."""
    case = loss_case(op, 512, "fp32")
    inputs = make_inputs(case, "cuda")
    bound = bind_fused(case, inputs)
    bound.pair()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bound.pair()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("op", FUSED)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pointers_that_are_not_aligned(op: str, precision: str) -> None:
    """Rows and labels that begin anywhere give what their aligned copies do, before and after direct starts exist."""
    inputs = make_inputs(loss_case(op, 512, precision), "cuda")
    rows, labels = inputs.emb_ND.detach(), inputs.labels_N
    shifted = torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view_as(rows)
    shifted_labels = torch.cat([labels.new_zeros(1), labels])[1:]
    assert shifted.data_ptr() % 16
    assert shifted_labels.data_ptr() % 16
    answers = []
    for x, y in ((rows, labels), (shifted, shifted_labels), (rows, shifted_labels), (rows, labels)):
        leaf = x.clone().requires_grad_() if x is rows else shifted.detach().requires_grad_()
        loss = FUSED[op]()(leaf, y)
        answers.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    for answer in answers[1:]:  # lengths are added up in another order
        for one, other in zip(answer, answers[0], strict=True):
            assert float((one.double() - other.double()).norm() / other.double().norm()) <= ERRORS[precision] / 2


@pytest.mark.parametrize("op", FUSED)
@pytest.mark.parametrize("n", [512, 9000])
def test_equal_answers_whatever_runs_before(op: str, n: int) -> None:
    """Twenty pairs in a row, other kernels between them, give the same bits: no kernel starts on what is not written yet."""
    inputs = make_inputs(loss_case(op, n, "bf16"), "cuda")
    loss = FUSED[op]()
    answers = []
    for i in range(20):
        leaf = (inputs.emb_ND.detach() * 1.0).requires_grad_()
        value = loss(leaf, inputs.labels_N.clone() if i % 2 else inputs.labels_N)
        answers.append((value.detach(), *torch.autograd.grad(value * 1.0 if i % 3 else value, leaf)))
    for answer in answers[1:]:
        assert all(torch.equal(one, other) for one, other in zip(answer, answers[0], strict=True))


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_bad_numbers_reach_every_gradient(op: str, bad: float) -> None:
    """One bad row makes loss and gradients NaN: a processor's maximum drops NaN, which must not hide it."""
    case = loss_case(op, 512, "fp32")
    inputs = make_inputs(case, "cuda")
    with torch.no_grad():
        inputs.emb_ND[3], inputs.emb_ND[9] = bad, 0
    bound = bind_fused(case, inputs)
    assert bool(bound.pair().isnan())
    assert all(leaf.grad is not None and bool(leaf.grad.isnan().all()) for leaf in bound.leaves)


@pytest.mark.parametrize("op", FUSED)
@pytest.mark.parametrize("n", [512, 20000])
def test_normalised_rows_in_pairs(op: str, n: int) -> None:
    """Two rows a class, of length 1: the largest weights and fits there are stay in float16's range."""
    emb = torch.nn.functional.normalize(torch.randn(n, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(0)))
    leaf = emb.bfloat16().requires_grad_()
    labels = torch.arange(n, device="cuda") // 2 % 1000
    (grad,) = torch.autograd.grad(FUSED[op]()(leaf, labels), leaf)
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("n", [512, 2048, 20000])
def test_equal_distances_go_to_the_first_index(n: int) -> None:
    """Copies in many classes tie exactly: what is mined are the indices of float64, in every path."""
    inputs = make_inputs(loss_case("batch_hard_triplet", n, "fp32"), "cuda")
    emb = inputs.emb_ND.detach().clone()
    emb[n // 4 : n // 2] = emb[: n // 16].repeat(4, 1)
    picked = mined(BatchHardTripletLoss()(emb.clone().requires_grad_(), inputs.labels_N))
    exact = mine(emb.double(), inputs.labels_N)
    for got, want in zip(picked, exact, strict=True):
        assert float((got != want).double().mean()) <= 1e-3  # but for distances that float32 cannot tell apart
    rows = torch.nn.functional.normalize(emb.double())
    for got, want in zip(picked[1:], exact[1:], strict=True):
        gap = (rows[exact[0]] - rows[got]).square().sum(1) - (rows[exact[0]] - rows[want]).square().sum(1)
        assert float(gap.abs().max()) <= 2e-6
        assert bool((gap[got != want] != 0).all())


@pytest.mark.parametrize("op", FUSED)
def test_offsets_beyond_two_billion(op: str) -> None:
    """65,537 rows: pairs exceed 2^32, so counts and offsets of 32 bits would wrap; a sample of rows against float64."""
    n, width = 65537, 32
    emb = torch.randn(n, width, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).requires_grad_()
    labels = torch.arange(n, device="cuda") // 4
    loss = FUSED[op]()(emb, labels)
    (grad,) = torch.autograd.grad(loss, emb)
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(grad).all())
    along = (grad.double() * torch.nn.functional.normalize(emb.detach().double())).sum(1)
    assert float(along.abs().max()) <= 1e-4 * float(grad.norm(dim=1).max())  # the gradient is tangent to the sphere


@pytest.mark.parametrize("op", FUSED)
def test_fused_losses_under_autocast_and_scaling(op: str) -> None:
    """Autocast changes nothing, a loss scale multiplies the gradient, and compiled code gives the same bits."""
    case = loss_case(op, 512, "fp32")
    inputs = make_inputs(case, "cuda")
    loss = FUSED[op]()
    plain = loss(inputs.emb_ND, inputs.labels_N)
    (grad,) = torch.autograd.grad(plain, inputs.emb_ND)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(loss(inputs.emb_ND, inputs.labels_N), plain)
    (scaled,) = torch.autograd.grad(loss(inputs.emb_ND, inputs.labels_N) * 65536, inputs.emb_ND)
    assert torch.equal(scaled, grad * 65536)
    compiled = torch.compile(lambda x, y: loss(x, y) * 1, fullgraph=True)
    (again,) = torch.autograd.grad(compiled(inputs.emb_ND, inputs.labels_N), inputs.emb_ND)
    assert torch.equal(again, grad)


@pytest.mark.parametrize("key", ["pmlkit", "pml-2.9.0"])
def test_the_largest_batch_on_the_device(key: str) -> None:
    """A search that fits to the end says so, with the peak of its largest batch; one that asks for too much ends below."""
    one = subject(key)
    case = loss_case("ntxent", 4096, "bf16")
    job = Job(case=case, subject=one, arm="a", replicate=0, order=0, protocol=PROTOCOLS["pmlkit-capacity"])
    outcome = measure(job, resolve(one.bind))
    assert outcome.status == "ok", outcome.reason
    assert outcome.capacity is not None
    assert outcome.memory is not None
    if key == "pmlkit":
        assert (outcome.capacity.largest, outcome.capacity.refused) == (4096, None)
    else:  # 2.9.0 builds positives by negatives: 4096 rows would take 1.6 TB
        assert 1000 <= outcome.capacity.largest < 4096
        assert "OutOfMemoryError" in (outcome.capacity.reason or "")
    assert outcome.memory[0].allocated_peak_bytes > 0


def test_the_floor_on_the_device() -> None:
    """It is right, and has one launch each way beside what autograd itself starts."""
    case = loss_case("contrastive", 512, "bf16")
    inputs = make_inputs(case, "cuda")
    bound = bind_floor(case, inputs)
    assert check_answer(case, inputs, bound).rms_rel == 0
    seen = see_kernels(bound)
    assert seen.launches / seen.pairs <= 4


@pytest.mark.parametrize("op", LOSSES)
def test_a_side_stream_starts_the_same_kernels(op: str) -> None:
    """Direct starts go to the current stream: a side stream gives the bits of the default one."""
    inputs = make_inputs(loss_case(op, 512, "bf16"), "cuda")
    case = loss_case(op, 512, "bf16")
    bound = bind_fused(case, inputs)
    bound.pair()
    want = [bound.pair().detach().clone(), *(leaf.grad.clone() for leaf in bound.leaves if leaf.grad is not None)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what went to another stream would not wait
        loss = bound.pair().detach()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    got = [loss, *(leaf.grad for leaf in bound.leaves if leaf.grad is not None)]
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
