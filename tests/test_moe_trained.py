"""mxfp8 training in Triton's interpreter against float64 with the same rounding points."""

import pytest
import torch

from pmlkit.errors import PmlkitError
from pmlkit.moe import trained
from pmlkit.moe.both_ways import both_ways
from pmlkit.moe.config import ExpertsConfig
from pmlkit.moe.experts import routed_experts
from pmlkit.moe.reference import exact, reference, reference_backward, to_trained_mxfp8
from pmlkit.moe.routing import check_status, route
from pmlkit.moe.swiglu import SwiGLU
from tests.test_moe_layer import away, made
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
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
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


def test_users_ask_for_it_by_the_configuration() -> None:
    """routed_experts in mxfp8 gives the pipeline's bits, weights quantised beforehand or not; gradients add up in place."""
    x, ids, scores, w13, w2 = made(40, 2, 5, 64, 32)
    config, grad = ExpertsConfig(format="mxfp8"), torch.randn(40, 64).bfloat16()
    leaves = (x, scores, w13, w2)
    out, status = routed_experts(x, ids, scores, w13, w2, config, return_status=True)
    check_status(status, 5)
    out.backward(grad)
    first = [leaf.grad for leaf in leaves]
    routing, both = route(ids, 5, tile=64), (both_ways(w13.detach()), both_ways(w2.detach()))
    rows, weights = x.detach(), scores.detach()
    plain_out, h1 = trained.forward(rows, weights, *both, routing, SwiGLU(), promote=False, keep=True)
    assert torch.equal(out, plain_out) and h1 is not None
    found = trained.backward(grad, rows, weights, *both, h1, routing, SwiGLU(), promote=False)
    for mine, one in zip(first, vars(found).values(), strict=True):
        assert mine is not None and torch.equal(mine, one)
    into = torch.zeros(5, 64, 64), torch.zeros(5, 64, 32)
    for leaf in leaves:
        leaf.grad = None
    for _ in range(2):
        routed_experts(x, ids, scores, w13, w2, config, quantised=both, weight_grads=into).backward(grad)
    assert w13.grad is None and w2.grad is None
    for sums, once in zip(into, first[2:], strict=True):
        assert once is not None and away(sums, 2 * once.double()) < 3e-3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_layer_compiles_whole() -> None:
    """torch.compile(fullgraph=True) gives what eager mode gives, gradients too."""
    first, second, config = made(20, 2, 3, 32, 64), made(20, 2, 3, 32, 64), ExpertsConfig(format="mxfp8")
    routed_experts(*first, config).sum().backward()
    torch.compile(routed_experts, fullgraph=True, backend="aot_eager")(*second, config).sum().backward()
    for eager, compiled in zip(first, second, strict=True):
        if eager.requires_grad:
            assert eager.grad is not None and compiled.grad is not None and torch.equal(eager.grad, compiled.grad)


def test_no_token_no_gradient_and_formats_that_are_not_trained() -> None:
    """An empty batch leaves zeros; nvfp4 names where it is served; widths need whole blocks; once differentiable."""
    x, ids, scores, w13, w2 = made(0, 2, 3, 32, 32)
    config = ExpertsConfig(format="mxfp8")
    routed_experts(x, ids, scores, w13, w2, config).sum().backward()
    assert w13.grad is not None and not bool(w13.grad.any())
    with pytest.raises(PmlkitError, match="nvfp4 is for inference, see prepared_experts"):
        ExpertsConfig(format="nvfp4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PmlkitError, match="multiples of 32"):
        routed_experts(*made(4, 1, 2, 40, 32), config)
    given = made(4, 1, 2, 32, 32)
    with pytest.raises(PmlkitError, match="differentiable once"):
        torch.autograd.grad(routed_experts(*given, config).sum(), given[0], create_graph=True)
