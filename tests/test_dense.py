"""The dense forms against the float64 reference, on the CPU."""

import pytest
import torch

from pmlkit.bench.check import check_answer
from pmlkit.campaign import loss_case
from pmlkit.losses.bind import make_inputs
from pmlkit.losses.dense import FORMS, bind_dense
from pmlkit.registry import LOSSES


@pytest.mark.parametrize("rows", [32, 128, 513])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("op", LOSSES)
def test_value_and_gradients(op: str, precision: str, rows: int) -> None:
    """Loss and every gradient agree with float64 within the format's tolerance."""
    case = loss_case(op, rows, precision)
    check = check_answer(case, inputs := make_inputs(case), bind_dense(case, inputs))
    assert check.passed, check


def test_every_loss_has_a_form() -> None:
    """The bar exists for each loss."""
    assert set(FORMS) == set(LOSSES)


@pytest.mark.parametrize("op", LOSSES)
def test_a_batch_without_positives_is_finite(op: str) -> None:
    """All labels different: finite loss and gradients, zero where nothing is left to compare."""
    case = loss_case(op, 16, "fp32")
    inputs = make_inputs(case)
    inputs.labels_N.copy_(torch.arange(16))
    bound = bind_dense(case, inputs)
    loss = bound.pair()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(leaf.grad).all() for leaf in bound.leaves)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("default")
def test_the_form_compiles_whole() -> None:
    """`torch.compile(fullgraph=True)` takes the form without a break, through the interpreter backend here."""
    case = loss_case("batch_hard_triplet", 32, "fp32")
    inputs = make_inputs(case)
    compiled = torch.compile(FORMS["batch_hard_triplet"], fullgraph=True, backend="eager")
    loss, hard_N2, _ = compiled(inputs.emb_ND, inputs.labels_N)
    assert torch.equal(loss, bind_dense(case, inputs).forward())
    assert hard_N2.shape == (32, 2)
