"""Verdicts: which version is faster on which case, by how much, and how sure that is."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pandas as pd

from pmlkit.errors import PmlkitError, nearest
from pmlkit.report.frames import KEYS
from pmlkit.stats import (
    FALSE_DISCOVERY,
    LEAST_MARGIN,
    Ratio,
    false_discovery,
    geometric_mean,
    noise_floor,
    ratio_of_times,
)

VERDICTS = ("faster", "slower", "no difference", "inconclusive", "not comparable")
RESULTS = ["base_ms", "candidate_ms", "ratio", "low", "high", "p", "q", "verdict", "change"]


def verdict(ratio: Ratio, adjusted_p: float, margin: float) -> str:
    """Return `faster` or `slower` if the whole interval is beyond the margin and adjusted p <= 0.05; `no difference` if
    the whole interval lies inside the margin; else `inconclusive`. margin 0.02 means 1/1.02 to 1.02.
    """
    least, most = 1 / (1 + margin), 1 + margin
    if adjusted_p <= FALSE_DISCOVERY and ratio.high < least:
        return "faster"
    if adjusted_p <= FALSE_DISCOVERY and ratio.low > most:
        return "slower"
    return "no difference" if ratio.low >= least and ratio.high <= most else "inconclusive"


def compare(
    cells: pd.DataFrame, base: str, candidate: str, margin: float = LEAST_MARGIN, rounding: bool = True
) -> pd.DataFrame:
    """Compare two labels over all cases that both name, one row a case.

    cells: columns gpu, op, precision, N, label, status, values (one a process), rounding. The result names its `base` and
    `candidate`. The false-discovery control runs over the table of one GPU. A case that is not ok on either side is
    `not comparable`; its change says why. What is faster or slower in time but not in clock cycles is `inconclusive`
    and `clock-confounded`, where the clock was read (column cycles).
    Raises PmlkitError for an unknown label.
    """
    labels = sorted(cells["label"].unique())
    for label in (base, candidate):
        if label not in labels:
            raise PmlkitError(f"unknown version {label!r} in this table: {nearest(label, labels)}")
    left, right = by_key(cells, base), by_key(cells, candidate)
    rows = [_row(key, cell, right[key], rounding) for key, cell in left.items() if key in right]
    for gpu in {row["gpu"] for row in rows}:
        measured = [row for row in rows if row["gpu"] == gpu and "p" in row]
        for row, adjusted in zip(measured, false_discovery([row["p"] for row in measured]), strict=True):
            row["q"] = adjusted
            row["verdict"] = verdict(Ratio(row["ratio"], row["low"], row["high"], row["p"]), adjusted, margin)
            _hold_in_cycles(row, adjusted, margin)
    return pd.DataFrame(rows, columns=[*KEYS, *RESULTS]).assign(base=base, candidate=candidate)


def compare_all(cells: pd.DataFrame, labels: list[str], margin: float = LEAST_MARGIN) -> pd.DataFrame:
    """Return the comparisons of every pair of labels, the earlier label as base; an empty table for fewer than two."""
    tables = [compare(cells, *pair, margin) for pair in itertools.combinations(labels, 2)]
    empty = pd.DataFrame(columns=[*KEYS, *RESULTS, "base", "candidate"])
    return pd.concat(tables, ignore_index=True) if tables else empty


def counts(table: pd.DataFrame) -> dict[str, int]:
    """Return how often each verdict occurs, in the fixed order of VERDICTS."""
    found = Counter(table["verdict"])
    return {name: found[name] for name in VERDICTS if found[name]}


def count_sentence(table: pd.DataFrame) -> str:
    """Return the counts as words: `8 faster, 5 slower, 5 inconclusive of 18; not comparable: 2 oom -> ok`."""
    comparable = table[table["verdict"] != "not comparable"]
    words = ", ".join(f"{n} {name}" for name, n in counts(comparable).items()) or "nothing comparable"
    changes = Counter(table.loc[table["verdict"] == "not comparable", "change"])
    rest = "; not comparable: " + ", ".join(f"{n} {change}" for change, n in sorted(changes.items())) if changes else ""
    return f"{words} of {len(comparable)}{rest}"


def overall(table: pd.DataFrame) -> tuple[float, int] | None:
    """Return the geometric mean of ratios over the cases that are ok on both sides, and how many they are."""
    ratios = table["ratio"].dropna().tolist()
    return (geometric_mean(ratios), len(ratios)) if ratios else None


def floor_of(cells: pd.DataFrame, arms: Iterable[tuple[str, str]]) -> float | None:
    """Return the A/A noise floor of a run: over every case, how far two arms of one subject differ."""
    base: list[Any] = []
    again: list[Any] = []
    for first, second in arms:
        left, right = by_key(cells, first), by_key(cells, second)
        shared = [key for key in left if key in right]
        base += [left[key]["values"] for key in shared]
        again += [right[key]["values"] for key in shared]
    return noise_floor(base, again)


def by_key(cells: pd.DataFrame, label: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the cells of a label by what a comparison holds equal: plain rows, for an index of frames is slow to ask."""
    rows: list[dict[Any, Any]] = cells[cells["label"] == label].to_dict("records")
    return {tuple(row[key] for key in KEYS): row for row in rows}


def _hold_in_cycles(row: dict[str, Any], adjusted_p: float, margin: float) -> None:
    """Take back a decision that clock cycles do not bear out: then the clock was faster, not the code."""
    base, candidate = row.pop("cycles")
    if row["verdict"] not in ("faster", "slower") or min(len(base), len(candidate)) < 2:
        return
    if verdict(ratio_of_times(base, candidate), adjusted_p, margin) != row["verdict"]:
        row["verdict"], row["change"] = "inconclusive", "clock-confounded"


def _row(key: Any, left: Any, right: Any, rounding: bool) -> dict[str, Any]:
    """Return one comparison without its verdict; cells that are not ok, or have one process only, are not comparable."""
    row: dict[str, Any] = dict(zip(KEYS, key, strict=True))
    for name, cell in (("base_ms", left), ("candidate_ms", right)):
        row[name] = geometric_mean(cell["values"]) if len(cell["values"]) else None
    if left["status"] != "ok" or right["status"] != "ok":
        return row | {"verdict": "not comparable", "change": f"{left['status']} → {right['status']}"}
    if min(len(left["values"]), len(right["values"])) < 2:
        return row | {"verdict": "not comparable", "change": "one process only"}
    ratio = ratio_of_times(left["values"], right["values"], (left["rounding"] + right["rounding"]) if rounding else 0.0)
    cycles = left.get("cycles", []), right.get("cycles", [])
    found = {"ratio": ratio.estimate, "low": ratio.low, "high": ratio.high, "p": ratio.p}
    return row | found | {"cycles": cycles, "change": ""}
