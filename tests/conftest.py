"""Kernels run in Triton's interpreter, so that a machine without a GPU checks their numbers. Set before any import of it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from tests.interpreter import mend

    mend()
    from pmlkit.losses import arrange, batch_hard_triplet

    # The interpreter takes as long as there are programs, whatever they do: fewer and larger ones where size is free.
    arrange._blocks = lambda rows: (64, 256)
    batch_hard_triplet._FEWEST = 16
