"""The expert layer of one rank as its users call it: checks and autograd. Nothing waits for the device."""

from typing import Any

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.moe.both_ways import BothWays
from pmlkit.moe.config import INTERPRETED, ExpertsConfig
from pmlkit.moe.operators import experts, experts_backward
from pmlkit.moe.reference import exact, reference
from pmlkit.moe.routing import STATUS_WORDS
from pmlkit.moe.trained_experts import trained_experts

_ALIGNED = 8  # values of 16 bytes: the least that a tensor-memory-access descriptor steps by
_BLOCK = 32  # values that share a scale


_PLAIN = ExpertsConfig()  # made here, since `torch.compile` does not follow the making of one


def routed_experts(
    x: Tensor, expert_ids: Tensor, scores: Tensor, w13: Tensor, w2: Tensor, config: ExpertsConfig | None = None,
    *, weight_grads: tuple[Tensor, Tensor] | None = None, quantised: tuple[BothWays, BothWays] | None = None,
    return_status: bool = False,
) -> Any:  # fmt: skip
    """Return the layer's output [T, D] in bfloat16; with `return_status` also the status word, see `check_status`.

    x: [T, D] bfloat16. expert_ids: [T, K] int32 or int64. scores: [T, K], any float type, used in float32. w13: [E, 2F, D]
    bfloat16, gate rows first. w2: [E, D, F] bfloat16. D and F are multiples of 8. Differentiable once in x, scores, w13, w2.
    weight_grads: gradients of w13 and w2, bfloat16 or float32, that backward adds to in place instead of returning some.
    quantised: in mxfp8, what `both_ways` made of w13 and w2, where they did not change since; else that is done on the way.
    A route whose id is no expert of 0 to E - 1, or that finds no room, adds nothing and is counted in the status word.
    Rows of a processor go to the plain reference in float64. Raises PmlkitError for shapes or types that do not fit.
    """
    config = config or _PLAIN
    _check(x, expert_ids, scores, w13, w2, _BLOCK if config.format == "mxfp8" else _ALIGNED)
    scores = scores.float().contiguous()
    if not (x.is_cuda or INTERPRETED):
        status = torch.zeros(STATUS_WORDS, dtype=torch.int32)
        out = reference(x, expert_ids, scores, w13, w2, config.activation, rounded=exact).to(x.dtype)
        return (out, status) if return_status else out
    into = weight_grads or (None, None)
    for name, gradient, weight in zip(("w13", "w2"), into, (w13, w2), strict=True):
        if gradient is not None and (gradient.shape != weight.shape or not gradient.is_contiguous()):
            raise PmlkitError(f"weight_grads of {name}: need a contiguous {tuple(weight.shape)}, got {tuple(gradient.shape)}")
    given = (x.contiguous(), expert_ids.contiguous(), scores, w13.contiguous(), w2.contiguous())
    if config.format == "mxfp8":
        out, status = trained_experts(config, into, quantised, *given)
    else:
        out, status = _Experts.apply(config, into, *given)  # pyright: ignore[reportGeneralTypeIssues]
    return (out, status) if return_status else out


def check_routes(place: str, x: Tensor, ids: Tensor, scores: Tensor) -> None:
    """Raise PmlkitError unless x is [T, D], with ids and scores [T, K] of its tokens, K at least 1."""
    if (x.ndim, ids.ndim) != (2, 2) or scores.shape != ids.shape or len(ids) != len(x) or 0 in (x.shape[1], ids.shape[1]):
        got = f"x {tuple(x.shape)}, expert_ids {tuple(ids.shape)}, scores {tuple(scores.shape)}"
        raise PmlkitError(f"{place}: need x [T, D], expert_ids and scores [T, K], D and K at least 1; got {got}")


def _check(x: Tensor, ids: Tensor, scores: Tensor, w13: Tensor, w2: Tensor, step: int) -> None:
    """Raise PmlkitError for what does not fit together."""
    check_routes("routed_experts", x, ids, scores)
    if (w13.ndim, w2.ndim) != (3, 3) or w13.shape != (w2.shape[0], 2 * w2.shape[2], w2.shape[1]) or w2.shape[1] != x.shape[1]:
        got = f"x {tuple(x.shape)}, w13 {tuple(w13.shape)}, w2 {tuple(w2.shape)}"
        raise PmlkitError(f"routed_experts: need x [T, D], w13 [E, 2F, D], w2 [E, D, F]; got {got}")
    if 0 in w13.shape:
        raise PmlkitError(f"routed_experts: experts and width must be at least 1; got w13 {tuple(w13.shape)}")
    given = {"x": x, "expert_ids": ids, "scores": scores, "w13": w13, "w2": w2}
    devices = {tensor.device for tensor in given.values()}
    if len(devices) > 1:
        raise PmlkitError(f"routed_experts: tensors on {', '.join(sorted(map(str, devices)))}: move all to one device")
    if x.is_cuda or INTERPRETED:
        other = {name: given[name].dtype for name in ("x", "w13", "w2") if given[name].dtype != torch.bfloat16}
        if other:
            raise PmlkitError(f"routed_experts: kernels take bfloat16, got {other}: convert, or use pmlkit.moe.reference")
        D, F = w2.shape[1:]
        if D % step or F % step:
            raise PmlkitError(f"routed_experts: D = {D} and F = {F} must be multiples of {step}: pad with zeros")


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, config: ExpertsConfig, into: tuple[Tensor | None, Tensor | None], *given: Tensor):
        x, ids, scores, w13, w2 = given
        keep = any(ctx.needs_input_grad)
        out, status, saved = experts(x, ids, scores, w13, w2, *config.numbers, keep)
        ctx.mark_non_differentiable(status)
        ctx.save_for_backward(scores, w13, w2, *saved)
        ctx.config, ctx.into = config, into
        return out, status

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        if torch.is_grad_enabled():
            raise PmlkitError("routed_experts is differentiable once: drop create_graph=True, or use pmlkit.moe.reference")
        scores, w13, w2, *saved = ctx.saved_tensors
        _, _, rows, _, _, *of_weights = ctx.needs_input_grad
        weights, inside = any(of_weights), ctx.into[0] is not None
        dx, dscores, dw13, dw2 = experts_backward(
            grads[0].contiguous(), scores, w13, w2, saved, *ctx.config.numbers[:2], rows, weights,
            ctx.config.grad_dtype, *ctx.into,
        )  # fmt: skip
        given = weights and not inside
        return None, None, dx if rows else None, None, dscores, dw13 if given else None, dw2 if given else None
