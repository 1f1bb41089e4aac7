"""Which triplets batch-hard mining picks: by the plain rule, and what a fused loss has picked."""

import torch
from torch import Tensor

from pmlkit.losses.arrange import numbers_of, padded
from pmlkit.losses.launch import places_of
from pmlkit.losses.rows import reference_set, squared_distances, unit_rows
from pmlkit.losses.sides import ORDER, OWN
from pmlkit.losses.tiling import ready_width

Triplets = tuple[Tensor, Tensor, Tensor]


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


def anchor_numbers(width: int) -> int:
    """Return how many numbers an anchor keeps."""
    return 4 if ready_width(width) <= 128 else 6


def mined(loss: Tensor) -> Triplets:
    """Return what a fused batch-hard loss, computed eagerly of rows that need a gradient, has picked: as `mine` does.

    Its first two numbers of an anchor are positions: of the positive and of the negative.
    """
    emb_ND, ref_emb_MD, room = loss.grad_fn.saved_tensors  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    others_MD = emb_ND if ref_emb_MD is None else ref_emb_MD
    rows, stride = len(emb_ND), padded(len(emb_ND))
    numbers = room.view(torch.int32)
    alone = len(loss.grad_fn.plan.backward) == 1  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    at_others = 0 if alone else 2 * places_of(numbers_of(rows, anchor_numbers(emb_ND.shape[1])))
    of_anchors, of_others = numbers, numbers[at_others:]
    order_N = of_anchors[ORDER.value * stride :][:rows].long()
    order_M = of_others[ORDER.value * padded(len(others_MD)) :][: len(others_MD)].long()
    picks_2N = of_anchors[OWN.value * stride :][: 2 * stride].view(2, stride)[:, :rows]
    kept_T = (picks_2N[0] != -1).nonzero()[:, 0]
    kept_T = kept_T[order_N[kept_T].argsort()]
    positive_T, negative_T = order_M[torch.where(picks_2N < 0, -2 - picks_2N, picks_2N)[:, kept_T].long()]
    return order_N[kept_T], positive_T, negative_T
