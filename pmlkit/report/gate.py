"""A verdict table for continuous integration: text, Markdown or JSON, and whether anything in it must fail the build."""

import json
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pmlkit.errors import PmlkitError, nearest
from pmlkit.report.compare import VERDICTS, compare, count_sentence
from pmlkit.report.frames import case_name
from pmlkit.report.load import load_run

# What --fail-on takes beside the verdicts: the candidate's answer was wrong, or it did not run where the base did.
WRONG, BROKEN = "wrong", "broken"


@dataclass(frozen=True)
class Gate:
    """The comparison of two arms of one run. failing: the rows that `--fail-on` names."""

    run_id: str
    base: str
    candidate: str
    margin: float
    table: pd.DataFrame
    failing: pd.DataFrame

    def sentence(self) -> str:
        """Return the verdict in one line."""
        failed = f"; FAILS on {len(self.failing)}" if len(self.failing) else "; passes"
        return f"{self.candidate} against {self.base} in {self.run_id}: {count_sentence(self.table)}{failed}"

    def rows(self) -> list[dict[str, Any]]:
        """Return the table as plain data, one row a case; ratio below 1 = the candidate is faster."""
        failing = set(self.failing.index)
        return [
            {
                "case": case_name(row["op"], row["precision"], row["N"]),
                "measured_on": row["gpu"],
                **{key: _number(row[key]) for key in ("base_ms", "candidate_ms", "ratio", "low", "high", "q")},
                "verdict": row["verdict"],
                "change": row["change"],
                "fails": index in failing,
            }
            for index, row in zip(self.table.index, self.table.to_dict("records"), strict=True)
        ]

    def show(self, form: str) -> str:
        """Return the gate as `text`, `markdown` or `json`."""
        if form == "json":
            head = {"run": self.run_id, "base": self.base, "candidate": self.candidate, "margin": self.margin}
            return json.dumps(head | {"failing": len(self.failing), "rows": self.rows()}, indent=1, allow_nan=False)
        head, cells = _cells(self.rows())
        if form == "markdown":
            lines = [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *cells]]
            return "\n".join([f"**{self.sentence()}**", "", *lines])
        return f"{self.sentence()}\n{pd.DataFrame(cells, columns=head).to_string(index=False)}"


def gate(run: str, base: str, candidate: str, margin: float | None, fail_on: list[str]) -> Gate:
    """Compare two arms of a run; the margin is the run's own (2 % or its A/A floor) unless given.

    fail_on: verdicts, `wrong` or `broken`. Raises PmlkitError for an unknown run, arm or word.
    """
    known = [*VERDICTS, WRONG, BROKEN]
    for word in fail_on:
        if word not in known:
            raise PmlkitError(f"--fail-on {word!r}: {nearest(word, known)}")
    data = load_run(run)
    margin = data.margin if margin is None else margin
    table = compare(data.cells, base, candidate, margin)
    wrong = table["change"].str.endswith("→ wrong_result")
    broken = table["change"].str.startswith("ok →") & ~table["change"].str.endswith("→ ok")
    fails = table["verdict"].isin(fail_on) | (wrong & (WRONG in fail_on)) | (broken & (BROKEN in fail_on))
    return Gate(data.run.run_id, base, candidate, margin, table, table[fails])


def read_margin(text: str | None) -> float | None:
    """Read a margin: `2%` or `0.02`. Raises PmlkitError for anything that is not between 0 and 100 %."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 < value < 1:
        raise PmlkitError(f"--margin {text!r} is not a margin: write 2% or 0.02")
    return value


def _cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    head = ["case", "measured on", "base, ms", "candidate, ms", "time ratio", "95 % interval", "verdict", ""]
    cells = []
    for row in rows:
        numbers = ["—" if row[key] is None else f"{row[key]:.3g}" for key in ("base_ms", "candidate_ms", "ratio")]
        interval = "—" if row["low"] is None else f"{row['low']:.3g} – {row['high']:.3g}"
        verdict = f"{row['verdict']} ({row['change']})" if row["change"] else row["verdict"]
        cells.append([row["case"], row["measured_on"], *numbers, interval, verdict, "FAILS" if row["fails"] else ""])
    return head, cells


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
