"""From torch tensors to fused kernels and back: what all four losses share on the host.

A loss registers how it plans its launches; this file chooses between kernels and reference, keeps the plans, and ties
forward and backward together, for autograd in eager mode and as registered operators under `torch.compile`.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.losses.arrange import in_label_order
from pmlkit.losses.launch import Plan
from pmlkit.losses.tiling import Shape

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then the kernels run on tensors of a processor, for tests
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_WIDTH, _MOST_ROWS = 1024, 2**20


@dataclass(frozen=True)
class Kernels:
    """A fused loss. mixed: takes half-precision rows with float32 others as they are; else two types meet in float32."""

    plan: Callable[[Shape], Plan]
    mixed: bool = False


_KERNELS: dict[str, Kernels] = {}


def register(name: str, plan: Callable[[Shape], Plan], *, mixed: bool = False) -> None:
    """Make a loss's kernels known under a name, which registered operators carry instead of code."""
    _KERNELS[name] = Kernels(plan, mixed)


def plan_of(name: str, shape: Shape) -> Plan:
    """Return the launches of a loss for a shape, made anew."""
    return _KERNELS[name].plan(shape)


def fusable(emb_ND: Tensor, ref_emb_MD: Tensor | None = None) -> bool:
    """Return whether the kernels take these rows; others, such as float64 or rows of a processor, go to the reference.

    Raises PmlkitError for rows on two devices.
    """
    if ref_emb_MD is not None and ref_emb_MD.device != emb_ND.device:
        raise PmlkitError(f"ref_emb is on {ref_emb_MD.device}, embeddings on {emb_ND.device}: move one to the other")
    rows = [emb_ND] if ref_emb_MD is None else [emb_ND, ref_emb_MD]
    small = all(0 < r.shape[1] <= _MOST_WIDTH and 0 < len(r) <= _MOST_ROWS for r in rows)
    return small and all(r.dtype in _DTYPES and (r.is_cuda or INTERPRETED) for r in rows)


