"""Timing, memory and the answer check, each on something whose truth is known."""

import time

import msgspec
import pytest
import torch

from pmlkit.bench.check import check_answer, mining_gap
from pmlkit.bench.clocks import WallClock
from pmlkit.bench.kernels import covered
from pmlkit.bench.measure import drifts, judge_timer, refuse
from pmlkit.bench.memory import profile_memory
from pmlkit.bench.outcome import Outcome
from pmlkit.bench.rotate import Rotating
from pmlkit.bench.timing import time_phases, warm_up
from pmlkit.campaign import Job, loss_case
from pmlkit.errors import PmlkitError
from pmlkit.losses.bind import Bound, bind_reference, make_inputs, with_loss_scale
from pmlkit.protocol import PROTOCOLS, Protocol
from pmlkit.record import Timer
from pmlkit.registry import subject

PROTOCOL = Protocol(name="test", blocks=3, block_s=0.1, warmup=4, warmup_s=0.01)


class Sleep(torch.autograd.Function):
    """Takes 20 ms forward and 40 ms backward: long against what a busy machine adds to a sleep."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.020)
        return x.sum()

    @staticmethod
    def backward(ctx, *grads):
        time.sleep(0.040)
        return grads[0].expand(4)


def sleeper() -> Bound:
    leaf = torch.zeros(4, requires_grad=True)
    return Bound(lambda: Sleep.apply(leaf), (leaf,))  # type: ignore[arg-type,return-value]


def test_known_durations_are_found() -> None:
    """A pair of 20 + 40 ms is timed as such, each phase on its own; a sleep only overshoots, so the fastest block decides."""
    samples = time_phases(sleeper(), 2, 3, WallClock())
    for phase, expected in (("forward", 20), ("backward", 40), ("pair", 60)):
        fastest = min(ranks[0] for ranks in samples[phase]) / 2 / 1e6
        assert expected <= fastest < 1.3 * expected, (phase, fastest)


def test_inner_iterations_do_not_change_the_time_of_one() -> None:
    """Ten times the iterations take ten times as long."""
    one, ten = (min(r[0] for r in time_phases(sleeper(), n, 2, WallClock())["pair"]) / n for n in (1, 10))
    assert ten == pytest.approx(one, rel=0.2)


def test_warm_up_reaches_count_and_seconds_and_sizes_the_block() -> None:
    """Warm-up runs at least the asked count and time; 60 ms pairs need two iterations for a 100 ms block."""
    timer = warm_up(sleeper(), PROTOCOL, WallClock())
    assert timer.warmup >= PROTOCOL.warmup
    assert timer.warmup_s >= PROTOCOL.warmup_s
    assert timer.inner == 2
    assert timer.resolution_ns > 0


def test_a_pair_starts_from_cleared_gradients() -> None:
    """Two pairs leave the gradient of one, not of two."""
    inputs = make_inputs(loss_case("contrastive", 16, "fp32"))
    bound = bind_reference(loss_case("contrastive", 16, "fp32"), inputs)
    bound.pair()
    first = inputs.emb_ND.grad
    bound.pair()
    assert first is not None
    assert torch.equal(first, inputs.emb_ND.grad)  # type: ignore[arg-type]


def test_memory_peak_of_a_known_allocation() -> None:
    """A forward that holds 8 MB and, after freeing 4, takes 2 more peaks at 8 MB beyond its leaf."""

    def forward() -> torch.Tensor:
        a, b = torch.ones(1_000_000), torch.ones(1_000_000)
        del b
        c = torch.ones(500_000)
        return leaf.sum() + a[0] + c[0]

    leaf = torch.zeros(1000, requires_grad=True)
    memory = profile_memory(Bound(forward, (leaf,)))
    assert memory.baseline_bytes == 4000
    assert 8_000_000 <= memory.allocated_peak_bytes - 4000 < 8_050_000


def test_zero_time_is_a_timer_error_and_short_blocks_are_flagged() -> None:
    """Not-positive time is a status; a block under a thousand clock ticks is a flag."""

    def judged(nanoseconds: int) -> Outcome:
        timer = Timer(method="wall", cache="as-in-loop", warmup=1, warmup_s=0.0, inner=1, resolution_ns=50.0)
        outcome = Outcome(status="ok", timer=timer, samples_ns={"pair": [[nanoseconds]]})
        judge_timer(outcome)
        return outcome

    assert judged(0).status == "timer_error"
    assert judged(49_999).flags == ["below_resolution"]
    assert judged(50_000).flags == []


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-4, float("nan")])
def test_the_check_finds_a_small_error(factor: float) -> None:
    """An answer off by 1e-4 in float32 fails, the exact one passes, NaN is not finite."""
    case = loss_case("ntxent", 32, "fp32")
    bound = bind_reference(case, inputs := make_inputs(case))
    check = check_answer(case, inputs, Bound(lambda: bound.forward() * factor, bound.leaves))
    assert check.passed == (factor == 1.0)
    assert (check.rms_rel is None) == (factor != factor)


def test_the_check_finds_one_wrong_row() -> None:
    """A gradient that is wrong in one row fails and the row is named."""
    case = loss_case("contrastive", 64, "fp32")
    bound = bind_reference(case, inputs := make_inputs(case))

    def forward() -> torch.Tensor:
        return bound.forward() + (inputs.emb_ND[7] * 0.01).sum() - (inputs.emb_ND[7] * 0.01).sum().detach()

    check = check_answer(case, inputs, Bound(forward, bound.leaves))
    assert not check.passed
    assert check.worst_row == 7


def test_missing_gradient_fails() -> None:
    """A subject that returns the right loss without a gradient is wrong."""
    case = loss_case("contrastive", 16, "fp32")
    bound = bind_reference(case, inputs := make_inputs(case))
    detached = torch.zeros((), requires_grad=True)
    check = check_answer(case, inputs, Bound(lambda: bound.forward().detach() + detached, bound.leaves))
    assert not check.passed


def test_mining_gap() -> None:
    """The hardest triplets have gap 0, an easier negative a positive one; a wrong label or a missing anchor is refused."""
    case = loss_case("batch_hard_triplet", 32, "fp32")
    inputs = make_inputs(case)
    mined = bind_reference(case, inputs).mined
    assert mined is not None
    a, p, n = mined()
    assert mining_gap(inputs, (a, p, n)) < 1e-6
    others = torch.tensor([int((inputs.labels_N != inputs.labels_N[i]).nonzero()[0]) for i in a])
    assert mining_gap(inputs, (a, p, others)) > 1e-3
    assert mining_gap(inputs, (a, n, p)) == float("inf")
    assert mining_gap(inputs, (a[1:], p[1:], n[1:])) == float("inf")
    assert mining_gap(inputs, (a[:0], p[:0], n[:0])) == float("inf")


@pytest.mark.parametrize(
    ("spans", "total"),
    [([], 0), ([(0, 5), (10, 12)], 7), ([(0, 10), (2, 3), (9, 12)], 12), ([(5, 6), (0, 1)], 2), ([(0, 4), (0, 4)], 4)],
)
def test_busy_time_counts_overlaps_once(spans: list[tuple[int, int]], total: int) -> None:
    """Kernels that overlap keep the device busy once."""
    assert covered(spans) == total


def test_rotating_inputs_take_turns() -> None:
    """Each pair runs on the next set, clears and fills that set's gradients only, and the rest wait."""
    cases = [loss_case("contrastive", 16, "fp32")] * 3
    inputs = [make_inputs(case) for case in cases]
    bound = Rotating([bind_reference(case, one) for case, one in zip(cases, inputs, strict=True)])
    for turn in range(4):
        bound.pair()
        assert [one.emb_ND.grad is not None for one in inputs] == [i <= turn for i in range(3)]
    first = inputs[0].emb_ND.grad
    assert first is not None
    assert torch.equal(first, inputs[1].emb_ND.grad)  # type: ignore[arg-type]
    samples = time_phases(bound, 3, 2, WallClock())
    assert set(samples) == {"pair", "forward", "backward"}
    bound.poison()
    bound.pair()
    assert sum(bool(one.emb_ND.grad.isnan().any()) for one in inputs) == 2  # type: ignore[union-attr]
    bound.pair_of_each()
    assert all(bool(torch.isfinite(one.emb_ND.grad).all()) for one in inputs)  # type: ignore[arg-type]


