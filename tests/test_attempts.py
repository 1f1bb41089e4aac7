"""Ways that were tried and kept: the same numbers as the fused loss, by other launches and tiles."""

from dataclasses import replace

import pytest
import torch

from pmlkit.bench.check import check_answer
from pmlkit.campaign import campaign, loss_case
from pmlkit.losses import attempts, tiling
from pmlkit.losses.bind import make_inputs
from pmlkit.losses.bind_fused import bind_fused
from pmlkit.losses.fused import plan_of
from pmlkit.registry import LOSSES

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes, for the interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SHAPE = tiling.Shape(512, 512, 128, torch.float32, torch.float32, False, (0.1,))


@pytest.mark.parametrize("op", LOSSES)
def test_the_operator_gives_the_same_bits(op: str) -> None:
    """Loss and gradients of the registered operator are those of the eager path."""
    case = loss_case(op, 24, "fp32")
    first, second = make_inputs(case), make_inputs(case)
    eager, operator = bind_fused(case, first), attempts.bind_operator(case, second)
    assert torch.equal(eager.pair(), operator.pair())
    for ours, other in zip(eager.leaves, operator.leaves, strict=True):
        assert ours.grad is not None and other.grad is not None and torch.equal(ours.grad, other.grad)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_compiled_loss_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a back end that compiles nothing, for this machine has no device code."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend="aot_eager", **options))
    case = loss_case("contrastive", 24, "fp32")
    inputs = make_inputs(case)
    assert check_answer(case, inputs, attempts.bind_compiled(case, inputs)).passed


@pytest.mark.parametrize("field, factor", [("BM", 2), ("splits", 0.5), ("warps", 2)])
@pytest.mark.parametrize("op", LOSSES)
def test_other_tiles_are_used_and_right(op: str, field: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change reaches every loss's plan, and the answer stays right."""
    from pmlkit.losses import batch_hard_triplet, contrastive, launch, ntxent, proxy_anchor

    for module in (tiling, launch, contrastive, batch_hard_triplet, ntxent, proxy_anchor):
        monkeypatch.setattr(module, "tiles", module.tiles)  # put back afterwards
    before = plan_of("contrastive", SHAPE).forward[-1]
    attempts.change_tiles(lambda t: replace(t, **{field: max(1, int(factor * getattr(t, field)))}))
    after = plan_of("contrastive", SHAPE).forward[-1]
    assert before.tiles != after.tiles
    case = loss_case(op, 28, "fp32")
    inputs = make_inputs(case)
    assert check_answer(case, inputs, bind_fused(case, inputs)).passed


def test_the_campaign_holds_three_attempts_a_missed_target() -> None:
    """Small batches and the largest ProxyAnchor, the loss, its floor and its graph beside five attempts."""
    plan = campaign("loss-attempts")
    assert plan.protocol.lasting and len(plan.cases) == 13
    assert {"fused", "fused-again", "floor", "fused-graph"} < set(plan.arms)
    assert len([arm for arm in plan.arms.values() if arm.key.startswith("attempt-")]) == 5
