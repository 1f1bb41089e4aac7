"""Contrastive loss: positives are pulled below one distance, negatives pushed beyond another.

With y = row / max(|row|, 1e-12), z the same of the reference rows (y itself without them) and d_ij = |y_i - z_j|:

    positives: equal labels (without reference rows i != j); negatives: different labels; ordered pairs, each counts
    P+ = #{positive (i, j): d_ij > pos_margin}          N- = #{negative (i, j): d_ij < neg_margin}
    loss = 1/P+ sum_positives max(d_ij - pos_margin, 0) + 1/N- sum_negatives max(neg_margin - d_ij, 0)

A part whose count is 0 is 0. This is ContrastiveLoss of pytorch-metric-learning 2.9.0, except that identical rows are
at distance 0 with gradient 0 at every N (so that identical positives are no term), a row shorter than 1e-12 has
gradient 0, a NaN or Inf anywhere makes the loss and every gradient NaN, and a single pair is a pair.

Cost of the reference: three products of 2·N·M·D operations a pair, about ten N x M matrices alive at the peak.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pmlkit.errors import PmlkitError

# Below this squared distance 2 - 2 y·z has lost the digits that the gradient needs: the rows are subtracted instead.
# Simulated in float32 on clusters 0.03 wide: gradient error 2e-6; 3e-5 with a threshold of 1e-3, 1e-4 without any.
_NEAR = 0.05
_CHUNK = 1 << 20  # numbers gathered at once for near pairs, unless an N x M matrix is larger


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
    if (ref_emb_MD is None) != (ref_labels_M is None):
        raise PmlkitError("a reference set is ref_emb_MD and ref_labels_M: give both or neither")
    refs_MD = emb_ND if ref_emb_MD is None else ref_emb_MD
    refs_M = labels_N if ref_labels_M is None else ref_labels_M
    if labels_N.shape != emb_ND.shape[:1] or refs_M.shape != refs_MD.shape[:1]:
        raise PmlkitError(f"need one label a row: labels {tuple(labels_N.shape)}, rows {tuple(emb_ND.shape)}")
    dtype = torch.promote_types(torch.promote_types(emb_ND.dtype, refs_MD.dtype), torch.float32)
    y_ND, y_sq_N = _unit_rows(emb_ND.to(dtype))
    z_MD, z_sq_M = (y_ND, y_sq_N) if ref_emb_MD is None else _unit_rows(refs_MD.to(dtype))
    positive_NM = labels_N[:, None] == refs_M[None, :]
    negative_NM = ~positive_NM
    if ref_emb_MD is None:
        positive_NM.fill_diagonal_(False)

    dist_NM = _distances(y_ND, z_MD, y_sq_N[:, None] + z_sq_M[None, :], positive_NM | negative_NM)
    pull_NM = positive_NM & (dist_NM > pos_margin)
    push_NM = negative_NM & (dist_NM < neg_margin)
    pulled = torch.where(pull_NM, dist_NM - pos_margin, 0).sum() / pull_NM.sum().clamp(min=1)
    pushed = torch.where(push_NM, neg_margin - dist_NM, 0).sum() / push_NM.sum().clamp(min=1)
    return _tied(pulled + pushed, emb_ND, ref_emb_MD)


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


def _distances(y_ND: Tensor, z_MD: Tensor, sq_sum_NM: Tensor, wanted_NM: Tensor) -> Tensor:
    """Return |y_i - z_j|, from the product where rows are apart and from their difference where they are near."""
    sq_NM = sq_sum_NM - 2 * (y_ND @ z_MD.T)
    i_P, j_P = ((sq_NM.detach() < _NEAR) & wanted_NM).nonzero(as_tuple=True)
    if len(i_P):
        sq_NM = sq_NM.index_put((i_P, j_P), _near_squares(y_ND, z_MD, i_P, j_P))
    apart_NM = sq_NM > 0
    return torch.where(apart_NM, sq_NM, 1).sqrt() * apart_NM  # the derivative of sqrt at 0 must not meet a mask of 0


def _near_squares(y_ND: Tensor, z_MD: Tensor, i_P: Tensor, j_P: Tensor) -> Tensor:
    """Return |y_i - z_j|² of P pairs. Chunks are computed again in the backward pass, so P x D is never stored."""

    def squares(y_ND: Tensor, z_MD: Tensor, i_p: Tensor, j_p: Tensor) -> Tensor:
        return (y_ND[i_p] - z_MD[j_p]).square().sum(1)

    step = max(1, max(_CHUNK, len(y_ND) * len(z_MD)) // y_ND.shape[1])
    chunks = zip(i_P.split(step), j_P.split(step), strict=True)
    return torch.cat([checkpoint(squares, y_ND, z_MD, i, j, use_reentrant=False, preserve_rng_state=False) for i, j in chunks])


def _tied(loss: Tensor, *rows: Tensor | None) -> Tensor:
    """Return loss + 0·rows: an empty loss stays in the graph; one NaN or Inf makes loss and all gradients NaN."""
    zero = sum((r.detach() * 0).sum() for r in rows if r is not None)
    return loss + sum((r * zero).sum() for r in rows if r is not None)