def test_a_reset_before_each_iteration_is_not_timed() -> None:
    """With a 30 ms reset before each iteration a 60 ms pair still takes 60 ms."""
    samples = time_phases(sleeper(), 1, 2, WallClock(), reset=lambda: time.sleep(0.03))
    for phase, expected in (("forward", 20), ("backward", 40), ("pair", 60)):
        assert expected <= min(ranks[0] for ranks in samples[phase]) / 1e6 < 1.3 * expected


@pytest.mark.parametrize(
    ("windows", "unsteady"),
    [
        ([100 + i for i in range(15)], True),  # a ramp of 14 %
        ([1000 + i / 10 for i in range(15)], False),  # a ramp of 0.1 %
        ([100, 110] * 7 + [100], False),  # wide but without a trend
        ([100 + 5 * i for i in range(5)], False),  # too few to tell
    ],
)
def test_a_trend_of_the_windows_is_found(windows: list[float], unsteady: bool) -> None:
    """Only many windows with a trend of over 1 % are unsteady."""
    assert drifts({"pair": [[round(1000 * value)] for value in windows]}) == unsteady


def test_a_cache_state_that_this_device_cannot_make_is_refused() -> None:
    """A processor has no cache that this engine could overwrite: the worker says so before it measures."""
    protocol = msgspec.structs.replace(PROTOCOLS["pmlkit-cpu"], cache="cold")
    job = Job(
        case=loss_case("contrastive", 16, "fp32"),
        subject=subject("reference"),
        arm="a",
        replicate=0,
        order=0,
        protocol=protocol,
    )
    with pytest.raises(PmlkitError, match="'cold' caches are made on CUDA devices only"):
        refuse(job)


def test_float16_runs_with_a_loss_scale() -> None:
    """A pair of float16 rows back-propagates 1,024 times its loss, and the check takes that back; other types go unscaled."""
    for key, scale in (("fp16", 1024), ("bf16", 1)):
        case = loss_case("ntxent", 24, key)
        inputs = make_inputs(case)
        bound = with_loss_scale(bind_reference)(case, inputs)
        assert bound.scale == scale
        (plain,) = torch.autograd.grad(bound.forward() * scale, inputs.emb_ND)
        bound.pair()
        assert torch.equal(inputs.emb_ND.grad, plain)  # type: ignore[arg-type]
        check = check_answer(case, inputs, bound)
        assert check.rms_rel is not None
        assert check.rms_rel <= (1e-3 if key == "fp16" else 4e-3)
