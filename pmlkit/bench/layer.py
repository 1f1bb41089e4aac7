"""The expert layer of one rank as something to time and check: seeded inputs, and subjects bound to them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.losses.bind import Bound, captured
from pmlkit.moe.both_ways import BothWays, both_ways
from pmlkit.moe.config import INTERPRETED, TRAINED, ExpertsConfig
from pmlkit.moe.experts import routed_experts
from pmlkit.moe.inference import prepared_experts
from pmlkit.moe.prepare import MATH, prepare_weights


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The inputs of one rank's layer. x [T, D] and weights [E, 2F, D], [E, D, F] are bf16, scores [T, K] float32.

    In training all four are leaves, and grad [T, D] is the gradient of the output.
    """

    x: Tensor
    ids: Tensor
    scores: Tensor
    w13: Tensor
    w2: Tensor
    grad: Tensor | None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that get a gradient: all in training, else none."""
        return () if self.grad is None else (self.x, self.scores, self.w13, self.w2)


@dataclass(frozen=True, eq=False)
class BoundLayer(Bound):
    """A layer bound to inputs.

    grad: of its output, None for inference. slack: how far from float64 it may be, over what its exact format is.
    eager: output and, in training, gradients of x and scores, of a pass before a capture. saved_bytes: what forward keeps.
    """

    grad: Tensor | None = None
    slack: float = 1.05
    eager: tuple[Tensor, ...] = ()
    saved_bytes: int | None = None

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of an output that `forward` returned; there is none in inference."""
        if self.grad is not None:
            loss.backward(self.grad)


def make_layer_inputs(case: Case, device: str = "cpu") -> LayerInputs:
    """Return the inputs of a case with shape T, D, E, K and F: normal x and weights, weights over the root of their width.

    Routes are spread over experts as evenly as can be, in a seeded order, as the published report's ranks spread theirs; a
    token's experts differ. The numbers are those of the device's own generator. Raises PmlkitError for sizes that are
    missing, and for K above E.
    """
    if missing := {"T", "D", "E", "K", "F"} - set(case.shape):
        raise PmlkitError(f"case {case.case_id} has no {', '.join(sorted(missing))}: a layer's shape is T, D, E, K and F")
    T, D, E, K, F = (case.shape[name] for name in ("T", "D", "E", "K", "F"))
    if K > E:
        raise PmlkitError(f"case {case.case_id} sends a token to K = {K} of E = {E} experts: use K up to E")
    training = case.mode == "training"
    source = torch.Generator(device).manual_seed(case.seed)

    def normal(*sizes: int) -> Tensor:
        return torch.empty(*sizes, device=device, dtype=torch.bfloat16).normal_(generator=source)

    order = torch.randperm(T, generator=source, device=device)[:, None] * K + torch.arange(K, device=device)
    ids = torch.randperm(E, generator=source, device=device)[order % E].int()
    inputs = LayerInputs(
        normal(T, D), ids, torch.rand(T, K, generator=source, device=device), normal(E, 2 * F, D).mul_(D**-0.5),
        normal(E, D, F).mul_(F**-0.5), normal(T, D) if training else None,
    )  # fmt: skip
    for leaf in inputs.leaves:
        leaf.requires_grad_()
    return inputs


def bind_standard(case: Case, inputs: LayerInputs) -> Bound:
    """Return pmlkit's bf16 layer. Raises NotImplementedError for another format, PmlkitError for what the layer refuses."""
    if case.precision != "bf16":
        raise NotImplementedError(f"the standard pipeline computes bf16, not {case.precision}")
    _need_kernels(inputs)
    return bound_layer(lambda: routed_experts(inputs.x, inputs.ids, inputs.scores, inputs.w13, inputs.w2), inputs)


def bind_staged(case: Case, inputs: LayerInputs) -> Bound:
    """Return pmlkit's block-scaled layer: for inference with weights prepared beforehand, in training made anew each time.

    Raises NotImplementedError for bf16, and for training in nvfp4.
    """
    if case.precision not in MATH or (case.mode == "training" and case.precision not in TRAINED):
        raise NotImplementedError(f"no staged pipeline for {case.mode} in {case.precision}")
    _need_kernels(inputs)
    if case.mode == "training":
        return _trained(inputs)
    weights = prepare_weights(inputs.w13, inputs.w2, case.precision)  # pyright: ignore[reportArgumentType]
    return bound_layer(lambda: prepared_experts(inputs.x, inputs.ids, inputs.scores, weights), inputs)


def bind_mega(case: Case, inputs: LayerInputs) -> Bound:
    """Return the mxfp8 layer for inference with both projections in one launch.

    Raises NotImplementedError for another format and for training.
    """
    if (case.precision, case.mode) != ("mxfp8", "inference"):
        raise NotImplementedError(f"the mega pipeline computes mxfp8 inference, not {case.mode} in {case.precision}")
    _need_kernels(inputs)
    weights, config = prepare_weights(inputs.w13, inputs.w2, "mxfp8"), ExpertsConfig(pipeline="mega")
    return bound_layer(lambda: prepared_experts(inputs.x, inputs.ids, inputs.scores, weights, config), inputs)


def bind_kept(case: Case, inputs: LayerInputs) -> Bound:
    """Return the mxfp8 layer in training with weights quantised beforehand: what a step costs where they did not change.

    Raises NotImplementedError for another format and for inference.
    """
    if (case.precision, case.mode) != ("mxfp8", "training"):
        raise NotImplementedError(f"weights are kept quantised in mxfp8 training only, not for {case.mode} in {case.precision}")
    _need_kernels(inputs)
    return _trained(inputs, (both_ways(inputs.w13.detach()), both_ways(inputs.w2.detach())))


def _trained(inputs: LayerInputs, quantised: tuple[BothWays, BothWays] | None = None) -> Bound:
    config, given = ExpertsConfig(format="mxfp8"), (inputs.x, inputs.ids, inputs.scores, inputs.w13, inputs.w2)
    return bound_layer(lambda: routed_experts(*given, config, quantised=quantised), inputs)


def bound_layer(forward: Callable[[], Tensor], inputs: LayerInputs, slack: float = 1.05) -> Bound:
    """Return a layer that computes like `forward`, captured in one graph on a CUDA device."""
    bound = BoundLayer(forward, inputs.leaves, grad=inputs.grad, slack=slack, saved_bytes=_saved_bytes(forward, inputs))
    if not inputs.x.is_cuda:
        return bound
    out = bound.pair().detach().clone()
    small = inputs.leaves[:2]  # x and scores: weights' gradients are too large to keep twice
    eager = (out, *(leaf.grad.clone() for leaf in small if leaf.grad is not None))
    return replace(captured(bound), eager=eager)  # pyright: ignore[reportCallIssue]


def _need_kernels(inputs: LayerInputs) -> None:
    """Raise NotImplementedError on a processor: the plain reference's time must not be taken for the kernels'."""
    if not (inputs.x.is_cuda or INTERPRETED):
        raise NotImplementedError(f"no kernels of the layer on {inputs.x.device.type}: they need a CUDA device")


def _saved_bytes(forward: Callable[[], Tensor], inputs: LayerInputs) -> int | None:
    """Return the bytes that autograd keeps between forward and backward, beside the inputs; None in inference."""
    if inputs.grad is None:
        return None
    given = {tensor.untyped_storage().data_ptr() for tensor in (*inputs.leaves, inputs.ids)}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(kept.values())
