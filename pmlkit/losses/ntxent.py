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

Cost of the reference: three products of 2·N·M·D operations a pair, about six N x M matrices alive at the peak.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from pmlkit.losses.rows import reference_set, tied, unit_rows


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
    refs_MD, refs_M, dtype = reference_set(emb_ND, labels_N, ref_emb_MD, ref_labels_M)
    y_ND = unit_rows(emb_ND.to(dtype))
    z_MD = y_ND if ref_emb_MD is None else unit_rows(refs_MD.to(dtype))
    same_NM = labels_N[:, None] == refs_M[None, :]

    logits_NM = y_ND @ z_MD.T / temperature
    against_N = logits_NM.masked_fill(same_NM, -torch.inf).logsumexp(1)  # -inf, with gradient 0, without negatives
    if ref_emb_MD is None:
        same_NM = same_NM.clone().fill_diagonal_(False)
    i_P, p_P = same_NM.nonzero(as_tuple=True)
    total = -logsigmoid(logits_NM[i_P, p_P] - against_N[i_P]).sum()
    return tied(total / max(len(i_P), 1), emb_ND, ref_emb_MD)
