"""NT-Xent loss: the cross entropy of each positive against all negatives of its anchor.

With y = row / max(|row|, 1e-12), z the same of the reference rows (y itself without them) and
a_ij = <y_i, z_j> / temperature:

    L_i = log sum_{j: other label} exp(a_ij)
    loss = mean over ordered positives (i, p) of -log(exp(a_ip) / (exp(a_ip) + exp(L_i)))
         = mean of log(1 + exp(L_i - a_ip))

Positives have equal labels (without reference rows i != p). The anchor's other positives are in no denominator. A
positive of an anchor without negatives is a term of 0 that counts in the mean. This is NTXentLoss of
pytorch-metric-learning 2.9.0, except that nothing is added inside the logarithm (2.9.0 adds the smallest normal number
of the type and so saturates, at 87.3 in float32), a row shorter than 1e-12 has gradient 0, a NaN or Inf anywhere makes
the loss and every gradient NaN, and a single pair is a pair.

Cost of the reference: three products of 2·N·M·D operations a pair, about five N x M matrices alive at the peak.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pmlkit.errors import PmlkitError


def reference(
    emb_ND: Tensor,
    labels_N: Tensor,
    *,
    temperature: float = 0.07,
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
    y_ND = _unit_rows(emb_ND.to(dtype))
    z_MD = y_ND if ref_emb_MD is None else _unit_rows(refs_MD.to(dtype))
    same_NM = labels_N[:, None] == refs_M[None, :]

    logits_NM = y_ND @ z_MD.T / temperature
    against_N = logits_NM.masked_fill(same_NM, -torch.inf).logsumexp(1)  # -inf, with gradient 0, without negatives
    if ref_emb_MD is None:
        same_NM = same_NM.clone().fill_diagonal_(False)
    i_P, p_P = same_NM.nonzero(as_tuple=True)
    total = -logsigmoid(logits_NM[i_P, p_P] - against_N[i_P]).sum()
    return _tied(total / max(len(i_P), 1), emb_ND, ref_emb_MD)


def _unit_rows(rows_ND: Tensor) -> Tensor:
    """Return rows over max(length, 1e-12). Shorter rows are constants: gradient 0, where the quotient gives 1e12."""
    top_N1 = rows_ND.detach().abs().amax(1, keepdim=True)
    rows_ND = rows_ND / top_N1.where(top_N1 > 1e15, 1)  # squares of 1e19 overflow float32
    length_N1 = rows_ND.norm(dim=1, keepdim=True)
    unit_ND = rows_ND / length_N1.clamp(min=1e-12)
    return torch.where(length_N1.detach() < 1e-12, unit_ND.detach(), unit_ND)


def _tied(loss: Tensor, *rows: Tensor | None) -> Tensor:
    """Return loss + 0·rows: an empty loss stays in the graph; one NaN or Inf makes loss and all gradients NaN."""
    zero = sum((r.detach() * 0).sum() for r in rows if r is not None)
    return loss + sum((r * zero).sum() for r in rows if r is not None)
