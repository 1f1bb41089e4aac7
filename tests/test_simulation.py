"""What the verdicts do to noise, by simulation: false alarms, coverage, and differences that must be found."""

import numpy as np
import pandas as pd
import pytest

from pmlkit.report.compare import compare, floor_of
from pmlkit.report.frames import KEYS
from pmlkit.stats import LEAST_MARGIN, ratio_of_times

CASES = 20


def table(rng: np.random.Generator, n: int, noise: float, truth: float) -> pd.DataFrame:
    """Return the cells of a simulated campaign: a baseline, its A/A twin, and a candidate `truth` times as slow."""
    rows = []
    for case in range(CASES):
        for label, centre in (("base", 1.0), ("twin", 1.0), ("candidate", truth)):
            values = (centre * np.exp(rng.normal(0, noise, n))).tolist()
            key = dict(zip(KEYS, ("gpu", str(case), "contrastive", "fp32", 128), strict=True))
            rows.append({**key, "label": label, "status": "ok", "values": values, "rounding": 0.0})
    return pd.DataFrame(rows)


def verdicts(seed: int, n: int, noise: float, truth: float, campaigns: int) -> tuple[pd.Series, pd.Series]:
    """Return the verdicts on the candidate and on the twin over several simulated campaigns."""
    rng = np.random.default_rng(seed)
    found: list[pd.Series] = []
    twins: list[pd.Series] = []
    for _ in range(campaigns):
        cells = table(rng, n, noise, truth)
        margin = max(LEAST_MARGIN, floor_of(cells, [("base", "twin")]) or 0.0)
        found.append(compare(cells, "base", "candidate", margin)["verdict"])
        twins.append(compare(cells, "base", "twin", margin)["verdict"])
    return pd.concat(found), pd.concat(twins)


@pytest.mark.parametrize("n", range(5, 16))
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
def test_false_alarms(n: int, noise: float) -> None:
    """The same code under other labels is called faster or slower in at most 1 % of 400 comparisons, whatever the noise."""
    found, twins = verdicts(n, n, noise, 1.0, campaigns=10)
    alarms = pd.concat([found, twins]).isin(["faster", "slower"])
    assert alarms.sum() <= 0.01 * len(alarms)


@pytest.mark.parametrize("n", [5, 7, 10, 15])
@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_coverage(n: int, noise: float) -> None:
    """The 95 % interval covers a true ratio of 1.1 in 93 to 97 % of 2,000 comparisons."""
    rng = np.random.default_rng(n)
    logs = rng.normal(0, noise, (2000, 2, n))
    hits = 0
    for base, candidate in np.exp(logs):
        ratio = ratio_of_times(base.tolist(), (1.1 * candidate).tolist())
        hits += ratio.low <= 1.1 <= ratio.high
    assert 0.93 * 2000 <= hits <= 0.97 * 2000


@pytest.mark.parametrize("start", [5, 7])
def test_coverage_when_rounds_are_added_until_the_interval_is_narrow(start: int) -> None:
    """Stopping by width costs little: 2 % noise, where most series stop between the first rounds and the fifteenth."""
    rng = np.random.default_rng(start)
    hits, lengths = 0, []
    for _ in range(2000):
        base, candidate = np.exp(rng.normal(0, 0.01, (2, 15)))
        n = start
        ratio = ratio_of_times(base[:n].tolist(), candidate[:n].tolist())
        while np.log(ratio.high / ratio.low) / 2 > np.log1p(LEAST_MARGIN) / 2 and n < 15:
            n += 1
            ratio = ratio_of_times(base[:n].tolist(), candidate[:n].tolist())
        lengths.append(n)
        hits += ratio.low <= 1.0 <= ratio.high
    assert start < np.mean(lengths) < 15
    assert 0.93 * 2000 <= hits <= 0.97 * 2000


def test_a_true_difference_is_found() -> None:
    """Ten percent slower at 1 % noise is called slower in at least 99 % of 400 comparisons with seven processes."""
    found, _ = verdicts(0, 7, 0.01, 1.1, campaigns=20)
    assert (found == "slower").sum() >= 0.99 * len(found)
