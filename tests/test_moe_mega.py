"""Both projections in one launch, in Triton's interpreter: the staged pipeline's answer, block by block behind each other."""

import pytest
import torch

from pmlkit.errors import PmlkitError
from pmlkit.moe import mega, staged
from pmlkit.moe.config import ExpertsConfig
from pmlkit.moe.formats import Folded
from pmlkit.moe.inference import prepared_experts
from pmlkit.moe.prepare import prepare_weights
from pmlkit.moe.routing import LOST, route
from pmlkit.moe.swiglu import SwiGLU
from tests.test_moe_layer import away
from tests.test_moe_staged import plain

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes, for the interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("window", [1, 2, 16])
@pytest.mark.parametrize("sizes", [(60, 3, 4, 160, 96), (150, 2, 3, 64, 160), (3, 1, 2, 32, 32)], ids=str)
def test_it_is_the_staged_layer(
    limit: float | None, window: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of one block, of some and of more than there are; lost digits are counted alike."""
    monkeypatch.setattr(mega, "WINDOW", window)
    x, ids, scores, w13, w2 = plain(*sizes)
    x[1, :32] *= 2.0**-24
    weights, routes = prepare_weights(w13, w2), [route(ids, sizes[2], tile=64) for _ in range(2)]
    assert isinstance(weights.w13, Folded) and isinstance(weights.w2, Folded)
    out = mega.forward(x, scores, weights.w13, weights.w2, routes[0], SwiGLU(limit))
    wanted = staged.forward(x, scores, weights, routes[1], SwiGLU(limit))
    assert away(out, wanted.double()) <= 1e-3
    counted = [int(routing.status[LOST.value]) for routing in routes]
    assert counted[0] == counted[1] and (counted[0] > 0) == (sizes[3] > 32)


def test_users_ask_for_it_by_the_configuration() -> None:
    """prepared_experts in one launch gives the pipeline's bits; a pipeline that is none, and nvfp4, are refused."""
    x, ids, scores, w13, w2 = plain(20, 2, 3, 64, 32)
    weights, config = prepare_weights(w13, w2), ExpertsConfig(pipeline="mega")
    assert isinstance(weights.w13, Folded) and isinstance(weights.w2, Folded)
    out = mega.forward(x, scores, weights.w13, weights.w2, route(ids, 3, tile=64), SwiGLU())
    assert torch.equal(prepared_experts(x, ids, scores, weights, config), out)
    with pytest.raises(PmlkitError, match="pipeline='fused'"):
        ExpertsConfig(pipeline="fused")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PmlkitError, match="nvfp4 has no mega pipeline: use 'staged'"):
        prepared_experts(x, ids, scores, prepare_weights(w13, w2, "nvfp4"), config)
