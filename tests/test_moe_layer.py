"""The expert layer in Triton's interpreter against float64 with the same rounding points, and what it refuses."""

import pytest
import torch
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.moe.config import ExpertsConfig
from pmlkit.moe.experts import routed_experts
from pmlkit.moe.reference import exact, reference, reference_backward
from pmlkit.moe.routing import check_status
from pmlkit.moe.swiglu import SwiGLU

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes, for the interpreter"),
    # Rows that are not there hold what memory held; a product takes them along, and nothing reads its result.
    pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning"),
]

# One rounding of a sum that float32 added in another order moves a bfloat16 value by 2^-8; few values are that close.
CLOSE = 1e-3


def made(T: int, K: int, E: int, D: int, F: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x, ids, scores, w13 and w2, the floating ones as leaves."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E, generator=rng)[:K] for _ in range(T)]).int() if T else torch.zeros(0, K).int()
    x, scores = torch.randn(T, D, generator=rng).bfloat16(), torch.rand(T, K, generator=rng)
    w13 = (torch.randn(E, 2 * F, D, generator=rng) / D**0.5).bfloat16()
    w2 = (torch.randn(E, D, F, generator=rng) / F**0.5).bfloat16()
    return x.requires_grad_(), ids, scores.requires_grad_(), w13.requires_grad_(), w2.requires_grad_()


def away(value: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of what is wanted."""
    return float((value.detach().double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-300))


def agree(value: Tensor, wanted: Tensor) -> None:
    """Compare a bfloat16 tensor with a float64 one that is rounded alike, a float32 one as it is."""
    rounded = wanted.to(value.dtype) if value.dtype == torch.bfloat16 else wanted
    assert away(value, rounded) <= CLOSE


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("T, K, E, D, F", [(1, 1, 1, 8, 8), (40, 2, 5, 64, 40), (33, 3, 4, 72, 136), (150, 2, 2, 64, 64)])
def test_output_and_gradients(T: int, K: int, E: int, D: int, F: int, limit: float | None) -> None:
    """One block, odd widths, several blocks of an expert; plain and clamped."""
    given, activation = made(T, K, E, D, F), SwiGLU(limit)
    out = routed_experts(*given, ExpertsConfig(activation))
    x, ids, scores, w13, w2 = given
    plain = x.detach(), ids, scores.detach(), w13.detach(), w2.detach()
    agree(out, reference(*plain, activation))
    grad = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).bfloat16()
    out.backward(grad)
    wanted = reference_backward(grad, *plain, activation)
    for leaf, gradient in ((x, wanted.x_TD), (scores, wanted.scores_TK), (w13, wanted.w13), (w2, wanted.w2)):
        assert leaf.grad is not None and gradient is not None
        agree(leaf.grad, gradient)


def test_the_reference_is_what_autograd_gives() -> None:
    """Its backward pass without rounding equals autograd's of its forward pass."""
    x, ids, scores, w13, w2 = (t.detach() for t in made(20, 2, 4, 16, 24))
    leaves = [t.double().requires_grad_() for t in (x, scores, w13, w2)]
    out = reference(leaves[0], ids, leaves[1], leaves[2], leaves[3], SwiGLU(0.7), exact)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, leaves, grad)
    found = reference_backward(grad, x, ids, scores, w13, w2, SwiGLU(0.7), exact)
    for gradient, right in zip((found.x_TD, found.scores_TK, found.w13, found.w2), wanted, strict=True):
        assert gradient is not None
        assert away(gradient, right) < 1e-14


def test_experts_without_rows_get_a_zero_gradient() -> None:
    """All tokens go to experts 0 and 2 of 4."""
    x, ids, scores, w13, w2 = made(10, 2, 4, 16, 24)
    ids = torch.tensor([[2, 0]] * 10, dtype=torch.int64)
    routed_experts(x, ids, scores, w13, w2).sum().backward()
    assert w13.grad is not None and w2.grad is not None
    for weight in (w13.grad, w2.grad):
        assert all(bool(weight[e].any()) == (e in (0, 2)) for e in range(4))


def test_no_tokens() -> None:
    """An empty batch has an empty output and gradients of zeros."""
    x, ids, scores, w13, w2 = made(0, 2, 4, 16, 24)
    out = routed_experts(x, ids, scores, w13, w2)
    out.sum().backward()
    assert out.shape == (0, 16)
    assert w13.grad is not None and not w13.grad.any()


def test_weight_gradients_added_in_place() -> None:
    """Float32 gradients grow by what a fresh call returns; autograd then sees none."""
    given = made(30, 2, 3, 32, 40)
    routed_experts(*given, ExpertsConfig(grad_dtype=torch.float32)).sum().backward()
    fresh = [given[3].grad, given[4].grad]
    again = made(30, 2, 3, 32, 40)
    totals = tuple(torch.ones_like(w, dtype=torch.float32) for w in again[3:])
    for _ in range(2):
        routed_experts(*again, weight_grads=(totals[0], totals[1])).sum().backward()
    assert again[3].grad is None and again[4].grad is None
    for total, once in zip(totals, fresh, strict=True):
        assert once is not None
        assert away(total - 1, 2 * once) < 5e-3  # `once` was rounded to the parameter's bfloat16


def test_bad_ids_and_full_experts_are_counted() -> None:
    """Routes of no expert and routes beyond the capacity add nothing, and the status names each kind."""
    x, ids, scores, w13, w2 = made(12, 2, 4, 16, 24)
    bad = ids.long()
    bad[3, 1], bad[5, 0], bad[7] = 4, 2**32 + 1, 2
    out, status = routed_experts(x, bad, scores, w13, w2, ExpertsConfig(capacity=20), return_status=True)
    assert status.tolist()[:4] == [2, 1, 2, 0]
    with pytest.raises(PmlkitError, match="2 expert ids lie outside 0 to 3"):
        check_status(status, 4)
    valid = torch.where((bad >= 0) & (bad < 4), bad, -1)
    order = valid.flatten().argsort(stable=True)
    late = [int(i) for i in order if valid.flatten()[i] >= 0][20:]
    valid.view(-1)[late] = -1
    agree(out, reference(x.detach(), valid, scores.detach(), w13.detach(), w2.detach()))


def test_numbers_that_are_not_finite_are_counted() -> None:
    """One NaN in a token is one token that is not finite."""
    x, ids, scores, w13, w2 = made(12, 2, 4, 16, 24)
    bad = x.detach().clone()
    bad[4, 3] = torch.nan
    out, status = routed_experts(bad, ids, scores, w13, w2, return_status=True)
    assert out.isnan().any(1).tolist() == [token == 4 for token in range(12)]
    with pytest.raises(PmlkitError, match="1 tokens came out as NaN or Inf"):
        check_status(status, 4)


def test_a_second_derivative_is_refused() -> None:
    """A gradient penalty must not lose its gradient silently."""
    given = made(4, 1, 2, 8, 8)
    out = routed_experts(*given)
    with pytest.raises(PmlkitError, match="differentiable once"):
        torch.autograd.grad(out.sum(), given[0], create_graph=True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scores": torch.zeros(4, 3)}, "need x"),
        ({"w2": torch.zeros(2, 8, 16).bfloat16()}, "need x"),
        ({"x": torch.zeros(4, 8)}, "take bfloat16"),
        ({"expert_ids": torch.zeros(4, 1)}, "int32 or int64"),
    ],
)
def test_what_does_not_fit(change: dict[str, Tensor], message: str) -> None:
    """One clear error for each kind of wrong argument."""
    given = dict(zip(("x", "expert_ids", "scores", "w13", "w2"), made(4, 1, 2, 8, 8), strict=True))
    x, ids, scores, w13, w2 = (given | change).values()
    with pytest.raises(PmlkitError, match=message):
        routed_experts(x, ids, scores, w13, w2)


def test_widths_that_cannot_be_described() -> None:
    """Widths that are no multiple of 16 bytes."""
    with pytest.raises(PmlkitError, match="D = 12 and F = 8 must be multiples of 8"):
        routed_experts(*made(4, 1, 2, 12, 8))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_layer_compiles_whole() -> None:
    """torch.compile(fullgraph=True) gives what eager mode gives, gradients too."""
    given = made(20, 2, 3, 16, 24)
    other = made(20, 2, 3, 16, 24)
    routed_experts(*given).sum().backward()
    compiled_layer = torch.compile(routed_experts, fullgraph=True, backend="aot_eager")
    compiled_layer(*other).sum().backward()
    for eager, compiled in zip(given, other, strict=True):
        if eager.requires_grad:
            assert eager.grad is not None and compiled.grad is not None
            assert torch.equal(eager.grad, compiled.grad)
