"""Intervals and false-discovery control, against hand computation and simulation."""

from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

from pmlkit.stats import false_discovery, geometric_mean, kendall_tau, noise_floor, ratio_of_times


def test_matches_welch_on_logarithms() -> None:
    """Estimate, interval and p equal scipy's Welch test on logarithms."""
    base, candidate = [1.0, 1.1, 1.05], [0.8, 0.9, 0.82, 0.85]
    ratio = ratio_of_times(base, candidate)
    test: Any = scipy_stats.ttest_ind(np.log(candidate), np.log(base), equal_var=False)
    interval = test.confidence_interval(0.95)
    assert ratio.estimate == pytest.approx(geometric_mean(candidate) / geometric_mean(base))
    assert (ratio.low, ratio.high) == pytest.approx((np.exp(interval.low), np.exp(interval.high)))
    assert ratio.p == pytest.approx(test.pvalue)


def test_rounding_widens_the_interval_and_weakens_p() -> None:
    """Half-widths of rounding are added on both sides, and taken off the difference that p tests."""
    plain, rounded = (ratio_of_times([1.0, 1.02, 0.99], [1.1, 1.12, 1.09], r) for r in (0.0, 0.01))
    assert rounded.high == pytest.approx(plain.high * np.exp(0.01))
    assert rounded.low == pytest.approx(plain.low / np.exp(0.01))
    assert rounded.p > plain.p


def test_identical_triples_have_the_width_of_rounding() -> None:
    """Low = high on both sides gives no zero-width interval and no warning; equal printed values are no difference."""
    same = ratio_of_times([3.15] * 3, [3.15] * 3, rounding=0.003)
    assert (same.low, same.high) == pytest.approx((np.exp(-0.003), np.exp(0.003)))
    assert same.p == 1.0
    apart = ratio_of_times([1.40] * 3, [1.32] * 3, rounding=0.007)
    assert apart.p == 0.0
    assert apart.high < 1


@pytest.mark.parametrize("n", [3, 5, 7])
@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_interval_covers_the_truth(n: int, noise: float) -> None:
    """Over 1,000 simulated comparisons with a true ratio of 1.1 the 95 % interval covers it 93 to 98 % of the time."""
    rng = np.random.default_rng(n)
    hits = 0
    for _ in range(1000):
        base, candidate = np.exp(rng.normal(0, noise, n)), 1.1 * np.exp(rng.normal(0, noise, n))
        ratio = ratio_of_times(base.tolist(), candidate.tolist())
        hits += ratio.low <= 1.1 <= ratio.high
    assert 930 <= hits <= 980


def test_one_process_has_no_interval() -> None:
    """A single value a side is refused."""
    with pytest.raises(ValueError, match="two processes a side"):
        ratio_of_times([1.0], [1.0, 2.0])


def test_false_discovery_by_hand() -> None:
    """Benjamini-Hochberg: p times m over rank, made monotone, in the order given."""
    assert false_discovery([0.04, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])
    assert false_discovery([]) == []


def test_noise_floor() -> None:
    """The floor is the 95th percentile of |ratio - 1|; no pairs, no floor."""
    assert noise_floor([[1.0, 1.0]], [[1.05, 1.05]]) == pytest.approx(0.05)
    assert noise_floor([], []) is None
    assert noise_floor([[1.0]], [[1.0]]) is None


def test_kendall_tau() -> None:
    """Rising samples give +1, falling -1, constant ones 0 without a warning."""
    assert kendall_tau([1, 2, 3]) == 1
    assert kendall_tau([3, 2, 1]) == -1
    assert kendall_tau([2, 2, 2]) == 0
