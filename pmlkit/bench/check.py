"""The gate before any timing: is the answer right?"""

import math

import torch
from torch import Tensor

from pmlkit.case import Case
from pmlkit.losses.bind import Bound, LossInputs, Triplets, exact
from pmlkit.losses.sampled import exact_of_rows
from pmlkit.precision import precision
from pmlkit.record import Check

REFERENCE = "closed form in float64 on the same rounded inputs"
LARGEST = 40_000  # rows of a batch whose float64 matrices of all pairs fit into the 141 GB of an H200
SAMPLE = 256  # rows that stand for a larger one


def check_answer(case: Case, inputs: LossInputs, bound: Bound) -> Check:
    """Compare loss and gradients of one pair with float64; the limit is the tolerance of the case's precision.

    A subject that mines in its own arithmetic picks other triplets where distances tie within a rounding step, so its
    gradient is compared at *its own* triplets, and those must lie as near to the best ones as the format can tell.
    Of a batch too large for matrices of all pairs, gradients and mining are compared for a sample of rows.
    """
    bound.poison()
    loss = bound.pair()
    got = [loss.detach(), *(_gradient(leaf).double() / bound.scale for leaf in bound.leaves)]
    large = case.shape["N"] > LARGEST and case.op != "proxy_anchor"
    limit = precision(case.precision).tolerance
    if bound.mined is not None and large:
        return _at_own_triplets(case, inputs, bound.mined(), got, limit)
    if bound.exact is not None:
        wanted, reference = bound.exact(), "its own value in float64"
    elif large:
        rows_S = _sample(case)
        wanted, reference = exact_of_rows(case, inputs, rows_S), f"{REFERENCE}, gradients of {len(rows_S)} rows"
        got = [got[0], got[1][rows_S]]
    else:
        wanted, reference = exact(case, inputs), REFERENCE
    rms, largest, row = _worst(got, wanted)
    check = Check(max_rel=largest, rms_rel=rms, worst_row=row, reference=reference, limit=limit)
    if bound.mined is None or check.passed:
        return check
    own = _at_own_triplets(case, inputs, bound.mined(), got, limit)
    own.plain_rms_rel = rms
    return own


def _at_own_triplets(case: Case, inputs: LossInputs, mined: Triplets, got: list[Tensor], limit: float) -> Check:
    """Compare with float64 at the mined triplets; how far those are from the hardest ones counts as an error."""
    rms, largest, row = _worst(got, exact(case, inputs, mined))
    sample_S = _sample(case) if case.shape["N"] > LARGEST else None
    gap = mining_gap(inputs, mined, sample_S)
    error = None if rms is None else max(rms, gap)
    looked_at = "" if sample_S is None else f", mining of {len(sample_S)} rows"
    reference = f"{REFERENCE}, at the subject's own triplets{looked_at}"
    return Check(max_rel=largest, rms_rel=error, worst_row=row, reference=reference, limit=limit)


def _sample(case: Case) -> Tensor:
    """Return the rows that stand for a large batch: seeded, so that every process of a case looks at the same."""
    return torch.randperm(case.shape["N"], generator=torch.Generator().manual_seed(case.seed))[:SAMPLE]


def mining_gap(inputs: LossInputs, mined: Triplets, anchors_S: Tensor | None = None) -> float:
    """Return how far the mined distances are from the hardest ones, relative to them, in float64.

    anchors_S: rows to look at, None = all. inf if a triplet has a wrong label, or if an anchor that has a positive and
    a negative is missing or repeated.
    """
    rows, labels = torch.nn.functional.normalize(inputs.emb_ND.detach().double()), inputs.labels_N
    anchors_S = torch.arange(len(rows)) if anchors_S is None else anchors_S
    anchors_S = anchors_S.to(rows.device)
    distance = torch.cdist(rows[anchors_S], rows, compute_mode="donot_use_mm_for_euclid_dist")
    same = labels[anchors_S][:, None] == labels[None, :]
    positive = same & (anchors_S[:, None] != torch.arange(len(rows), device=rows.device))
    place = torch.full((len(rows),), -1, device=rows.device).scatter_(
        0, anchors_S, torch.arange(len(anchors_S), device=rows.device)
    )
    a, p, n = (side[place[mined[0]] >= 0] for side in mined)
    i = place[a]
    minable = (positive.any(1) & (~same).any(1)).nonzero()[:, 0]
    if not torch.equal(i.sort().values, minable) or not bool(positive[i, p].all() and (~same)[i, n].all()):
        return math.inf
    hardest_p = distance.masked_fill(~positive, -math.inf).amax(1)[i]
    hardest_n = distance.masked_fill(same, math.inf).amin(1)[i]
    gaps = torch.cat([(distance[i, p] - hardest_p) / hardest_p, (distance[i, n] - hardest_n) / hardest_n])
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
