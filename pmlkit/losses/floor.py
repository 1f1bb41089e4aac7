"""What eager losses are judged by: an autograd function of one ordinary Triton launch each way, and `backward()`.

Not a loss: its value is the first number of the rows. It says how much of a small batch's time belongs to torch and to
Triton's launcher, whatever a kernel does.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.case import Case
from pmlkit.losses.bind import Bound, LossInputs


@triton.jit
def _first_kernel(rows_ptr, loss_ptr):
    tl.store(loss_ptr, tl.load(rows_ptr).to(tl.float32))


@triton.jit
def _gradient_kernel(grad_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.where(at == 0, tl.load(grad_ptr), 0.0)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < count)


class _First(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor):
        loss = torch.empty((), dtype=torch.float32, device=rows.device)
        _first_kernel[(1,)](rows, loss)
        ctx.save_for_backward(rows)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        (rows,) = ctx.saved_tensors
        out = torch.empty_like(rows)
        _gradient_kernel[(triton.cdiv(out.numel(), 1024),)](grads[0], out, out.numel(), BLOCK=1024)  # pyright: ignore[reportArgumentType]
        return out


def bind_floor(case: Case, inputs: LossInputs) -> Bound:
    """Return the floor of `case`: the first number of its rows as the loss, with its own exact answer."""
    rows_ND = inputs.emb_ND

    def exact() -> tuple[Tensor, tuple[Tensor, ...]]:
        gradient = torch.zeros_like(rows_ND, dtype=torch.float64)
        gradient[0, 0] = 1
        return rows_ND.detach()[0, 0].double(), (gradient,)

    return Bound(lambda: _First.apply(rows_ND), (rows_ND,), exact=exact)  # pyright: ignore[reportArgumentType]
