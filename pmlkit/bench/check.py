"""The gate before any timing: is the answer right?"""

import math

import torch
from torch import Tensor

from pmlkit.case import Case
from pmlkit.losses.bind import Bound, LossInputs, exact
from pmlkit.precision import precision
from pmlkit.record import Check

REFERENCE = "closed form in float64 on the same rounded inputs"


def check_answer(case: Case, inputs: LossInputs, bound: Bound) -> Check:
    """Compare loss and gradients of one pair with float64; the limit is the tolerance of the case's precision.

    A subject that mines in its own arithmetic picks other triplets where distances tie within a rounding step, so its
    gradient is compared at *its own* triplets, and those must lie as near to the best ones as the format can tell.
    """
    bound.poison()
    loss = bound.pair()
    got = [loss.detach(), *(_gradient(leaf) for leaf in bound.leaves)]
    wanted, reference = (bound.exact(), "its own value in float64") if bound.exact else (exact(case, inputs), REFERENCE)
    rms, largest, row = _worst(got, wanted)
    check = Check(max_rel=largest, rms_rel=rms, worst_row=row, reference=reference, limit=precision(case.precision).tolerance)
    if bound.mined is None or check.passed:
        return check
    mined = bound.mined()
    at_mined, largest, row = _worst(got, exact(case, inputs, mined))
    gap = mining_gap(inputs, mined)
    check.plain_rms_rel, check.max_rel, check.worst_row = rms, largest, row
    check.rms_rel = None if at_mined is None else max(at_mined, gap)
    check.reference = f"{REFERENCE}, at the subject's own triplets"
    return check


def mining_gap(inputs: LossInputs, triplets: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return how far the mined distances are from the hardest ones, relative to them, in float64.

    inf if a triplet has a wrong label, or if an anchor that has a positive and a negative is missing or repeated.
    """
    rows = torch.nn.functional.normalize(inputs.emb_ND.detach().double())
    distance = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    same = inputs.labels_N[:, None] == inputs.labels_N[None, :]
    others = ~torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    a, p, n = triplets
    minable = ((same & others).any(1) & (~same).any(1)).nonzero()[:, 0]
    if not torch.equal(a.sort().values, minable) or not bool((same & others)[a, p].all() and (~same)[a, n].all()):
        return math.inf
    hardest_p = distance.masked_fill(~(same & others), -math.inf).amax(1)[a]
    hardest_n = distance.masked_fill(same, math.inf).amin(1)[a]
    gaps = torch.cat([(distance[a, p] - hardest_p) / hardest_p, (distance[a, n] - hardest_n) / hardest_n])
    return float(gaps.abs().max()) if len(gaps) else 0.0


def _gradient(leaf: Tensor) -> Tensor:
    return leaf.grad.detach() if leaf.grad is not None else torch.full_like(leaf, math.nan)


def _worst(got: list[Tensor], wanted: tuple[Tensor, tuple[Tensor, ...]]) -> tuple[float | None, float | None, int | None]:
    """Return the largest norm ratio, the largest single difference (relative to the largest value) and its row."""
    loss, gradients = wanted
    rms = largest = 0.0
    row: int | None = None
    for value, reference in zip(got, [loss, *gradients], strict=True):
        difference = value.double() - reference
        if not bool(torch.isfinite(difference).all()):
            return None, None, None
        rms = max(rms, _ratio(difference.norm(), reference.norm()))
        single = _ratio(difference.abs().max(), reference.abs().max())
        if single > largest:
            largest = single
            row = int(difference.abs().amax(-1).argmax()) if difference.ndim == 2 else None
    return rms, largest, row


def _ratio(difference: Tensor, reference: Tensor) -> float:
    """Return difference over reference, or the difference itself where the reference is zero."""
    return float(difference / reference) if float(reference) else float(difference)