def fused_loss(
    name: str, settings: tuple[float, ...], tf32: bool,
    emb_ND: Tensor, labels_N: Tensor, ref_emb_MD: Tensor | None = None, ref_labels_M: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the loss by its kernels; differentiable once in the rows and the reference rows.

    labels are int64, contiguous, and lie on the device of the rows.
    """
    emb_ND = emb_ND.contiguous()
    if ref_emb_MD is not None:
        mixed = _KERNELS[name].mixed and ref_emb_MD.dtype == torch.float32
        if ref_emb_MD.dtype != emb_ND.dtype and not mixed:
            emb_ND, ref_emb_MD = emb_ND.float(), ref_emb_MD.float()
        ref_emb_MD = ref_emb_MD.contiguous()
    given = (emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    if torch.compiler.is_compiling():
        return torch.ops.pmlkit.fused_loss(name, list(settings), tf32, *given)[0]
    plan = _plan(name, settings, tf32, *given)
    if _aligned(*given):
        if len(_SEEN) >= _MOST_PLANS:
            _SEEN.clear()
        _SEEN[_look(name, settings, tf32, *given)] = plan
    return _Fused.apply(plan, *given)  # pyright: ignore[reportReturnType]


_MOST_PLANS = 1024
_SEEN: dict[tuple[Any, ...], Plan] = {}  # what tensors that passed every check looked like


def fused_again(
    name: str, settings: tuple[float, ...], tf32: bool,
    emb: Tensor, labels: Tensor, ref: Tensor | None = None, ref_labels: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Return the loss of tensors that look as those of an earlier call did, else None.

    Checks, conversions and plan then take 1 microsecond instead of 9, of the 30 that a pair takes without any.
    """
    if torch.compiler.is_compiling():
        return None
    plan = _SEEN.get(_look(name, settings, tf32, emb, labels, ref, ref_labels))
    if plan is None or not _aligned(emb, labels, ref, ref_labels):
        return None
    return _Fused.apply(plan, emb, labels, ref, ref_labels)  # pyright: ignore[reportReturnType]


def _look(
    name: str, settings: tuple[float, ...], tf32: bool,
    emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return everything that decides on checks, conversions and plan, but where the tensors lie in memory."""
    look = (name, settings, tf32, emb.shape, emb.dtype, emb.device, labels.shape, labels.dtype, labels.device)
    for more in (ref, ref_labels):
        if more is not None:
            look = (*look, more.shape, more.dtype, more.device)
    return look


def _aligned(emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None) -> bool:
    """Return whether all tensors lie without gaps from addresses on that Triton may load 16 bytes from at once."""
    places, dense = emb.data_ptr() | labels.data_ptr(), emb.is_contiguous() and labels.is_contiguous()
    for more in (ref, ref_labels):
        if more is not None:
            places, dense = places | more.data_ptr(), dense and more.is_contiguous()
    return dense and places % 16 == 0


class _Fused(torch.autograd.Function):
    """The eager path: without the dispatcher's 30 microseconds a call of a registered operator."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None):
        loss, room = _forward(plan, emb, labels, ref, ref_labels)
        ctx.save_for_backward(emb, ref, room)
        ctx.plan = plan
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        if torch.is_grad_enabled():
            raise PmlkitError("a fused loss is differentiable once: drop create_graph=True, or use the `reference` of its file")
        emb, ref, room = ctx.saved_tensors
        _, to_rows, _, to_others, _ = ctx.needs_input_grad
        return None, *_backward(ctx.plan, grads[0], emb, emb if ref is None else ref, room, to_rows, to_others)


def _forward(plan: Plan, emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the loss, and the room that the backward pass takes."""
    others, other_labels = (emb, labels) if ref is None else (ref, labels if ref_labels is None else ref_labels)
    with _device_of(emb):
        if plan.sort:  # before the room is there, since a sort needs as much again
            labels, other_labels = in_label_order(labels), None if ref is None else in_label_order(other_labels)
            other_labels = labels if other_labels is None else other_labels
        loss, room = _allocate(plan, emb)
        for launch in plan.forward:
            launch(emb, labels, others, other_labels, room, loss)
    return loss, room


def _backward(
    plan: Plan, grad: Tensor, emb: Tensor, others: Tensor, room: Tensor, to_rows: bool, to_others: bool
) -> tuple[Tensor | None, None, Tensor | None, None]:
    """Return the gradients of the rows and of the others, those that are wanted, each before a None for its labels."""
    grad_emb = torch.empty_like(emb) if to_rows else None
    grad_others = torch.empty_like(others) if to_others else None
    if to_rows or to_others:
        launch = plan.backward[to_others * (1 + to_rows)]
        results = [grad for grad in (grad_emb, grad_others) if grad is not None]
        launch(grad, emb, others, room, results[0], results[-1])
    return grad_emb, None, grad_others, None


def _allocate(plan: Plan, emb: Tensor) -> tuple[Tensor, Tensor]:
    return emb.new_empty((), dtype=torch.float32), emb.new_empty(plan.room, dtype=torch.float64)


_NOWHERE = nullcontext()


def _device_of(emb: Tensor) -> AbstractContextManager[Any]:
    """Make the rows' device the current one, which is where Triton launches; nothing where it is."""
    elsewhere = emb.is_cuda and emb.get_device() != torch.cuda.current_device()
    return torch.cuda.device(emb.device) if elsewhere else _NOWHERE


def _plan(
    name: str, settings: tuple[float, ...], tf32: bool,
    emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None,
) -> Plan:  # fmt: skip
    """Return the plan for these tensors. It starts kernels directly only where all pointers are aligned."""
    size, dtype = (None, None) if ref is None else (ref.shape, ref.dtype)
    aligned = _aligned(emb, labels, ref, ref_labels)
    return _planned(name, settings, tf32, emb.get_device(), aligned, emb.shape, emb.dtype, size, dtype)


@lru_cache(maxsize=_MOST_PLANS)
def _planned(
    name: str, settings: tuple[float, ...], tf32: bool, device: int, aligned: bool,
    size: torch.Size, dtype: torch.dtype, ref_size: torch.Size | None, ref_dtype: torch.dtype | None,
) -> Plan:  # fmt: skip
    others = size if ref_size is None else ref_size
    shape = Shape(size[0], others[0], size[1], dtype, ref_dtype or dtype, ref_size is not None, settings, tf32)
    plan = plan_of(name, shape)
    for launch in (*plan.forward, *plan.backward):
        launch.direct = aligned
    return plan


@torch.library.custom_op("pmlkit::fused_loss", mutates_args=())
def _op(
    name: str, settings: list[float], tf32: bool,
    emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward(_plan(name, tuple(settings), tf32, emb, labels, ref, ref_labels), emb, labels, ref, ref_labels)


@_op.register_fake
def _(name, settings, tf32, emb, labels, ref, ref_labels):
    ref_size, ref_dtype = (None, None) if ref is None else (_size(ref), ref.dtype)
    return _allocate(_planned(name, tuple(settings), tf32, -2, False, _size(emb), emb.dtype, ref_size, ref_dtype), emb)


def _size(rows: Tensor) -> torch.Size:
    """Return sizes as plain numbers: symbolic ones are fixed, since a plan is made for one size."""
    return torch.Size(int(size) for size in rows.shape)


@torch.library.custom_op("pmlkit::fused_loss_backward", mutates_args=())
def _op_backward(
    name: str, settings: list[float], tf32: bool, grad: Tensor,
    emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None, room: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    plan = _plan(name, tuple(settings), tf32, emb, labels, ref, ref_labels)
    room = room.clone()  # its counters move, and an operator must not change what it is given
    with _device_of(emb):  # in eager mode autograd itself sets the device of a backward pass
        grad_emb, _, grad_others, _ = _backward(plan, grad, emb, emb if ref is None else ref, room, True, ref is not None)
    assert grad_emb is not None
    return grad_emb, emb.new_empty(0) if grad_others is None else grad_others


@_op_backward.register_fake
def _(name, settings, tf32, grad, emb, labels, ref, ref_labels, room):
    return torch.empty_like(emb), emb.new_empty(0) if ref is None else torch.empty_like(ref)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    name, settings, tf32, emb, labels, ref, ref_labels = inputs
    ctx.save_for_backward(emb, labels, ref, ref_labels, output[1])
    ctx.plain = name, settings, tf32


def _backward_of_op(ctx: Any, *grads: Tensor):
    grad_emb, grad_ref = torch.ops.pmlkit.fused_loss_backward(*ctx.plain, grads[0], *ctx.saved_tensors)
    return None, None, None, grad_emb, None, None if ctx.saved_tensors[2] is None else grad_ref, None


_op.register_autograd(_backward_of_op, setup_context=_keep)
