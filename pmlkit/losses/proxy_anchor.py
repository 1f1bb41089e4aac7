"""Proxy Anchor loss: every class has a learnt proxy, pulled to its rows and pushed from all others.

With y = row / max(|row|, 1e-12), q the same of the proxies, s_ic = <y_i, q_c> and C classes:

    U_c = log(1 + sum_{i: label c} exp(alpha (margin - s_ic)))        0 for a class that the batch lacks
    V_c = log(1 + sum_{i: other label} exp(alpha (margin + s_ic)))    0 if there is no such row
    loss = 1/#{classes in the batch} sum_c U_c + 1/C sum_c V_c

This is ProxyAnchorLoss of pytorch-metric-learning 2.9.0 (Kim et al. 2020), except that the proxies keep their type and
their gradient has it too, labels may be of any integer type, a row or proxy shorter than 1e-12 has gradient 0, and a
NaN or Inf anywhere makes the loss and every gradient NaN.

Cost of the reference: three products of 2·N·C·D operations a pair, about seven N x C matrices alive at the peak.
"""

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.losses.rows import tied, unit_rows


def reference(emb_ND: Tensor, labels_N: Tensor, proxies_CD: Tensor, *, margin: float = 0.1, alpha: float = 32) -> Tensor:
    """Return the loss as a scalar: float64 for float64 rows, else float32. Formula: pytorch-metric-learning 2.9.0.

    emb_ND, proxies_CD: floating-point rows; labels_N: any integer type, values in [0, C).
    Raises PmlkitError for labels that do not fit the rows or the proxies.
    """
    classes = len(proxies_CD)
    if labels_N.shape != emb_ND.shape[:1]:
        raise PmlkitError(f"need one label a row: labels {tuple(labels_N.shape)}, rows {tuple(emb_ND.shape)}")
    labels_N = labels_N.long()
    if len(labels_N) and (labels_N.min() < 0 or labels_N.max() >= classes):
        raise PmlkitError(f"a label is outside 0..{classes - 1}: every label needs its proxy")
    dtype = torch.promote_types(torch.promote_types(emb_ND.dtype, proxies_CD.dtype), torch.float32)
    cosine_NC = unit_rows(emb_ND.to(dtype)) @ unit_rows(proxies_CD.to(dtype)).T
    own_NC = labels_N[:, None] == torch.arange(classes, device=labels_N.device)
    pull_C = _log1p_sum(alpha * (margin - cosine_NC), own_NC)
    push_C = _log1p_sum(alpha * (margin + cosine_NC), ~own_NC)
    present = own_NC.any(0).sum().clamp(min=1)
    return tied(pull_C.sum() / present + push_C.sum() / max(classes, 1), emb_ND, proxies_CD)


def _log1p_sum(exponent_NC: Tensor, kept_NC: Tensor) -> Tensor:
    """Return log(1 + sum over kept rows of exp(exponent)) per column."""
    one_1C = exponent_NC.new_zeros(1, exponent_NC.shape[1])
    return torch.cat([exponent_NC.masked_fill(~kept_NC, -torch.inf), one_1C]).logsumexp(0)
