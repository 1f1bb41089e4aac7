"""The fused losses as subjects: called as their users call them, and as one captured CUDA graph."""

from functools import partial
from typing import Any

import torch

from pmlkit.case import Case
from pmlkit.errors import PmlkitError, nearest
from pmlkit.losses.batch_hard_triplet import BatchHardTripletLoss
from pmlkit.losses.bind import Bound, LossInputs, captured
from pmlkit.losses.contrastive import ContrastiveLoss
from pmlkit.losses.fused import fusable
from pmlkit.losses.mining import mined
from pmlkit.losses.ntxent import NTXentLoss
from pmlkit.losses.proxy_anchor import ProxyAnchorLoss

LOSSES: dict[str, Any] = {
    "contrastive": ContrastiveLoss,
    "batch_hard_triplet": BatchHardTripletLoss,
    "ntxent": NTXentLoss,
}


def bind_fused(case: Case, inputs: LossInputs) -> Bound:
    """Return the fused loss of `case`; case.options are keywords of its constructor.

    Raises PmlkitError for an unknown op, and NotImplementedError for rows that would go to the reference instead: its
    time must not be taken for the kernels'.
    """
    if not fusable(inputs.emb_ND):
        kind = f"{inputs.emb_ND.dtype} rows {tuple(inputs.emb_ND.shape)} on {inputs.emb_ND.device.type}"
        raise NotImplementedError(f"no fused kernels for {kind}: they need a CUDA device and up to 1,024 columns")
    if case.op == "proxy_anchor":
        if inputs.proxies_CD is None:
            raise PmlkitError("proxy_anchor needs proxies: give the case a shape with C")
        loss = ProxyAnchorLoss(*inputs.proxies_CD.shape, **case.options).to(inputs.proxies_CD.device)
        with torch.no_grad():
            loss.proxies.copy_(inputs.proxies_CD)
        return Bound(partial(loss, inputs.emb_ND, inputs.labels_N), (inputs.emb_ND, loss.proxies))
    if case.op not in LOSSES:
        raise PmlkitError(f"no fused loss for {case.op!r}: {nearest(case.op, list(LOSSES))}")
    forward = partial(LOSSES[case.op](**case.options), inputs.emb_ND, inputs.labels_N)
    again = (lambda: mined(forward())) if case.op == "batch_hard_triplet" else None  # mining again gives the same
    return Bound(forward, inputs.leaves, again)


def bind_fused_graph(case: Case, inputs: LossInputs) -> Bound:
    """Return the fused loss's pair captured in one CUDA graph."""
    return captured(bind_fused(case, inputs))
