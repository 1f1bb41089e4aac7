"""From torch tensors to fused kernels and back: what all four losses share on the host.

A loss brings `Kernels`; this file checks the arguments, chooses between kernels and reference, and ties forward and
backward together, for autograd in eager mode and as registered operators under `torch.compile`.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then the kernels run on tensors of a processor, for tests
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_WIDTH, _MOST_ROWS = 1024, 2**20


@dataclass(frozen=True)
class Buffers:
    """What a call keeps between forward and backward: float32 statistics, and words of 8 bytes for sums and counters."""

    stats: int
    work: int


@dataclass(frozen=True)
class Side:
    """Rows on one side of the matrix of pairs: emb [count, width], labels [count] int64, stats float32."""

    emb: Tensor
    labels: Tensor
    stats: Tensor

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.emb.shape[0]

    @property
    def width(self) -> int:
        """Width of a row."""
        return self.emb.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the rows."""
        return self.emb.dtype

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three pointers, in the order in which kernels take them."""
        return self.emb, self.labels, self.stats


@dataclass(frozen=True)
class Batch:
    """One call. others: the reference rows, or the rows themselves. work: float64 words, kept until the backward pass."""

    rows: Side
    others: Side
    work: Tensor
    settings: list[float]

    @property
    def self_mode(self) -> bool:
        """Whether the rows are compared with themselves."""
        return self.others is self.rows


@dataclass(frozen=True)
class Kernels:
    """A fused loss.

    buffers: (rows N, others M, width D, dtype, reference set?) -> Buffers, M = N without a reference set; the statistics
    of the others follow those of the rows, as many a row. forward: fills loss, statistics and work. backward: (batch,
    gradient of the loss, side, other side) -> gradient of the side's rows. mixed: takes half-precision rows with float32
    others as they are; otherwise rows of two types are computed in float32.
    """

    buffers: Callable[[int, int, int, torch.dtype, bool], Buffers]
    forward: Callable[[Batch, Tensor], None]
    backward: Callable[[Batch, Tensor, Side, Side], Tensor]
    mixed: bool = False


_KERNELS: dict[str, Kernels] = {}


def register(name: str, kernels: Kernels) -> None:
    """Make a loss's kernels known under a name, which registered operators carry instead of code."""
    _KERNELS[name] = kernels


def kernels(name: str) -> Kernels:
    """Return a loss's kernels."""
    return _KERNELS[name]


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
    name: str, emb_ND: Tensor, labels_N: Tensor, ref_emb_MD: Tensor | None, ref_labels_M: Tensor | None, settings: list[float]
) -> Tensor:
    """Return the loss by its kernels; differentiable once in the rows and the reference rows.

    labels are int64 and lie on the device of the rows.
    """
    emb_ND = emb_ND.contiguous()
    if ref_emb_MD is not None:
        mixed = _KERNELS[name].mixed and ref_emb_MD.dtype == torch.float32
        if ref_emb_MD.dtype != emb_ND.dtype and not mixed:
            emb_ND, ref_emb_MD = emb_ND.float(), ref_emb_MD.float()
        ref_emb_MD = ref_emb_MD.contiguous()
    if torch.compiler.is_compiling():
        return torch.ops.pmlkit.fused_loss(name, emb_ND, labels_N, ref_emb_MD, ref_labels_M, settings)[0]
    return _Fused.apply(name, emb_ND, labels_N, ref_emb_MD, ref_labels_M, settings)  # pyright: ignore[reportReturnType]


class _Fused(torch.autograd.Function):
    """The eager path: without the dispatcher's 30 microseconds a call of a registered operator."""

    @staticmethod
    def forward(ctx: Any, name: str, emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None, settings: Any):
        loss, stats, work = _forward(name, emb, labels, ref, ref_labels, settings)
        ctx.save_for_backward(emb, labels, ref, ref_labels, stats, work)
        ctx.name, ctx.settings = name, settings
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        if torch.is_grad_enabled():
            raise PmlkitError(f"the fused {ctx.name} loss is differentiable once: drop create_graph=True, or use `reference`")
        kernels, batch = _KERNELS[ctx.name], _batch(*ctx.saved_tensors, settings=ctx.settings)
        one, other = batch.rows, batch.others
        grad_emb = kernels.backward(batch, grads[0], one, other) if ctx.needs_input_grad[1] else None
        grad_ref = kernels.backward(batch, grads[0], other, one) if ctx.needs_input_grad[3] else None
        return None, grad_emb, None, grad_ref, None, None


