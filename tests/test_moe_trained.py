"""mxfp8 training in Triton's interpreter against float64 with the same rounding points."""

import pytest
import torch

from pmlkit.moe import trained
from pmlkit.moe.both_ways import both_ways
from pmlkit.moe.reference import exact, reference, reference_backward, to_trained_mxfp8
from pmlkit.moe.routing import route
from pmlkit.moe.swiglu import SwiGLU
from tests.test_moe_layer import away
from tests.test_moe_staged import plain

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes, for the interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("sizes", [(40, 2, 5, 160, 96), (90, 3, 4, 96, 64)], ids=str)
def test_output_and_gradients(limit: float | None, sizes: tuple[int, ...]) -> None:
    """Near the reference with the same roundings, and no further from unquantised float64 than that is."""
    x, ids, scores, w13, w2 = plain(*sizes)
    grad = torch.randn_like(x, generator=None)
    activation, routing = SwiGLU(limit), route(ids, sizes[2], tile=64)
    both = both_ways(w13), both_ways(w2)
    out, h1 = trained.forward(x, scores, *both, routing, activation, promote=False, keep=True)
    assert h1 is not None
    got = trained.backward(grad, x, scores, *both, h1, routing, activation, promote=False)
    wanted = reference_backward(grad, x, ids, scores, w13, w2, activation, operands=to_trained_mxfp8)
    true = reference_backward(grad, x, ids, scores, w13, w2, activation, exact)
    pairs = [
        (
            out,
            *(
                reference(x, ids, scores, w13, w2, activation, **how)
                for how in ({"operands": to_trained_mxfp8}, {"rounded": exact})
            ),
        )
    ]
    pairs += zip(vars(got).values(), vars(wanted).values(), vars(true).values(), strict=True)
    for found, same, unquantised in pairs:
        assert found is not None
        assert away(found, same) <= 1e-2
        assert away(found, unquantised) <= 1.05 * away(same, unquantised)
