"""What a report is made of: a run or a published source, read once, with its provenance."""

import hashlib
import html
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import pandas as pd

from pmlkit import paths, registry
from pmlkit.campaign import SENTINEL
from pmlkit.errors import PmlkitError, nearest
from pmlkit.jsonl import Problem, uncollected
from pmlkit.record import Record
from pmlkit.release import PublishedRecord, published_file, read_published
from pmlkit.report.compare import compare_all, floor_of
from pmlkit.report.frames import cells_measured, frame_moe, frame_published_losses, frame_records, machine_name
from pmlkit.report.page import RUN_KINDS, Html, note_data
from pmlkit.run import Run, Sitting, read_run, read_sittings
from pmlkit.stats import LEAST_MARGIN


@dataclass(frozen=True)
class RunData:
    """A run folder in memory.

    records: what was planned; sentinels: the records that watch for drift. sittings: what ended each start of the runner.
    problems: lines that could not be used.
    """

    name: str
    folder: Path
    run: Run
    records: list[Record]
    sentinels: list[Record]
    sittings: list[Sitting]
    problems: list[Problem]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a process, the sentinel's left out."""
        return frame_records(self.run, self.records)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per case and arm, for comparisons of the pair time."""
        return cells_measured(self.run, self.records)

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with: the campaign's, or, where it did not run, the first recorded."""
        arms = list(self.subjects)
        return self.run.baseline if self.run.baseline in arms else self.records[0].arm

    @cached_property
    def subjects(self) -> dict[str, tuple[str, str]]:
        """Subject and version of each arm, by name."""
        found = {record.arm: (record.subject, record.version) for record in self.records}
        return {arm: found[arm] for arm in sorted(found)}

    @property
    def candidates(self) -> list[str]:
        """The arms to compare with the baseline; A/A controls come last."""
        arms = [arm for arm in self.subjects if arm != self.baseline]
        return sorted(arms, key=lambda arm: self.subjects[arm] == self.subjects[self.baseline])

    @property
    def controls(self) -> list[tuple[str, str]]:
        """Pairs of arms that ran one subject at one version: the A/A control."""
        same = self.subjects[self.baseline]
        return [(self.baseline, arm) for arm in self.candidates if self.subjects[arm] == same]

    @cached_property
    def floor(self) -> float | None:
        """The A/A noise floor of the run, or None without an A/A control."""
        return floor_of(self.cells, self.controls)

    @property
    def margin(self) -> float:
        """The margin of verdicts: 2 % or the A/A floor, whichever is larger."""
        return max(LEAST_MARGIN, self.floor or 0.0)

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Every pair of arms, at the run's own margin."""
        return compare_all(self.cells, [self.baseline, *self.candidates], self.margin)

    @property
    def comparisons(self) -> pd.DataFrame:
        """Every arm against the baseline, at the run's own margin."""
        return self.pairs[self.pairs["base"] == self.baseline]

    @property
    def control(self) -> pd.DataFrame:
        """The comparisons of the A/A control that could be judged."""
        arms = [arm for _, arm in self.controls]
        return self.comparisons[self.comparisons["candidate"].isin(arms) & (self.comparisons["verdict"] != "not comparable")]


@dataclass(frozen=True)
class SourceData:
    """A published source in memory. frame: one row a published row."""

    source: registry.Source
    file: Path
    records: list[PublishedRecord]
    problems: list[Problem]
    frame: pd.DataFrame

    @property
    def kind(self) -> str:
        """What it is about: `losses` or `moe`."""
        return "losses" if self.records[0].moe is None else "moe"

    @property
    def labels(self) -> list[str]:
        """Display names of the versions, in order of appearance."""
        return list(dict.fromkeys(self.frame["label"]))


def load_run(name: str) -> RunData:
    """Read a run by name (`latest`, an id, `h200/<id>` or `h200/<campaign>`, `sample`, or a folder).

    Of a process that was tried again the last try counts, and that is reported. Raises PmlkitError for an unknown run
    and for one without a single usable record.
    """
    folder = paths.find_run(name)
    with uncollected():
        return _read(name, folder)


def _read(name: str, folder: Path) -> RunData:
    run, lines = read_run(folder)
    used = list({record.key: record for record in lines.records}.values())
    planned = [record for record in used if record.arm != SENTINEL]
    if not planned:
        detail = f": {lines.problems[0]}" if lines.problems else ""
        raise PmlkitError(f"run {run.run_id!r} in {paths.relative(folder)} has no usable record{detail}; run it again")
    file = folder / "records.jsonl"
    problems = list(lines.problems)
    if (repeats := len(lines.records) - len(used)) > 0:
        problems.append(Problem(paths.relative(file), 0, f"{repeats} records are superseded by a later try and not used"))
    note_data(RUN_KINDS[run.sample], run.run_id, shown(file, run.run_id), digest(file))
    return RunData(
        name=name,
        folder=folder,
        run=run,
        records=planned,
        sentinels=[record for record in used if record.arm == SENTINEL],
        sittings=read_sittings(folder),
        problems=problems,
    )


def load_source(key: str, kind: Literal["losses", "moe"]) -> SourceData:
    """Read a published source of a kind. Raises PmlkitError for an unknown or empty one, or one of the other kind."""
    data = load_any_source(key)
    if data.kind != kind:
        fitting = [name for name in registry.SOURCES if load_any_source(name).kind == kind]
        raise PmlkitError(f"published source {key!r} is not about {kind}: use {' or '.join(fitting)}")
    return data


def load_any_source(key: str) -> SourceData:
    """Read a published source. Raises PmlkitError for an unknown or empty one."""
    if key not in registry.SOURCES:
        raise PmlkitError(f"unknown published source {key!r} in registry.py: {nearest(key, list(registry.SOURCES))}")
    lines, file = read_published(key), published_file(key)
    if not lines.records:
        raise PmlkitError(f"published source {key!r} has no usable record in {paths.relative(file)}: import it again")
    note_data("published data", registry.SOURCES[key].title, paths.relative(file), digest(file))
    frame = (frame_published_losses if lines.records[0].moe is None else frame_moe)(lines.records)
    return SourceData(registry.SOURCES[key], file, lines.records, lines.problems, frame)


def shown(file: Path, run_id: str) -> str:
    """Return how a page names a run's file: inside the project by its path, elsewhere without the machine's folders."""
    inside = file.resolve().is_relative_to(paths.root().resolve())
    return paths.relative(file) if inside else f"{run_id}/{file.name}"


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
        "raw records": f"{shown(data.folder / 'records.jsonl', run.run_id)} (sha256 {digest(data.folder / 'records.jsonl')})",
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
