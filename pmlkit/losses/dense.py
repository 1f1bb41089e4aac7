"""The honest bar: each loss as one matrix product and masks in plain torch, eager, compiled, and as a CUDA graph.

What a user would write by hand: O(N²) memory, no host synchronisation, so that it compiles whole and can be captured.
Values and gradients are those of the references; near-equal rows get no special care, which the answer check decides on.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from pmlkit.case import Case
from pmlkit.losses.bind import Bound, LossInputs, Triplets, captured


def contrastive(emb_ND: Tensor, labels_N: Tensor) -> Tensor:
    """Return the contrastive loss (margins 0 and 1) as a float32 scalar, averages over the terms above zero."""
    dist_NN = _distances(emb_ND)
    same_NN, own_NN = _masks(labels_N)
    pull_NN, push_NN = same_NN & ~own_NN & (dist_NN > 0), ~same_NN & (dist_NN < 1)
    pulled = (dist_NN * pull_NN).sum() / pull_NN.sum().clamp(min=1)
    return pulled + ((1 - dist_NN) * push_NN).sum() / push_NN.sum().clamp(min=1)


def batch_hard_triplet(emb_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the batch-hard triplet loss (margin 0.05) as a float32 scalar, and what it mined.

    hard_N2: farthest positive and nearest negative of every anchor; kept_N: whether an anchor has both. A compiler may
    round distances otherwise than eager code, so only the form itself can say which triplets it took.
    """
    dist_NN = _distances(emb_ND)
    same_NN, own_NN = _masks(labels_N)
    positive_NN = same_NN & ~own_NN
    farthest_N = dist_NN.detach().masked_fill(~positive_NN, -torch.inf).argmax(1)
    nearest_N = dist_NN.detach().masked_fill(same_NN, torch.inf).argmin(1)
    kept_N = positive_NN.any(1) & (~same_NN).any(1)
    hard_N2 = torch.stack([farthest_N, nearest_N], 1)
    far_near_N2 = dist_NN.gather(1, hard_N2)
    violation_N = (far_near_N2[:, 0] - far_near_N2[:, 1] + 0.05) * kept_N
    active_N = violation_N > 0
    return (violation_N * active_N).sum() / active_N.sum().clamp(min=1), hard_N2, kept_N


def ntxent(emb_ND: Tensor, labels_N: Tensor) -> Tensor:
    """Return the NT-Xent loss (temperature 0.07) as a float32 scalar."""
    y_ND = normalize(emb_ND)
    logits_NN = (y_ND @ y_ND.T).float() / 0.07
    same_NN, own_NN = _masks(labels_N)
    against_N1 = logits_NN.masked_fill(same_NN, -torch.inf).logsumexp(1, keepdim=True)
    positive_NN = same_NN & ~own_NN
    return (softplus(against_N1 - logits_NN) * positive_NN).sum() / positive_NN.sum().clamp(min=1)


def proxy_anchor(emb_ND: Tensor, labels_N: Tensor, proxies_CD: Tensor) -> Tensor:
    """Return the ProxyAnchor loss (margin 0.1, alpha 32) as a float32 scalar."""
    cosine_NC = (normalize(emb_ND) @ normalize(proxies_CD).to(emb_ND.dtype).T).float()
    classes = len(proxies_CD)
    own_NC = labels_N[:, None] == torch.arange(classes, device=labels_N.device)
    # exp(32 · 1.1) and a sum of 2^20 of them stay below float32's largest number, so no maximum is subtracted.
    pull_C = torch.log1p((torch.exp(32 * (0.1 - cosine_NC)) * own_NC).sum(0))
    push_C = torch.log1p((torch.exp(32 * (0.1 + cosine_NC)) * ~own_NC).sum(0))
    return pull_C.sum() / own_NC.any(0).sum().clamp(min=1) + push_C.sum() / classes


FORMS: dict[str, Callable[..., Any]] = {form.__name__: form for form in (contrastive, batch_hard_triplet, ntxent, proxy_anchor)}


def bind_dense(case: Case, inputs: LossInputs) -> Bound:
    """Return the dense form, eager."""
    return _bound(FORMS[case.op], case, inputs)


def bind_compiled(case: Case, inputs: LossInputs) -> Bound:
    """Return the dense form under `torch.compile`, whole and for static shapes."""
    return _bound(torch.compile(FORMS[case.op], fullgraph=True, dynamic=False), case, inputs)


def bind_graph(case: Case, inputs: LossInputs) -> Bound:
    """Return the compiled form's pair captured in one CUDA graph. Raises RuntimeError where it cannot be captured."""
    return captured(bind_compiled(case, inputs))


def _bound(form: Callable[..., Any], case: Case, inputs: LossInputs) -> Bound:
    arguments = (inputs.emb_ND, inputs.labels_N, *inputs.leaves[1:])
    if case.op != "batch_hard_triplet":
        return Bound(partial(form, *arguments), inputs.leaves)
    seen: list[Tensor] = []

    def forward() -> Tensor:
        loss, *seen[:] = form(*arguments)
        return loss

    def mined() -> Triplets:
        hard_N2, kept_N = seen
        anchors_T = kept_N.nonzero()[:, 0]
        return anchors_T, hard_N2[anchors_T, 0], hard_N2[anchors_T, 1]

    return Bound(forward, inputs.leaves, mined)


def _distances(emb_ND: Tensor) -> Tensor:
    """Return |y_i - y_j| in float32 from one product in the rows' type; the gradient at 0 is 0."""
    y_ND = normalize(emb_ND)
    sq_NN = 2 - 2 * (y_ND @ y_ND.T).float()
    apart_NN = sq_NN > 0
    return torch.where(apart_NN, sq_NN, 1).sqrt() * apart_NN


def _masks(labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pairs share a label, and which are a row with itself."""
    own_NN = torch.eye(len(labels_N), dtype=torch.bool, device=labels_N.device)
    return labels_N[:, None] == labels_N[None, :], own_NN
