"""The activation between the two projections, in float32: SwiGLU, plain or clamped, and its derivative.

Plain: silu(gate)·up. Clamped, with a limit L: min(g, L)·sigmoid(alpha·min(g, L))·(clamp(u, -L, L) + 1), as gpt-oss has it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.errors import PmlkitError


@dataclass(frozen=True)
class SwiGLU:
    """Which activation. limit: None for the plain form, else where gate and up are clamped; alpha: inside the sigmoid then.

    Raises PmlkitError for a limit that is not positive.
    """

    limit: float | None = None
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit <= 0:
            raise PmlkitError(f"SwiGLU limit={self.limit!r}: clamps gate and up, so it must be positive; None does not clamp")

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation in the type given."""
        if self.limit is None:
            return gate * torch.sigmoid(gate) * up
        low = gate.clamp(max=self.limit)
        return low * torch.sigmoid(self.alpha * low) * (up.clamp(-self.limit, self.limit) + 1)

    @property
    def numbers(self) -> tuple[float, float]:
        """Alpha and limit as the kernels take them; a limit of 0 is the plain form."""
        return (1.0, 0.0) if self.limit is None else (float(self.alpha), float(self.limit))


@triton.jit
def swiglu(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """Return the activation of float32 tiles."""
    if CLAMPED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        return gate * up / (1.0 + tl.exp(-alpha * gate))
    else:
        return gate * up / (1.0 + tl.exp(-gate))


@triton.jit
def swiglu_backward(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """Return the activation and its derivatives by gate and by up. At the limit itself the derivative is 1."""
    if CLAMPED:
        by_gate, by_up = gate <= limit, tl.abs(up) <= limit
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        sigmoid = 1.0 / (1.0 + tl.exp(-alpha * gate))
        silu = gate * sigmoid
        slope = sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid))
        return silu * up, tl.where(by_gate, up * slope, 0.0), tl.where(by_up, silu, 0.0)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        return silu * up, up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), silu
