"""The float64 answer of a batch whose N x N matrices do not fit: the whole value, and the gradients of some rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from pmlkit.case import Case
from pmlkit.losses.bind import LossInputs
from pmlkit.losses.rows import root, unit_rows

_CHUNK_NUMBERS = 1 << 28  # of one intermediate, 2 GiB in float64


def exact_of_rows(case: Case, inputs: LossInputs, rows_S: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the loss and the gradients of rows S of the embeddings, in float64 of the same rounded inputs.

    For the losses in `SAMPLED`; case.options are keywords of their references. Copies of a row are 1e-8 apart here.
    """
    emb_ND = inputs.emb_ND.detach().double()
    leaf_SD = emb_ND[rows_S].requires_grad_()
    loss, of_rows = SAMPLED[case.op](unit_rows(emb_ND), inputs.labels_N, rows_S, unit_rows(leaf_SD), **case.options)
    return loss, torch.autograd.grad(of_rows, leaf_SD)


def _contrastive(
    y_ND: Tensor, labels_N: Tensor, rows_S: Tensor, y_SD: Tensor, pos_margin: float = 0.0, neg_margin: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the loss, and what of it the rows S can change with all other rows held; each pair is there twice."""
    sums = torch.zeros(4, dtype=torch.float64, device=y_ND.device)
    for rows_c in _chunks(y_ND):
        dist_cN = root(2 - 2 * (y_ND[rows_c] @ y_ND.T))
        positive_cN, negative_cN = _kinds(labels_N, rows_c)
        pull_cN, push_cN = positive_cN & (dist_cN > pos_margin), negative_cN & (dist_cN < neg_margin)
        pulled, pushed = (dist_cN - pos_margin)[pull_cN].sum(), (neg_margin - dist_cN)[push_cN].sum()
        sums += torch.stack([pulled, pull_cN.sum(), pushed, push_cN.sum()])
    pulled, pulls, pushed, pushes = sums[0], sums[1].clamp(min=1), sums[2], sums[3].clamp(min=1)
    positive_SN, negative_SN = _kinds(labels_N, rows_S)
    dist_SN = root(2 - 2 * (y_SD @ y_ND.T))
    pull_S = torch.where(positive_SN & (dist_SN > pos_margin), dist_SN, 0).sum() / pulls
    push_S = torch.where(negative_SN & (dist_SN < neg_margin), dist_SN, 0).sum() / pushes
    return pulled / pulls + pushed / pushes, 2 * (pull_S - push_S)


def _ntxent(y_ND: Tensor, labels_N: Tensor, rows_S: Tensor, y_SD: Tensor, temperature: float = 0.07) -> tuple[Tensor, Tensor]:
    """Return the loss, and what of it the rows S can change: as anchors, and with fixed weight in all others' terms."""
    against, pull = torch.empty_like(y_ND[:, 0]), torch.zeros_like(y_ND[:, 0])
    total, pairs = torch.zeros_like(against[0]), torch.zeros_like(against[0])
    for rows_c in _chunks(y_ND):
        logits_cN = y_ND[rows_c] @ y_ND.T / temperature
        positive_cN, negative_cN = _kinds(labels_N, rows_c)
        against[rows_c] = logits_cN.masked_fill(~negative_cN, -torch.inf).logsumexp(1)
        gaps_cN = torch.where(positive_cN, against[rows_c][:, None] - logits_cN, -torch.inf)
        total += torch.nn.functional.softplus(gaps_cN).sum()
        pull[rows_c] = torch.sigmoid(gaps_cN).sum(1)
        pairs += positive_cN.sum()
    pairs = pairs.clamp(min=1)
    positive_SN, negative_SN = _kinds(labels_N, rows_S)
    logits_SN = y_SD @ y_ND.T / temperature
    own_S = logits_SN.masked_fill(~negative_SN, -torch.inf).logsumexp(1)
    anchors = torch.nn.functional.softplus(torch.where(positive_SN, own_S[:, None] - logits_SN, -torch.inf)).sum()
    fixed_SN = logits_SN.detach() - against
    weight_SN = torch.where(negative_SN, pull * fixed_SN.exp(), 0) - torch.where(positive_SN, torch.sigmoid(-fixed_SN), 0)
    return total / pairs, (anchors + (weight_SN * logits_SN).sum()) / pairs


def _chunks(y_ND: Tensor) -> tuple[Tensor, ...]:
    step = max(1, _CHUNK_NUMBERS // max(1, len(y_ND)))
    return torch.arange(len(y_ND), device=y_ND.device).split(step)


def _kinds(labels_N: Tensor, rows_c: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pairs of the rows with all are positive, and which negative."""
    same_cN = labels_N[rows_c][:, None] == labels_N[None, :]
    negative_cN = ~same_cN
    same_cN[torch.arange(len(rows_c), device=rows_c.device), rows_c] = False
    return same_cN, negative_cN


SAMPLED: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"contrastive": _contrastive, "ntxent": _ntxent}
