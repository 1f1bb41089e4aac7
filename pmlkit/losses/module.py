"""What a user calls: the arguments of pytorch-metric-learning, checked, and what the fused kernels leave to it."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.losses.fused import fusable, fused_again, fused_loss


class FusedLoss(torch.nn.Module):
    """Base of the four losses: `loss(embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None)`.

    name: of the kernels. equivalent: what to use in pytorch-metric-learning for everything that they do not cover.
    settings: numbers that the kernels take. tf32: let float32 rows be multiplied in TF32 (gradient error 1e-3 instead of
    1e-6) for speed. unsupported: further constructor arguments, of which none may be set.
    """

    def __init__(self, name: str, equivalent: str, settings: dict[str, float], tf32: bool, unsupported: dict[str, Any]) -> None:
        super().__init__()
        for option, value in unsupported.items():
            if value is not None:
                raise PmlkitError(
                    f"{option}={value!r} is not fused: use pytorch_metric_learning.{equivalent}(..., {option}=...)"
                )
        self.name, self.equivalent, self.settings, self.tf32 = name, equivalent, settings, tf32

    def extra_repr(self) -> str:
        """Return the settings as the constructor takes them."""
        return ", ".join(f"{key}={value}" for key, value in (self.settings | {"tf32": self.tf32}).items())

    def refuse_tuple(self, indices_tuple: Any) -> None:
        """Raise PmlkitError for explicit pairs or triplets."""
        if indices_tuple is not None:
            raise PmlkitError(
                f"indices_tuple is not fused, since all pairs of a batch are: use pytorch_metric_learning.{self.equivalent}"
            )

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the loss: by the kernels where they take the rows, else by the plain reference."""
        self.refuse_tuple(indices_tuple)
        return evaluate(self.name, self.settings, self.tf32, embeddings, labels, ref_emb, ref_labels)


def evaluate(
    name: str, settings: dict[str, float], tf32: bool,
    emb_ND: Tensor, labels_N: Tensor, ref_emb_MD: Tensor | None, ref_labels_M: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return a pairwise loss: by the kernels where they take the rows, else by the plain reference."""
    numbers = tuple(settings.values())
    loss = fused_again(name, numbers, tf32, emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    if loss is not None:
        return loss
    labels, ref_labels = check_rows(emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    if fusable(emb_ND, ref_emb_MD):
        return fused_loss(name, numbers, tf32, emb_ND, labels, ref_emb_MD, ref_labels)
    reference: Callable[..., Tensor] = import_module(f"pmlkit.losses.{name}").reference
    return reference(emb_ND, labels, ref_emb_MD=ref_emb_MD, ref_labels_M=ref_labels, **settings)


def check_rows(
    emb_ND: Tensor, labels_N: Tensor, ref_emb_MD: Tensor | None, ref_labels_M: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the labels as int64 on the device of the rows. Raises PmlkitError for anything that is not a batch of rows."""
    if (ref_emb_MD is None) != (ref_labels_M is None):
        raise PmlkitError("a reference set is ref_emb and ref_labels: give both or neither")
    labels = _labels("embeddings", emb_ND, labels_N)
    if ref_emb_MD is None or ref_labels_M is None:
        return labels, None
    if ref_emb_MD.ndim == 2 and ref_emb_MD.shape[1] != emb_ND.shape[1]:
        raise PmlkitError(f"ref_emb has width {ref_emb_MD.shape[1]}, embeddings {emb_ND.shape[1]}: they must be equal")
    return labels, _labels("ref_emb", ref_emb_MD, ref_labels_M)


def _labels(what: str, rows: Tensor, labels: Tensor) -> Tensor:
    if rows.ndim != 2 or not rows.is_floating_point():
        raise PmlkitError(f"{what}: need floating-point rows [N, D], got {rows.dtype} {tuple(rows.shape)}")
    if labels.shape != rows.shape[:1]:
        raise PmlkitError(f"{what}: need one label a row, got labels {tuple(labels.shape)} for rows {tuple(rows.shape)}")
    if labels.is_floating_point() or labels.is_complex():
        raise PmlkitError(f"{what}: labels must be integers, got {labels.dtype}: convert them with .long()")
    return labels.to(device=rows.device, dtype=torch.int64).contiguous()
