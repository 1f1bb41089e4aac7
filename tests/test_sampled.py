"""The float64 answer of large batches, by chunks and for a sample of rows, against the one that keeps all pairs."""

import pytest
import torch

from pmlkit.bench import check
from pmlkit.bench.check import check_answer, mining_gap
from pmlkit.campaign import loss_case
from pmlkit.losses import sampled
from pmlkit.losses.bind import Bound, bind_reference, exact, make_inputs
from pmlkit.losses.bind_fused import bind_fused
from pmlkit.losses.mining import mine
from pmlkit.losses.sampled import SAMPLED, exact_of_rows


@pytest.mark.parametrize("op", SAMPLED)
@pytest.mark.parametrize("layout", [{}, {"spread": 500}, {"active": 30}], ids=str)
def test_rows_of_the_sample_have_their_gradients(op: str, layout: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and the sampled rows' gradients are those of all pairs at once, whatever the chunk."""
    monkeypatch.setattr(sampled, "_CHUNK_NUMBERS", 7000)
    case = loss_case(op, 200, "fp32", **layout)
    inputs = make_inputs(case)
    rows = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:20]
    loss, (gradient,) = exact_of_rows(case, inputs, rows)
    want, (gradients,) = exact(case, inputs)
    assert float(loss) == pytest.approx(float(want), rel=1e-12)
    assert float((gradient - gradients[rows]).norm() / gradients[rows].norm()) <= 1e-10


@pytest.mark.parametrize("op", ["contrastive", "batch_hard_triplet", "ntxent", "proxy_anchor"])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_large_batch_is_checked(op: str, wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the largest batch of all pairs a right answer passes, and one with a wrong gradient does not."""
    monkeypatch.setattr(check, "LARGEST", 100)
    monkeypatch.setattr(check, "SAMPLE", 50)
    case = loss_case(op, 300, "fp32")
    inputs = make_inputs(case)
    right = bind_reference(case, inputs)
    bound = Bound(lambda: right.forward() * (1.01 if wrong else 1.0), right.leaves, right.mined)
    seen = check_answer(case, inputs, bound)
    assert seen.passed != wrong
    assert ("gradients of 50 rows" in seen.reference) == (op in SAMPLED)
    assert ("mining of 50 rows" in seen.reference) == (op == "batch_hard_triplet")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns where a GPU returns Inf
def test_fused_mining_is_seen() -> None:
    """The fused batch-hard loss tells what it mined, and goes on telling after its backward pass."""
    case = loss_case("batch_hard_triplet", 60, "bf16")
    inputs = make_inputs(case, "cuda" if torch.cuda.is_available() else "cpu")
    bound = bind_fused(case, inputs)
    bound.pair()
    assert bound.mined is not None
    assert mining_gap(inputs, bound.mined()) <= 1e-6
    assert check_answer(case, inputs, bound).passed


def test_mining_of_a_sample() -> None:
    """Only the sampled anchors are looked at: a missing one is seen, one outside is not."""
    inputs = make_inputs(loss_case("batch_hard_triplet", 60, "fp32"))
    a, p, n = mine(inputs.emb_ND, inputs.labels_N)
    sample = torch.tensor([5, 17, 40])
    assert mining_gap(inputs, (a, p, n), sample) <= 1e-6
    for missing, seen in ((17, True), (18, False)):
        kept = a != missing
        assert (mining_gap(inputs, (a[kept], p[kept], n[kept]), sample) == float("inf")) == seen
    farther = torch.where(a == 5, torch.roll(n, 1), n)
    assert mining_gap(inputs, (a, p, farther), sample) > 1e-3
