"""The search for the largest batch, on subjects that fail where they are told to; and how rows are laid out."""

import math
from collections.abc import Callable

import msgspec
import pytest
import torch

from pmlkit.bench.measure import measure
from pmlkit.bench.outcome import Outcome
from pmlkit.campaign import Job, loss_case
from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.losses.bind import Bound, LossInputs, bind_reference, make_inputs
from pmlkit.losses.draw import draw
from pmlkit.protocol import PROTOCOLS
from pmlkit.registry import subject

CAPACITY = msgspec.structs.replace(PROTOCOLS["pmlkit-cpu"], seeks="capacity")


def search(most: int, bind: Callable[[Case, LossInputs], Bound]) -> Outcome:
    job = Job(
        case=loss_case("contrastive", most, "fp32"),
        subject=subject("reference"),
        arm="a",
        replicate=0,
        order=0,
        protocol=CAPACITY,
    )
    return measure(job, bind)


def limited(limit: int, error: Exception | None = None) -> Callable[[Case, LossInputs], Bound]:
    """Return a subject that runs up to `limit` rows; beyond, it fails or leaves NaN."""

    def bind(case: Case, inputs: LossInputs) -> Bound:
        bound = bind_reference(case, inputs)
        if case.shape["N"] <= limit:
            return bound
        if error is not None:
            raise error
        return Bound(lambda: bound.forward() * math.nan, bound.leaves)

    return bind


@pytest.mark.parametrize("limit", [300, 512, 700, 1023, 1500])
def test_the_largest_batch_is_found(limit: int) -> None:
    """To 2 %, never above; the one that failed is above, with its reason."""
    outcome = search(4096, limited(limit, MemoryError("no room")))
    if limit < 512:  # the answer is proved at 512 rows first
        assert outcome.status == "host_oom"
        return
    assert outcome.status == "ok"
    found = outcome.capacity
    assert found is not None
    assert found.largest <= limit < (found.refused or 0)
    assert (found.refused or 0) <= 1.02 * found.largest + 4
    assert found.largest % 4 == 0
    assert found.reason == "MemoryError: no room"
    assert outcome.samples_ns is not None
    assert outcome.samples_ns["pair"][0][0] > 0
    assert outcome.timer is not None


def test_all_rows_may_fit() -> None:
    """Then nothing was refused, and the batch is the case's own."""
    found = search(1000, bind_reference).capacity
    assert found is not None
    assert (found.largest, found.refused, found.reason) == (1000, None, None)


def test_a_gradient_of_nan_is_no_success() -> None:
    """A pair that runs but leaves NaN has failed; if the first does, so has the case."""
    found = search(2048, limited(600)).capacity
    assert found is not None
    assert found.largest <= 600
    assert found.reason == "a gradient is not finite"
    assert search(2048, limited(100)).status == "wrong_result"


def test_layouts_are_what_they_say() -> None:
    """Copies are equal, clusters are tight, and the share of near negatives is the one asked for."""
    copies = make_inputs(loss_case("contrastive", 64, "fp32", copies=2)).emb_ND
    assert torch.equal(copies[::2], copies[1::2])
    assert not torch.equal(copies[0], copies[2])
    tight = make_inputs(loss_case("contrastive", 512, "fp64", spread=21))
    unit = torch.nn.functional.normalize(tight.emb_ND.detach())
    same = tight.labels_N[:, None] == tight.labels_N[None, :]
    distance = torch.cdist(unit, unit)
    assert 0.02 < float(distance[same & (distance > 1e-6)].mean()) < 0.04
    for width in (128, 512):
        rows, labels, _ = draw({"N": 2048, "D": width, "per_class": 4, "active": 30}, torch.Generator().manual_seed(0))
        unit = torch.nn.functional.normalize(rows)
        negative = labels[:, None] != labels[None, :]
        assert float((torch.cdist(unit, unit)[negative] < 1).double().mean()) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    "shape", [{"N": 8, "D": 4, "per_class": 2, "copies": 2, "active": 30}, {"N": 8, "D": 4, "C": 2, "odd": 1}]
)
def test_other_layouts_are_refused(shape: dict[str, int]) -> None:
    """Two layouts at once, or an unknown one, name what is possible."""
    with pytest.raises(PmlkitError, match="at most one of spread, copies, active"):
        draw(shape, torch.Generator())
