"""What a report is made of: a run or a published source, read once, with its provenance."""

import hashlib
import html
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from pmlkit import campaign, paths, registry
from pmlkit.errors import PmlkitError, nearest
from pmlkit.jsonl import Problem
from pmlkit.record import Record, Run, read_run
from pmlkit.release import PublishedRecord, published_file, read_published
from pmlkit.report.compare import compare, floor_of
from pmlkit.report.frames import cells_measured, frame_moe, frame_published_losses, frame_records, machine_name
from pmlkit.report.page import Html, note_data
from pmlkit.stats import LEAST_MARGIN


@dataclass(frozen=True)
class RunData:
    """A run folder in memory. frame: one row a process; problems: lines that could not be used."""

    name: str
    folder: Path
    run: Run
    records: list[Record]
    problems: list[Problem]
    frame: pd.DataFrame

    @property
    def cells(self) -> pd.DataFrame:
        """One row per case and arm, for comparisons of the pair time."""
        return cells_measured(self.frame)

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with: the campaign's, or the first recorded."""
        known = campaign.CAMPAIGNS.get(self.run.campaign)
        return known.baseline if known else str(self.frame["label"].iloc[0])

    @property
    def controls(self) -> list[tuple[str, str]]:
        """Pairs of arms that ran one subject at one version: the A/A control."""
        subjects = self._subjects()
        return [(self.baseline, arm) for arm in self.candidates if subjects[arm] == subjects.get(self.baseline)]

    @property
    def floor(self) -> float | None:
        """The A/A noise floor of the run, or None without an A/A control."""
        return floor_of(self.cells, self.controls)

    @property
    def margin(self) -> float:
        """The margin of verdicts: 2 % or the A/A floor, whichever is larger."""
        return max(LEAST_MARGIN, self.floor or 0.0)

    @property
    def comparisons(self) -> pd.DataFrame:
        """Every arm against the baseline, at the run's own margin."""
        return pd.concat([compare(self.cells, self.baseline, arm, self.margin) for arm in self.candidates], ignore_index=True)

    @property
    def candidates(self) -> list[str]:
        """The arms to compare with the baseline; A/A controls come last."""
        subjects = self._subjects()
        arms = [arm for arm in subjects if arm != self.baseline]
        return sorted(arms, key=lambda arm: subjects[arm] == subjects.get(self.baseline))

    def _subjects(self) -> dict[str, tuple[str, str]]:
        """Return subject and version of each arm, in order of appearance."""
        return {row["label"]: (row["subject"], row["version"]) for row in self.frame.to_dict("records")}


@dataclass(frozen=True)
class SourceData:
    """A published source in memory. frame: one row a published row."""

    source: registry.Source
    file: Path
    records: list[PublishedRecord]
    problems: list[Problem]
    frame: pd.DataFrame

    @property
    def labels(self) -> list[str]:
        """Display names of the versions, in order of appearance."""
        return list(dict.fromkeys(self.frame["label"]))


def load_run(name: str) -> RunData:
    """Read a run by name (`latest`, an id, `h200/<id>`, `sample` or a folder).

    Raises PmlkitError for an unknown run and for one without a single usable record.
    """
    folder = paths.find_run(name)
    run, lines = read_run(folder)
    if not lines.records:
        detail = f": {lines.problems[0]}" if lines.problems else ""
        raise PmlkitError(f"run {run.run_id!r} in {paths.relative(folder)} has no usable record{detail}; run it again")
    records = folder / "records.jsonl"
    note_data("sample data" if run.sample else "measured data", run.run_id, paths.relative(records), digest(records))
    return RunData(name, folder, run, lines.records, lines.problems, frame_records(run, lines.records))


def load_source(key: str) -> SourceData:
    """Read a published source. Raises PmlkitError for an unknown one."""
    if key not in registry.SOURCES:
        raise PmlkitError(f"unknown published source {key!r} in registry.py: {nearest(key, list(registry.SOURCES))}")
    lines = read_published(key)
    file = published_file(key)
    note_data("published data", registry.SOURCES[key].title, paths.relative(file), digest(file))
    make = frame_moe if lines.records[0].moe is not None else frame_published_losses
    return SourceData(registry.SOURCES[key], file, lines.records, lines.problems, make(lines.records))


def provenance(data: RunData | SourceData) -> Html:
    """Return the box that opens a report: what was measured on what, by which code, and what became of every case."""
    facts = _run_facts(data) if isinstance(data, RunData) else _source_facts(data)
    counts = Counter(record.status for record in data.records)
    facts["records by status"] = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    facts["unusable lines"] = "; ".join(map(str, data.problems)) or "none"
    if isinstance(data, SourceData):
        kind, text = "PUBLISHED DATA", "Figures released by others; nothing here was measured by pmlkit."
    elif data.run.sample:
        kind, text = "SAMPLE DATA", "Invented numbers that show every status. Run a campaign for real ones."
    else:
        kind, text = "MEASURED DATA", "Measured by pmlkit; every raw sample is in the run folder."
    rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
    markup = f'<div class="provenance"><p class="banner"><strong>{kind}</strong> {text}</p><dl>{rows}</dl></div>'
    return Html(markup, "\n".join([f"[{kind}] {text}", *(f"{k}: {v}" for k, v in facts.items())]))


def digest(path: Path) -> str:
    """Return the first 16 hex digits of a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _run_facts(data: RunData) -> dict[str, str]:
    run, environment = data.run, data.run.environment
    git = environment.get("git")
    packages = environment.get("packages", {})
    state = (
        "unknown (no repository)" if git is None else git["commit"][:12] + (" + uncommitted changes" if git["dirty"] else "")
    )
    return {
        "run": f"{run.run_id} (campaign {run.campaign}, protocol {run.protocol}, seed {run.seed})",
        "machine": f"{machine_name(run)}, {environment.get('cores')} cores",
        "versions": ", ".join(
            f"{name} {packages[name]}" for name in ("torch", "triton", "pytorch-metric-learning") if name in packages
        ),
        "subjects": ", ".join(f"{r.label} = {r.subject} {r.version}" for r in data.frame.drop_duplicates("label").itertuples()),
        "pmlkit commit": state,
        "started": run.started_at,
        "planned and recorded": f"{run.planned} planned, {len(data.records)} recorded",
        "raw records": f"{paths.relative(data.folder / 'records.jsonl')} (sha256 {digest(data.folder / 'records.jsonl')})",
        "command": run.command,
    }


def _source_facts(data: SourceData) -> dict[str, str]:
    first = data.records[0]
    return {
        "source": f"{data.source.title} (file {first.file}, retrieved {first.retrieved or 'on an unrecorded day'})",
        "GPUs": ", ".join(dict.fromkeys(record.gpu for record in data.records)),
        "versions": ", ".join(dict.fromkeys(f"{r.display_name} ({r.version})" for r in data.records if r.version))
        or "none named",
        "method": data.source.method,
        "limits": data.source.limits,
        "raw records": f"{paths.relative(data.file)} (sha256 {digest(data.file)})",
    }
