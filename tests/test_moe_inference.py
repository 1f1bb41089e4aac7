"""Prepared weights as their users call them, in Triton's interpreter: values, status, errors, one compiled graph."""

from typing import Any

import pytest
import torch

from pmlkit.errors import PmlkitError
from pmlkit.moe.config import ExpertsConfig
from pmlkit.moe.inference import prepared_experts
from pmlkit.moe.prepare import Format, prepare_weights
from pmlkit.moe.reference import reference
from pmlkit.moe.routing import check_status
from pmlkit.moe.swiglu import SwiGLU
from tests.test_moe_layer import away
from tests.test_moe_staged import LIMITS, ROUNDING, plain

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes, for the interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_bad_routes_add_nothing_and_are_counted(format: Format) -> None:
    """The rest of the layer is right; ids of int64 and scores of bf16 are taken."""
    x, ids, scores, w13, w2 = plain(30, 2, 4, 64, 96)
    ids, scores = ids.long(), scores.bfloat16()
    ids[3, 1], ids[7, 0] = -1, 4
    config = ExpertsConfig(SwiGLU(0.7))
    out, status = prepared_experts(x, ids, scores, prepare_weights(w13, w2, format), config, return_status=True)
    kept = torch.where((ids < 0) | (ids > 3), 0.0, scores.float())
    wanted = reference(x, ids.clamp(0, 3), kept, w13, w2, SwiGLU(0.7), operands=ROUNDING[format])
    assert away(out, wanted) <= LIMITS[format]
    with pytest.raises(PmlkitError, match="2 expert ids lie outside 0 to 3"):
        check_status(status, 4)


def test_routes_beyond_the_capacity_are_dropped() -> None:
    """A layer without tokens, and one without room, come out as zeros."""
    x, ids, scores, w13, w2 = plain(8, 2, 3, 32, 32)
    weights = prepare_weights(w13, w2)
    assert prepared_experts(x[:0], ids[:0], scores[:0], weights).shape == (0, 32)
    assert not bool(prepared_experts(x, ids, scores, weights, ExpertsConfig(capacity=0)).any())


def _odd(**changes: Any) -> tuple[Any, ...]:
    x, ids, scores, w13, w2 = plain(4, 2, 3, 32, 32)
    given = {"x": x, "ids": ids, "scores": scores, "weights": prepare_weights(w13, w2)} | changes
    return tuple(given.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4, 16, dtype=torch.bfloat16)}, r"weights are for bfloat16 x \[T, 32\]"),
        ({"x": torch.zeros(4, 32)}, "got torch.float32"),
        ({"x": torch.zeros(5, 32, dtype=torch.bfloat16)}, r"need x \[T, D\]"),
        ({"x": torch.zeros(4, 32, dtype=torch.bfloat16, requires_grad=True)}, "has no gradients: use torch.no_grad"),
    ],
)
def test_input_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    """One error that names value and remedy."""
    with pytest.raises(PmlkitError, match=message):
        prepared_experts(*_odd(**changes))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_the_layer_compiles_whole(format: Format) -> None:
    """torch.compile(fullgraph=True) gives what eager mode gives."""
    x, ids, scores, w13, w2 = plain(20, 2, 3, 32, 64)
    weights = prepare_weights(w13, w2, format)
    whole = torch.compile(prepared_experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(x, ids, scores, weights), prepared_experts(x, ids, scores, weights))
