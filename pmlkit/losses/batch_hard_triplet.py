"""Batch-hard triplet loss: every anchor against its farthest positive and its nearest negative.

With y = row / max(|row|, 1e-12), z the same of the reference rows (y itself without them) and d_ij = |y_i - z_j|:

    p(i) = first argmax_j d_ij over equal labels (without reference rows j != i)
    n(i) = first argmin_j d_ij over different labels; anchors without one of the two are left out
    v_i = d_{i,p(i)} - d_{i,n(i)} + margin
    loss = sum_{v_i > 0} v_i / #{i: v_i > 0}, or 0 if no v_i > 0

This is BatchHardMiner with TripletMarginLoss of pytorch-metric-learning 2.9.0 (the mining rule of Hermans, Beyer and
Leibe 2017), except that identical rows are at distance 0 (no gradient) and tie exactly at every N, a row shorter than
1e-12 has gradient 0, a NaN or Inf anywhere makes the loss and every gradient NaN, and an empty batch is 0.

Cost of the reference: one product of 2·N·M·D operations and about four N x M matrices to mine (nine if all rows
are near), then O(N·D).
"""

import torch
from torch import Tensor

from pmlkit.losses.rows import reference_set, root, squared_distances, tied, unit_rows

Triplets = tuple[Tensor, Tensor, Tensor]


def reference(
    emb_ND: Tensor,
    labels_N: Tensor,
    *,
    margin: float = 0.05,
    ref_emb_MD: Tensor | None = None,
    ref_labels_M: Tensor | None = None,
    triplets: Triplets | None = None,
) -> Tensor:
    """Return the loss as a scalar: float64 for float64 rows, else float32. Formula: pytorch-metric-learning 2.9.0.

    emb_ND, ref_emb_MD: floating-point rows; labels_N, ref_labels_M: any integer type, compared by value.
    triplets: anchors, positives, negatives (int64) to evaluate at; mined here when None.
    Raises PmlkitError as `mine` does.
    """
    if triplets is None:
        triplets = mine(emb_ND, labels_N, ref_emb_MD=ref_emb_MD, ref_labels_M=ref_labels_M)
    anchor_T, positive_T, negative_T = triplets
    refs_MD, _, dtype = reference_set(emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    y_ND = unit_rows(emb_ND.to(dtype))
    z_MD = y_ND if ref_emb_MD is None else unit_rows(refs_MD.to(dtype))
    to_positive_T, to_negative_T = (root((y_ND[anchor_T] - z_MD[j_T]).square().sum(1)) for j_T in (positive_T, negative_T))
    violation_T = to_positive_T - to_negative_T + margin
    active_T = violation_T > 0
    loss = torch.where(active_T, violation_T, 0).sum() / active_T.sum().clamp(min=1)
    return tied(loss, emb_ND, ref_emb_MD)


@torch.no_grad()
def mine(emb_ND: Tensor, labels_N: Tensor, *, ref_emb_MD: Tensor | None = None, ref_labels_M: Tensor | None = None) -> Triplets:
    """Return anchors, positives and negatives: int64, ascending anchors, ties to the first index. Rule: BatchHardMiner.

    Positives and negatives index the reference rows if there are any. Raises PmlkitError for labels that do not fit
    the rows, or for half a reference set.
    """
    refs_MD, refs_M, dtype = reference_set(emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    if not len(labels_N) or not len(refs_M):
        none = torch.zeros(0, dtype=torch.int64, device=emb_ND.device)
        return none, none, none
    positive_NM = labels_N[:, None] == refs_M[None, :]
    negative_NM = ~positive_NM
    if ref_emb_MD is None:
        positive_NM.fill_diagonal_(False)
    y_ND, z_MD = unit_rows(emb_ND.to(dtype)), unit_rows(refs_MD.to(dtype))
    sq_NM = squared_distances(y_ND, z_MD, positive_NM | negative_NM)
    anchors_T = (positive_NM.any(1) & negative_NM.any(1)).nonzero()[:, 0]
    sq_NM = sq_NM[:, _first_copies(z_MD)]
    farthest_N = sq_NM.masked_fill(~positive_NM, -torch.inf).argmax(1)
    nearest_N = sq_NM.masked_fill(~negative_NM, torch.inf).argmin(1)
    return anchors_T, farthest_N[anchors_T], nearest_N[anchors_T]


def _first_copies(rows_MD: Tensor) -> Tensor:
    """Return for every row the first index of an identical row.

    A matrix product may round equal columns differently, so copies would otherwise not tie.
    """
    # NaN has no order and must not reach the sort.
    _, copy_M = torch.unique(rows_MD.nan_to_num(), dim=0, return_inverse=True)
    index_M = torch.arange(len(rows_MD), device=rows_MD.device)
    return torch.full_like(index_M, len(rows_MD)).scatter_reduce(0, copy_M, index_M, "amin")[copy_M]
