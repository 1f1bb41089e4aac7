"""Whether a run can be trusted: coverage, noise floor, drift, outliers, and what ended its sittings."""

import math
from collections import Counter
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from pmlkit.report.frames import case_name
from pmlkit.report.load import RunData
from pmlkit.report.page import Html, verdict

MOST_DRIFT = 0.02
_OUTLIER_Z = 3.5
_ENDED = {
    "narrow": "every interval is narrow enough",
    "most": "the protocol's most processes ran",
    "budget": "the budget was spent",
    "interrupted": "it was interrupted",
}


class Drift(NamedTuple):
    """How much slower the sentinel became from its first process to its last, with a 95 % interval; 0.02 = 2 %."""

    change: float
    low: float
    high: float
    processes: int

    @property
    def fails(self) -> bool:
        """Whether the machine drifted: by over 2 %, and by more than the sentinel's own noise."""
        return abs(self.change) > MOST_DRIFT and not self.low <= 0 <= self.high


def drift(data: RunData) -> Drift | None:
    """Return the sentinel's drift by a line through the logarithms of its times, or None below three ok processes."""
    seen = [(datetime.fromisoformat(r.started_at).timestamp(), r.iteration_ns("pair")) for r in data.sentinels]
    points = [(time, float(np.log(value))) for time, value in seen if value]
    times = np.array([time for time, _ in points])
    if len(points) < 3 or np.ptp(times) == 0:
        return None
    line: Any = stats.linregress(times, [value for _, value in points])
    half = float(stats.t.ppf(0.975, len(points) - 2)) * line.stderr
    ends = ((line.slope + side * half) * np.ptp(times) for side in (0, -1, 1))
    return Drift(*(float(np.expm1(end)) for end in ends), processes=len(points))


def outliers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the ok processes that lie far from the median of their case and arm (modified z over 3.5), with the `shift`
    that leaving them out would give their cell's geometric mean. Nothing is ever left out.
    """
    ok = frame[frame["status"] == "ok"].dropna(subset=["pair_ms"])
    rows = []
    for _, group in ok.groupby(["case", "label"], sort=False):
        logs = group["pair_ms"].map(math.log)
        spread = (logs - logs.median()).abs()
        far = 0.6745 * spread > _OUTLIER_Z * spread.median()
        if spread.median() > 0 and far.any():
            rows.append(group[far].assign(shift=float(np.exp(logs[~far].mean() - logs.mean()) - 1)))
    return pd.concat(rows) if rows else ok.iloc[:0].assign(shift=[])


def validity(data: RunData) -> str:
    """Return planned, recorded, failed and flagged counts, noise floor and drift as words; what fails is in capitals."""
    ok = sum(record.status == "ok" for record in data.records)
    flags = Counter(flag for record in data.records for flag in record.flags if not flag.endswith("_bound"))
    flagged = ", ".join(f"{n} {flag}" for flag, n in flags.items()) or "none flagged"
    floor = "no A/A control could be judged" if data.floor is None else f"A/A noise floor {100 * data.floor:.1f} %"
    words = f"{data.run.planned} planned, {len(data.records)} recorded, {ok} ok, {flagged}; {floor}"
    if not ok:
        return f"{words}; NOTHING WAS MEASURED"
    slope = drift(data)
    drifted = f"; THE MACHINE DRIFTED by {100 * slope.change:+.1f} %" if slope is not None and slope.fails else ""
    return f"{words}; margin {100 * data.margin:.1f} %{drifted}"


def verdict_health(data: RunData) -> Html:
    """Return whether a run can be trusted: coverage, the A/A control, drift, outliers, checks."""
    ok = data.frame[data.frame["status"] == "ok"]
    sentences = [f"{'Complete' if len(data.records) >= data.run.planned else 'INCOMPLETE'}: {validity(data)}.", _ended(data)]
    if len(data.control):
        alarms = int(data.control["verdict"].isin(["faster", "slower"]).sum())
        chance = f"{0.05 * len(data.control):.1f}"
        sentences.append(
            f"A/A control: {alarms} false alarms in {len(data.control)} comparisons of the same code with itself; a plain "
            f"5 % rule would raise {chance} by chance."
        )
    sentences += [_drift_words(data), _outlier_words(data.frame)]
    wrong = int((data.frame["status"] == "wrong_result").sum())
    sentences.append(f"Answers: {wrong} wrong, which were not timed.")
    for worst in ok.assign(share=ok["error"] / ok["limit"]).nlargest(1, "share").to_dict("records"):
        case = case_name(worst["op"], worst["precision"], worst["N"])
        sentences.append(
            f"Of the timed answers the nearest to its limit is {worst['label']} on {case} ({worst['error']:.1e}, "
            f"{100 * worst['share']:.0f} % of the limit)."
        )
    return verdict(*sentences)


def _ended(data: RunData) -> str:
    if not data.sittings:
        return ""
    last = data.sittings[-1]
    wide = f"; {last.wide} comparisons are wider than half the margin on a side" if last.wide else ""
    return f"Sittings: {len(data.sittings)}; the last ended because {_ENDED[last.ended_by]}{wide}."


def _drift_words(data: RunData) -> str:
    slope = drift(data)
    if slope is None:
        return ""
    verdict = "which FAILS the run" if slope.fails else "which is within 2 % or the sentinel's own noise"
    return (
        f"Drift: over {slope.processes} processes of the sentinel its time changes by {100 * slope.change:+.1f} % "
        f"[{100 * slope.low:+.1f}, {100 * slope.high:+.1f}] from first to last, {verdict}."
    )


def _outlier_words(frame: pd.DataFrame) -> str:
    far = outliers(frame)
    if far.empty:
        return "Outliers: none."
    shift = far["shift"].abs().max()
    return (
        f"Outliers: {len(far)} processes lie far from the median of their case and arm; all are kept, and leaving them out "
        f"would move a mean by {100 * shift:.1f} % at most."
    )