def _forward(
    name: str, emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None, settings: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    loss, stats, work = _allocate(name, emb, ref)
    with _device_of(emb):
        _KERNELS[name].forward(_batch(emb, labels, ref, ref_labels, stats, work, settings), loss)
    return loss, stats, work


def _device_of(emb: Tensor) -> AbstractContextManager[Any]:
    """Make the rows' device the current one, which is where Triton launches; nothing where it is."""
    elsewhere = emb.is_cuda and emb.device.index != torch.cuda.current_device()
    return torch.cuda.device(emb.device) if elsewhere else nullcontext()


def _batch(
    emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None, stats: Tensor, work: Tensor,
    settings: list[float],
) -> Batch:  # fmt: skip
    if ref is None:
        rows = Side(emb, labels, stats)
        return Batch(rows, rows, work, settings)
    each = stats.numel() // (len(emb) + len(ref))
    labels_of_ref = labels if ref_labels is None else ref_labels
    return Batch(Side(emb, labels, stats), Side(ref, labels_of_ref, stats[each * len(emb) :]), work, settings)


def _allocate(name: str, emb: Tensor, ref: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    others = emb if ref is None else ref
    size = _KERNELS[name].buffers(emb.shape[0], others.shape[0], emb.shape[1], emb.dtype, ref is not None)
    device = emb.device
    loss = torch.empty((), dtype=torch.float32, device=device)
    stats = torch.empty(size.stats, dtype=torch.float32, device=device)
    return loss, stats, torch.empty(size.work, dtype=torch.float64, device=device)


@torch.library.custom_op("pmlkit::fused_loss", mutates_args=())
def _op(
    name: str, emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None, settings: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(name, emb, labels, ref, ref_labels, settings)


@_op.register_fake
def _(name, emb, labels, ref, ref_labels, settings):
    return _allocate(name, emb, ref)


@torch.library.custom_op("pmlkit::fused_loss_backward", mutates_args=())
def _op_backward(
    name: str, grad: Tensor, emb: Tensor, labels: Tensor, ref: Tensor | None, ref_labels: Tensor | None,
    stats: Tensor, work: Tensor, settings: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    work = work.clone()  # its counters move, and an operator must not change what it is given
    kernels, batch = _KERNELS[name], _batch(emb, labels, ref, ref_labels, stats, work, settings)
    with _device_of(emb):  # in eager mode autograd itself sets the device of a backward pass
        grad_emb = kernels.backward(batch, grad, batch.rows, batch.others)
        grad_ref = emb.new_empty(0) if ref is None else kernels.backward(batch, grad, batch.others, batch.rows)
    return grad_emb, grad_ref


@_op_backward.register_fake
def _(name, grad, emb, labels, ref, ref_labels, stats, work, settings):
    return torch.empty_like(emb), emb.new_empty(0) if ref is None else torch.empty_like(ref)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    name, emb, labels, ref, ref_labels, settings = inputs
    _, stats, work = output
    ctx.save_for_backward(emb, labels, ref, ref_labels, stats, work)
    ctx.name, ctx.settings = name, settings


def _backward(ctx: Any, *grads: Tensor):
    emb, labels, ref, ref_labels, stats, work = ctx.saved_tensors
    given = (emb, labels, ref, ref_labels, stats, work, ctx.settings)
    grad_emb, grad_ref = torch.ops.pmlkit.fused_loss_backward(ctx.name, grads[0], *given)
    return None, grad_emb, None, None if ref is None else grad_ref, None, None


_op.register_autograd(_backward, setup_context=_keep)
