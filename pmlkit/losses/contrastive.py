"""Contrastive loss: positives are pulled below one distance, negatives pushed beyond another.

With y = row / max(|row|, 1e-12), z the same of the reference rows (y itself without them) and d_ij = |y_i - z_j|:

    positives: equal labels (without reference rows i != j); negatives: different labels; ordered pairs, each counts
    P+ = #{positive (i, j): d_ij > pos_margin}          N- = #{negative (i, j): d_ij < neg_margin}
    loss = 1/P+ sum_positives max(d_ij - pos_margin, 0) + 1/N- sum_negatives max(neg_margin - d_ij, 0)

A part whose count is 0 is 0. This is ContrastiveLoss of pytorch-metric-learning 2.9.0, except that identical rows are
at distance 0 with gradient 0 at every N (so that identical positives are no term), a row shorter than 1e-12 has
gradient 0, a NaN or Inf anywhere makes the loss and every gradient NaN, and a single pair is a pair.

Cost of the reference: three products of 2·N·M·D operations a pair, about seven N x M matrices alive at the peak, or
eleven if all rows are near.
"""

import torch
from torch import Tensor

from pmlkit.losses.rows import reference_set, root, squared_distances, tied, unit_rows


def reference(
    emb_ND: Tensor,
    labels_N: Tensor,
    *,
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    ref_emb_MD: Tensor | None = None,
    ref_labels_M: Tensor | None = None,
) -> Tensor:
    """Return the loss as a scalar: float64 for float64 rows, else float32. Formula: pytorch-metric-learning 2.9.0.

    emb_ND, ref_emb_MD: floating-point rows; labels_N, ref_labels_M: any integer type, compared by value.
    Raises PmlkitError for labels that do not fit the rows, or for half a reference set.
    """
    refs_MD, refs_M, dtype = reference_set(emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    y_ND = unit_rows(emb_ND.to(dtype))
    z_MD = y_ND if ref_emb_MD is None else unit_rows(refs_MD.to(dtype))
    positive_NM = labels_N[:, None] == refs_M[None, :]
    negative_NM = ~positive_NM
    if ref_emb_MD is None:
        positive_NM.fill_diagonal_(False)

    dist_NM = root(squared_distances(y_ND, z_MD, positive_NM | negative_NM))
    pull_NM = positive_NM & (dist_NM > pos_margin)
    push_NM = negative_NM & (dist_NM < neg_margin)
    pulled = torch.where(pull_NM, dist_NM - pos_margin, 0).sum() / pull_NM.sum().clamp(min=1)
    pushed = torch.where(push_NM, neg_margin - dist_NM, 0).sum() / push_NM.sum().clamp(min=1)
    return tied(pulled + pushed, emb_ND, ref_emb_MD)
