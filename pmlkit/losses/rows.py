"""What the plain-torch references of the losses share: unit rows, distances that stay exact when small, and the tie-in."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pmlkit.errors import PmlkitError

# Below this squared distance 2 - 2 y·z has lost the digits that the gradient needs: the rows are subtracted instead.
# Gradient error of contrastive in float32 on 512 rows in clusters 0.03 wide (D = 128): 8.5e-7; with 1e-3, or without
# any, 6.7e-5.
_NEAR = 0.05
_CHUNK = 1 << 20  # numbers gathered at once for near pairs, unless an N x M matrix is larger


def reference_set(
    emb_ND: Tensor, labels_N: Tensor, ref_emb_MD: Tensor | None, ref_labels_M: Tensor | None
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Return the rows and labels to compare with (the batch itself without a set), and the type to compute in.

    Raises PmlkitError for half a reference set, or for labels that do not fit their rows.
    """
    if (ref_emb_MD is None) != (ref_labels_M is None):
        raise PmlkitError("a reference set is ref_emb_MD and ref_labels_M: give both or neither")
    refs_MD = emb_ND if ref_emb_MD is None else ref_emb_MD
    refs_M = labels_N if ref_labels_M is None else ref_labels_M
    for rows, labels in ((emb_ND, labels_N), (refs_MD, refs_M)):
        if labels.shape != rows.shape[:1]:
            raise PmlkitError(f"need one label a row: labels {tuple(labels.shape)}, rows {tuple(rows.shape)}")
    return refs_MD, refs_M, torch.promote_types(torch.promote_types(emb_ND.dtype, refs_MD.dtype), torch.float32)


def unit_rows(rows_ND: Tensor) -> Tensor:
    """Return rows over max(length, 1e-12). Shorter rows are constants: gradient 0, where the quotient gives 1e12."""
    top_N1 = rows_ND.detach().abs().amax(1, keepdim=True)
    rows_ND = rows_ND / top_N1.where(top_N1 > 1e15, 1)  # squares of 1e19 overflow float32
    length_N1 = rows_ND.norm(dim=1, keepdim=True)
    unit_ND = rows_ND / length_N1.clamp(min=1e-12)
    return torch.where(length_N1.detach() < 1e-12, unit_ND.detach(), unit_ND)


def squared_distances(y_ND: Tensor, z_MD: Tensor, wanted_NM: Tensor) -> Tensor:
    """Return |y_i - z_j|² of unit rows: from the product where rows are apart, from their difference where near.

    wanted_NM: pairs whose small values matter; the others are left as the product gives them.
    """
    sq_NM = _squared_lengths(y_ND)[:, None] + _squared_lengths(z_MD)[None, :] - 2 * (y_ND @ z_MD.T)
    i_P, j_P = ((sq_NM.detach() < _NEAR) & wanted_NM).nonzero(as_tuple=True)
    return sq_NM.index_put((i_P, j_P), _near_squares(y_ND, z_MD, i_P, j_P)) if len(i_P) else sq_NM


def root(sq: Tensor) -> Tensor:
    """Return the square root with value and gradient 0 at and below 0: there the derivative must not meet a mask of 0."""
    apart = sq > 0
    return torch.where(apart, sq, 1).sqrt() * apart


def tied(loss: Tensor, *rows: Tensor | None) -> Tensor:
    """Return loss + 0·rows: an empty loss stays in the graph; one NaN or Inf makes loss and all gradients NaN."""
    zero = sum((r.detach() * 0).sum() for r in rows if r is not None)
    return loss + sum((r * zero).sum() for r in rows if r is not None)


def _squared_lengths(unit_ND: Tensor) -> Tensor:
    """Return exactly 1 for unit rows, whose rounding must not count, and the square of what a shorter row has."""
    sq_N = unit_ND.detach().square().sum(1)
    return torch.where(sq_N < 0.9999, sq_N, 1)


def _near_squares(y_ND: Tensor, z_MD: Tensor, i_P: Tensor, j_P: Tensor) -> Tensor:
    """Return |y_i - z_j|² of P pairs. Chunks are computed again in the backward pass, so P x D is never stored."""

    def squares(i_p: Tensor, j_p: Tensor) -> Tensor:
        return (y_ND[i_p] - z_MD[j_p]).square().sum(1)

    step = max(1, max(_CHUNK, len(y_ND) * len(z_MD)) // y_ND.shape[1])
    chunks = list(zip(i_P.split(step), j_P.split(step), strict=True))
    if not torch.is_grad_enabled():  # the first checkpoint of a process imports for more than a second
        return torch.cat([squares(i, j) for i, j in chunks])
    return torch.cat([checkpoint(squares, i, j, use_reentrant=False, preserve_rng_state=False) for i, j in chunks])
