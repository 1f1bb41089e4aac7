"""Other people's implementations as subjects, called as their users call them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.losses.bind import Bound, LossInputs


def bind_pml(case: Case, inputs: LossInputs) -> Bound:
    """Return the loss of pytorch-metric-learning for `case`; case.options are keywords of its constructor.

    Its ProxyAnchorLoss turns the proxies into the rows' type on the first call (2.9.0), so the second leaf, its
    parameter, changes type then. Raises PmlkitError for an unknown op, or for proxies that are missing.
    """
    # Here and not above: the import takes a second, and only this subject needs the package.
    from pytorch_metric_learning import losses, miners

    arguments = (inputs.emb_ND, inputs.labels_N)
    options: dict[str, Any] = dict(case.options)
    match case.op:
        case "contrastive":
            return Bound(partial(losses.ContrastiveLoss(**options), *arguments), inputs.leaves)
        case "ntxent":
            return Bound(partial(losses.NTXentLoss(**options), *arguments), inputs.leaves)
        case "batch_hard_triplet":
            loss, miner = losses.TripletMarginLoss(**options), miners.BatchHardMiner()
            return Bound(lambda: loss(*arguments, miner(*arguments)), inputs.leaves, mined=lambda: miner(*arguments))
        case "proxy_anchor":
            loss = losses.ProxyAnchorLoss(*_proxies(inputs).shape, **options)
            # A parameter of its own: the loss changes its type in place, and ours must keep float32.
            loss.proxies = torch.nn.Parameter(_proxies(inputs).detach().clone())
            return Bound(partial(loss, *arguments), (inputs.emb_ND, loss.proxies))
    raise PmlkitError(f"pytorch-metric-learning is not bound for {case.op!r}: add a case to bench/peers.py")


def _proxies(inputs: LossInputs) -> Tensor:
    if inputs.proxies_CD is None:
        raise PmlkitError("proxy_anchor needs proxies: give the case a shape with C")
    return inputs.proxies_CD
