"""The gate before any timing of an expert layer: is the answer right, and is a replayed graph's the very same?"""

import math

import torch
from torch import Tensor

from pmlkit.bench.layer import BoundLayer, LayerInputs
from pmlkit.case import Case
from pmlkit.moe.reference import (
    Rounding,
    exact,
    reference,
    reference_backward,
    to_bf16,
    to_mxfp8,
    to_nvfp4,
    to_trained_mxfp8,
)
from pmlkit.precision import precision
from pmlkit.record import Check

_FORMATS = {"mxfp8": to_mxfp8, "nvfp4": to_nvfp4}


@torch.no_grad()
def check_layer(case: Case, inputs: LayerInputs, bound: BoundLayer) -> Check:
    """Compare output and gradients with float64 on the same bf16 inputs, and a replay with the eager pass before it.

    The limit of bf16 is its tolerance. Block-scaled: `bound.slack` times what the exact format is away from float64 on
    these inputs, so that neither easy inputs hide an error nor hard ones make one.
    """
    bound.poison()
    with torch.enable_grad():
        out = bound.pair().detach()
    got = [out, *(torch.full_like(leaf, torch.nan) if leaf.grad is None else leaf.grad for leaf in inputs.leaves)]
    wanted = _answers(inputs, exact)
    limit, against = precision(case.precision).tolerance, "float64 on the same bf16 inputs"
    if case.precision in _FORMATS:
        operands = to_trained_mxfp8 if inputs.grad is not None else _FORMATS[case.precision]
        own = max(distance(value, true)[0] for value, true in zip(_answers(inputs, to_bf16, operands), wanted, strict=True))
        limit = bound.slack * own
        against += f", from which exact {case.precision} is {own:.3e} away"
    errors = [distance(ours, value) for ours, value in zip(got, wanted, strict=True)]
    same = all(map(torch.equal, bound.eager, got)) if bound.eager else None
    check = Check(max_rel=None, rms_rel=None, worst_row=None, reference=against, limit=limit, graph_accepted=same)
    if all(math.isfinite(error) for error, _, _ in errors):
        check.rms_rel = max(error for error, _, _ in errors)
        _, check.max_rel, check.worst_row = max(errors, key=lambda error: error[1])
    return check


def _answers(inputs: LayerInputs, rounded: Rounding, operands: Rounding | None = None) -> list[Tensor]:
    """Return the output in float64 and, in training, the gradients in the order of the leaves."""
    plain = (inputs.x, inputs.ids, inputs.scores, inputs.w13, inputs.w2)
    answers = [reference(*plain, rounded=rounded, operands=operands)]
    if inputs.grad is not None:
        found = reference_backward(inputs.grad, *plain, rounded=rounded, operands=operands)
        answers += [value for value in (found.x_TD, found.scores_TK, found.w13, found.w2) if value is not None]
    return answers


def distance(value: Tensor, wanted: Tensor) -> tuple[float, float, int]:
    """Return ‖difference‖/‖wanted‖, the largest difference over the largest value, and its row, of weights its expert.

    One expert at a time: float64 differences of all experts' gradients would not fit beside them.
    """
    squares = norm = most = top = 0.0
    at = 0
    for place, (one, other) in enumerate(zip(value, wanted, strict=True) if wanted.ndim == 3 else [(value, wanted)]):
        difference = one.double() - other
        squares, norm = squares + float(difference.square().sum()), norm + float(other.square().sum())
        top = max(top, float(other.abs().max()))
        if (largest := float(difference.abs().max())) > most:
            most, at = largest, place if wanted.ndim == 3 else int(difference.abs().amax(1).argmax())
    return math.sqrt(squares / norm) if norm else math.sqrt(squares), most / top if top else most, at
