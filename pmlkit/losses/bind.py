"""From a case to something that can be timed and checked: seeded inputs, a bound subject, the float64 answer."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.losses.draw import draw
from pmlkit.precision import precision

Triplets = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The inputs of one loss case, on one device.

    emb_ND: leaf in the case's format. labels_N: int64. proxies_CD: leaf or None; float64 in an fp64 case, else float32.
    """

    emb_ND: Tensor
    labels_N: Tensor
    proxies_CD: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that get a gradient: the rows, then the proxies if there are any."""
        return (self.emb_ND,) if self.proxies_CD is None else (self.emb_ND, self.proxies_CD)


@dataclass(frozen=True, eq=False)
class Bound:
    """A subject bound to inputs.

    forward: one call is one forward pass and returns the scalar loss. leaves: what gets gradients, rows then proxies.
    mined: anchors, positives and negatives that the subject itself picks; None for a loss without mining.
    replay: runs the whole captured pair; then `forward` only returns its loss, and the phases cannot be run apart.
    exact: the float64 answer of a subject that is not the case's loss. scale: gradients are those of so many times the loss.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    mined: Callable[[], Triplets] | None = None
    replay: Callable[[], object] | None = None
    exact: Callable[[], tuple[Tensor, tuple[Tensor, ...]]] | None = None
    scale: float = 1.0

    def clear(self) -> None:
        """Drop the gradients, as an optimizer's `zero_grad(set_to_none=True)` does; a replay rewrites them in place."""
        if self.replay is None:
            for leaf in self.leaves:
                leaf.grad = None

    def poison(self) -> None:
        """Fill gradients, and a captured pair's loss, with NaN: a replay that writes nothing must not pass on old values."""
        for leaf in self.leaves:
            if leaf.grad is not None:
                leaf.grad.fill_(math.nan)
        if self.replay is not None:
            self.forward().detach().fill_(math.nan)

    def pair(self) -> Tensor:
        """Run one forward and backward pair from cleared gradients; return its loss."""
        self.clear()
        if self.replay is not None:
            self.replay()
            return self.forward()
        loss = self.forward()
        self.backward(loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss that `forward` returned."""
        loss.backward(None if self.scale == 1 else torch.full_like(loss, self.scale))


def with_loss_scale(bind: Callable[[Case, LossInputs], Bound]) -> Callable[[Case, LossInputs], Bound]:
    """Return `bind` with the loss scale of the case's precision; a captured pair keeps the one it was captured with."""

    def scaled(case: Case, inputs: LossInputs) -> Bound:
        bound = bind(case, inputs)
        return bound if bound.replay else replace(bound, scale=precision(case.precision).loss_scale)

    return scaled


def make_inputs(case: Case, device: str = "cpu") -> LossInputs:
    """Return the inputs of `case`, the same numbers on every device and, up to rounding, in every format.

    Shapes are those of `draw`. Raises PmlkitError for others and for block-scaled formats.
    """
    element = getattr(torch, precision(case.precision).element, None)
    if not isinstance(element, torch.dtype):
        raise PmlkitError(f"losses have no inputs in {case.precision!r}: use fp64, fp32, fp16 or bf16")
    emb_ND, labels_N, proxies_CD = draw(case.shape, torch.Generator().manual_seed(case.seed))
    if proxies_CD is not None:
        proxies_CD = _leaf(proxies_CD, torch.promote_types(element, torch.float32), device)
    return LossInputs(_leaf(emb_ND, element, device), labels_N.to(device), proxies_CD)


def bind_reference(case: Case, inputs: LossInputs) -> Bound:
    """Return pmlkit's plain-torch reference as a subject; case.options are its keywords. Raises PmlkitError."""
    module = _module(case.op)
    forward = partial(module.reference, *_arguments(inputs), **case.options)
    mine = getattr(module, "mine", None)
    return Bound(forward, inputs.leaves, mine and partial(mine, inputs.emb_ND, inputs.labels_N))


def captured(bound: Bound) -> Bound:
    """Return the pair of `bound` captured in one CUDA graph: a replay reads the inputs and rewrites all gradients.

    Raises RuntimeError where the pair cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd remembers the stream of its warm-up, so it is the capture's
        for _ in range(3):
            for leaf in bound.leaves:
                leaf.grad = None
            bound.backward(bound.forward())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    for leaf in bound.leaves:
        leaf.grad = None
    with torch.cuda.graph(graph, stream=stream):
        loss = bound.forward()
        bound.backward(loss)
    return replace(bound, forward=lambda: loss, replay=graph.replay)


def exact(case: Case, inputs: LossInputs, triplets: Triplets | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return loss and gradients in float64 of the same rounded inputs, by the reference.

    triplets: evaluate batch-hard at these instead of mining. Raises PmlkitError for an unknown op.
    """
    upcast = LossInputs(
        _leaf(inputs.emb_ND, torch.float64),
        inputs.labels_N,
        None if inputs.proxies_CD is None else _leaf(inputs.proxies_CD, torch.float64),
    )
    mined = {} if triplets is None else {"triplets": triplets}
    loss = _module(case.op).reference(*_arguments(upcast), **case.options, **mined)
    return loss.detach(), torch.autograd.grad(loss, upcast.leaves)


def _module(op: str) -> ModuleType:
    name = f"pmlkit.losses.{op}"
    module = import_module(name) if find_spec(name) else None
    if module is None or not hasattr(module, "reference"):
        raise PmlkitError(f"no reference of {op!r}: a loss is a file of its name in pmlkit/losses")
    return module


def _arguments(inputs: LossInputs) -> tuple[Tensor, ...]:
    return (inputs.emb_ND, inputs.labels_N, *inputs.leaves[1:])


def _leaf(values: Tensor, dtype: torch.dtype, device: str | None = None) -> Tensor:
    return values.detach().to(dtype=dtype, device=device, copy=True).requires_grad_()
