"""The statistics of a comparison: an interval on a ratio of times, and control over many comparisons."""

import math
import warnings
from collections.abc import Sequence
from statistics import geometric_mean as geometric_mean
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats

CONFIDENCE = 0.95
FALSE_DISCOVERY = 0.05
LEAST_MARGIN = 0.02


class Ratio(NamedTuple):
    """A ratio of times, candidate over base: estimate, interval, and p for no difference at all."""

    estimate: float
    low: float
    high: float
    p: float


def ratio_of_times(base: Sequence[float], candidate: Sequence[float], rounding: float = 0.0) -> Ratio:
    """Return the ratio of geometric means of process values with Welch's t interval on logarithms.

    base, candidate: one positive value a process, at least two each. rounding: sum of the relative half-widths of
    rounding of both means; it widens the interval on both sides and is taken off the difference that p tests.
    Identical values on both sides give an interval of just that width. Raises ValueError below two values.
    """
    if min(len(base), len(candidate)) < 2:
        raise ValueError(f"an interval needs two processes a side, got {len(base)} and {len(candidate)}")
    logs = [[math.log(value) for value in values] for values in (base, candidate)]
    means = [math.fsum(values) / len(values) for values in logs]
    difference = means[1] - means[0]
    # Plain numbers: on five values a call of numpy costs more than the sum, and a table has ten thousand rows.
    parts = [
        math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
        for values, mean in zip(logs, means, strict=True)
    ]
    error = math.sqrt(sum(parts))
    excess = max(0.0, abs(difference) - rounding)
    if error < 1e-12:  # equal values on each side: rounding is all that is left
        return _ratio(difference, rounding, 0.0 if excess > 1e-12 else 1.0)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, logs, strict=True))
    half = float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error
    return _ratio(difference, half + rounding, float(2 * special.stdtr(freedom, -excess / error)))


def false_discovery(p: Sequence[float]) -> list[float]:
    """Return Benjamini-Hochberg adjusted p values, in the order given."""
    return [float(q) for q in stats.false_discovery_control(p, method="bh")] if len(p) else []


def noise_floor(base: Sequence[Sequence[float]], again: Sequence[Sequence[float]]) -> float | None:
    """Return the A/A floor: how far two arms of one subject differ in 95 % of the cases, or None without any.

    It is taken on logarithms, so that it is the same whichever arm is called first: 0.02 means 1/1.02 to 1.02.
    """
    pairs = [(a, b) for a, b in zip(base, again, strict=True) if min(len(a), len(b)) > 1]
    shifts = [abs(np.log(ratio_of_times(a, b).estimate)) for a, b in pairs]
    return float(np.expm1(np.percentile(shifts, 95))) if shifts else None


def kendall_tau(samples: Sequence[float]) -> float:
    """Return Kendall's tau of samples against their order: +1 = every later sample is slower. 0 for constant samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        result: Any = stats.kendalltau(range(len(samples)), samples)
        tau = float(result.statistic)
    return 0.0 if np.isnan(tau) else tau


def _ratio(difference: float, half: float, p: float) -> Ratio:
    return Ratio(math.exp(difference), math.exp(difference - half), math.exp(difference + half), p)
