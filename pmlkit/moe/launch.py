"""How the layer's kernels are started."""

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> None:
    """Start a kernel on the current stream: tensors and numbers, then constants, in the order of its parameters.

    Nothing is started for an empty grid.
    """
    if 0 not in grid:
        kernel[grid](*arguments, **options)


def processors(like: Tensor) -> int:
    """Return how many persistent programs to start: one a multiprocessor of the tensor's device."""
    return torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 2
