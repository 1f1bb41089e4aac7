"""Batch-hard triplet loss: every anchor against its farthest positive and its nearest negative.

With y = row / max(|row|, 1e-12), z the same of the reference rows (y itself without them) and d_ij = |y_i - z_j|:

    p(i) = first argmax_j d_ij over equal labels (without reference rows j != i)
    n(i) = first argmin_j d_ij over different labels; anchors without one of the two are left out
    v_i = d_{i,p(i)} - d_{i,n(i)} + margin
    loss = sum_{v_i > 0} v_i / #{i: v_i > 0}, or 0 if no v_i > 0

This is BatchHardMiner with TripletMarginLoss of pytorch-metric-learning 2.9.0 (the mining rule of Hermans, Beyer and
Leibe 2017), except that identical rows are at distance 0 (no gradient) and tie exactly at every N, a row shorter than
1e-12 has gradient 0, a NaN or Inf anywhere makes the loss and every gradient NaN, and an empty batch is 0.

Cost of the reference: one product of 2·N·M·D operations and about five N x M matrices to mine, then O(N·D).
"""

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError

# Below this squared distance 2 - 2 y·z has lost the digits that order the candidates: the rows are subtracted instead.
_NEAR = 0.05
_CHUNK = 1 << 20  # numbers gathered at once for near pairs, unless an N x M matrix is larger

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
    refs_MD = emb_ND if ref_emb_MD is None else ref_emb_MD
    dtype = torch.promote_types(torch.promote_types(emb_ND.dtype, refs_MD.dtype), torch.float32)
    y_ND, _ = _unit_rows(emb_ND.to(dtype))
    z_MD = y_ND if ref_emb_MD is None else _unit_rows(refs_MD.to(dtype))[0]
    violation_T = _lengths(y_ND[anchor_T] - z_MD[positive_T]) - _lengths(y_ND[anchor_T] - z_MD[negative_T]) + margin
    active_T = violation_T > 0
    loss = torch.where(active_T, violation_T, 0).sum() / active_T.sum().clamp(min=1)
    return _tied(loss, emb_ND, ref_emb_MD)


@torch.no_grad()
def mine(emb_ND: Tensor, labels_N: Tensor, *, ref_emb_MD: Tensor | None = None, ref_labels_M: Tensor | None = None) -> Triplets:
    """Return anchors, positives and negatives: int64, ascending anchors, ties to the first index. Rule: BatchHardMiner.

    Positives and negatives index the reference rows if there are any. Raises PmlkitError for labels that do not fit
    the rows, or for half a reference set.
    """
    if (ref_emb_MD is None) != (ref_labels_M is None):
        raise PmlkitError("a reference set is ref_emb_MD and ref_labels_M: give both or neither")
    refs_MD = emb_ND if ref_emb_MD is None else ref_emb_MD
    refs_M = labels_N if ref_labels_M is None else ref_labels_M
    if labels_N.shape != emb_ND.shape[:1] or refs_M.shape != refs_MD.shape[:1]:
        raise PmlkitError(f"need one label a row: labels {tuple(labels_N.shape)}, rows {tuple(emb_ND.shape)}")
    if not len(labels_N) or not len(refs_M):
        none = torch.zeros(0, dtype=torch.int64, device=emb_ND.device)
        return none, none, none
    positive_NM = labels_N[:, None] == refs_M[None, :]
    negative_NM = ~positive_NM
    if ref_emb_MD is None:
        positive_NM.fill_diagonal_(False)
    dtype = torch.promote_types(torch.promote_types(emb_ND.dtype, refs_MD.dtype), torch.float32)
    sq_NM = _squares(emb_ND.to(dtype), refs_MD.to(dtype))
    anchors_T = (positive_NM.any(1) & negative_NM.any(1)).nonzero()[:, 0]
    farthest_N = sq_NM.masked_fill(~positive_NM, -torch.inf).argmax(1)
    nearest_N = sq_NM.masked_fill(~negative_NM, torch.inf).argmin(1)
    return anchors_T, farthest_N[anchors_T], nearest_N[anchors_T]


def _unit_rows(rows_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows over max(length, 1e-12), and their squared lengths: exactly 1 except for shorter rows.

    Shorter rows are constants: their gradient is 0, where the quotient would give 1e12.
    """
    top_N1 = rows_ND.detach().abs().amax(1, keepdim=True)
    rows_ND = rows_ND / top_N1.where(top_N1 > 1e15, 1)  # squares of 1e19 overflow float32
    length_N1 = rows_ND.norm(dim=1, keepdim=True)
    unit_ND = rows_ND / length_N1.clamp(min=1e-12)
    short_N1 = length_N1.detach() < 1e-12
    sq_N1 = torch.where(short_N1, unit_ND.detach().square().sum(1, keepdim=True), 1)
    return torch.where(short_N1, unit_ND.detach(), unit_ND), sq_N1[:, 0]


def _squares(emb_ND: Tensor, refs_MD: Tensor) -> Tensor:
    """Return |y_i - z_j|², from the product where rows are apart and from their difference where they are near."""
    (y_ND, y_sq_N), (z_MD, z_sq_M) = _unit_rows(emb_ND), _unit_rows(refs_MD)
    sq_NM = y_sq_N[:, None] + z_sq_M[None, :] - 2 * (y_ND @ z_MD.T)
    i_P, j_P = (sq_NM < _NEAR).nonzero(as_tuple=True)
    step = max(1, max(_CHUNK, sq_NM.numel()) // y_ND.shape[1])
    for i_p, j_p in zip(i_P.split(step), j_P.split(step), strict=True):
        sq_NM[i_p, j_p] = (y_ND[i_p] - z_MD[j_p]).square().sum(1)
    return sq_NM[:, _first_copies(z_MD)]


def _first_copies(rows_MD: Tensor) -> Tensor:
    """Return for every row the first index of an identical row.

    A matrix product may round equal columns differently, so copies would otherwise not tie.
    """
    # NaN has no order and must not reach the sort.
    _, copy_M = torch.unique(rows_MD.nan_to_num(), dim=0, return_inverse=True)
    index_M = torch.arange(len(rows_MD), device=rows_MD.device)
    return torch.full_like(index_M, len(rows_MD)).scatter_reduce(0, copy_M, index_M, "amin")[copy_M]


def _lengths(rows_TD: Tensor) -> Tensor:
    """Return row lengths whose gradient at 0 is 0."""
    sq_T = rows_TD.square().sum(1)
    apart_T = sq_T > 0
    return torch.where(apart_T, sq_T, 1).sqrt() * apart_T


def _tied(loss: Tensor, *rows: Tensor | None) -> Tensor:
    """Return loss + 0·rows: an empty loss stays in the graph; one NaN or Inf makes loss and all gradients NaN."""
    zero = sum((r.detach() * 0).sum() for r in rows if r is not None)
    return loss + sum((r * zero).sum() for r in rows if r is not None)
