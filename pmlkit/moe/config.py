"""How a layer is computed."""

import os
from dataclasses import dataclass, field
from typing import Literal

import torch

from pmlkit.errors import PmlkitError, nearest
from pmlkit.moe.swiglu import SwiGLU

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then the kernels run on tensors of a processor, for tests
PIPELINES = ("staged", "mega")  # of prepared weights
TRAINED = ("bf16", "mxfp8")  # formats that a layer with gradients computes in


@dataclass(frozen=True)
class ExpertsConfig:
    """How a layer is computed.

    activation: plain SwiGLU, or clamped. capacity: rows there is room for, None for all T·K; later routes are dropped and
    counted. grad_dtype: of the weights' gradients, bfloat16 or float32. format: of the operands of every product, in forward
    and backward; x, weights and results are bfloat16 in both. promote: whether a tensor core's fp8 sum, of about 14 digits,
    is added to a float32 one after every 128 products instead of once. pipeline: of prepared mxfp8 weights, launches in stages
    or both projections in one.
    Raises PmlkitError for a value that no layer can have.
    """

    activation: SwiGLU = field(default_factory=SwiGLU)
    capacity: int | None = None
    grad_dtype: torch.dtype = torch.bfloat16
    format: Literal["bf16", "mxfp8"] = "bf16"
    promote: bool = False
    pipeline: Literal["staged", "mega"] = "staged"

    def __post_init__(self) -> None:
        if self.grad_dtype not in (torch.bfloat16, torch.float32):
            raise PmlkitError(f"ExpertsConfig grad_dtype={self.grad_dtype}: use torch.bfloat16 or torch.float32")
        if self.capacity is not None and self.capacity < 0:
            raise PmlkitError(f"ExpertsConfig capacity={self.capacity}: rows there is room for, 0 or more; None for all")
        if self.format not in TRAINED:
            known = nearest(self.format, list(TRAINED))
            raise PmlkitError(f"ExpertsConfig format={self.format!r}: {known}; nvfp4 is for inference, see prepared_experts")

        if self.pipeline not in PIPELINES:
            raise PmlkitError(f"ExpertsConfig pipeline={self.pipeline!r}: {nearest(self.pipeline, list(PIPELINES))}")

    @property
    def numbers(self) -> tuple[float, float, int]:
        """Limit, alpha and capacity as the operators take them: 0 is no limit, -1 no bound."""
        return self.activation.limit or 0.0, self.activation.alpha, -1 if self.capacity is None else self.capacity
