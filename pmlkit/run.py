"""A run folder: its head (`run.json`), its records (`records.jsonl`) and its sittings (`sittings.jsonl`)."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from pmlkit.errors import PmlkitError
from pmlkit.jsonl import Lines, check_schema, parse_strict, read_lines
from pmlkit.paths import relative
from pmlkit.record import SCHEMA, Record, Strict


class Run(Strict, kw_only=True):
    """The head of a run folder (`run.json`): what was planned, and where it ran.

    device: `cpu` or `cuda`, what was measured. baseline: the arm that the others are compared with.
    """

    schema: str = SCHEMA
    run_id: str
    campaign: str
    protocol: str
    device: Literal["cpu", "cuda"]
    baseline: str
    started_at: str
    seed: int
    planned: int
    command: str
    environment: dict[str, Any]
    sample: bool = False


class Sitting(Strict, kw_only=True):
    """One start of the runner on a run (a line of `sittings.jsonl`): what it wrote, and which condition ended it.

    ended_by: `narrow` = every interval is narrow enough, `most` = the protocol's most processes, `budget`, or
    `interrupted`. wide: comparisons with the baseline whose interval is still wider than half the margin on a side.
    """

    schema: str = SCHEMA
    run_id: str
    started_at: str
    ended_at: str
    ended_by: Literal["narrow", "most", "budget", "interrupted"]
    records: int
    wide: int


def read_sittings(folder: Path) -> list[Sitting]:
    """Return the sittings of a run in time order. One that was killed has left none."""
    path = folder / "sittings.jsonl"
    return read_lines(path, Sitting, SCHEMA).records if path.is_file() else []


def read_run(folder: Path) -> tuple[Run, Lines[Record]]:
    """Read a run folder. Raises PmlkitError if `run.json` cannot be used; bad record lines come back as problems."""
    head = folder / "run.json"
    try:
        document = parse_strict(head.read_text())
        check_schema(document, SCHEMA)
        run = msgspec.convert(document, Run)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise PmlkitError(f"{relative(head)}:1: {error}") from None
    path = folder / "records.jsonl"
    return run, read_lines(path, Record, SCHEMA) if path.is_file() else Lines([], [])
