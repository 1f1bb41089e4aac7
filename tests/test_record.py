"""Records: what a line must be, and what a bad line costs."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pmlkit.errors import PmlkitError
from pmlkit.jsonl import append_line, read_lines
from pmlkit.record import SCHEMA, Record
from pmlkit.run import read_run
from tests import sample_run


def good() -> dict[str, Any]:
    """Return one valid ok record as plain data."""
    return msgspec.to_builtins(next(r for r in sample_run.records() if r.status == "ok"))


def write(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end)
    return path


def test_round_trip(tmp_path: Path) -> None:
    """What is appended comes back equal, in order."""
    made = sample_run.records()[:7]
    for record in made:
        append_line(tmp_path / "records.jsonl", record)
    lines = read_lines(tmp_path / "records.jsonl", Record, SCHEMA)
    assert lines.records == made
    assert lines.problems == []


def test_committed_sample_is_what_its_module_writes(tmp_path: Path) -> None:
    """data/sample equals its generator, byte for byte, and holds every status."""
    sample_run.write(tmp_path)
    committed = Path(__file__).parent.parent / "data" / "sample"
    for name in ("run.json", "records.jsonl"):
        assert (committed / name).read_bytes() == (tmp_path / name).read_bytes()
    assert {record.status for record in sample_run.records()} == {"ok", *sample_run.REASONS}


def changed(**fields: Any) -> str:
    return json.dumps(good() | fields)


BAD_LINES = {
    "unknown key": (changed(speedup=2.0), "unknown field `speedup`"),
    "duplicate key": (changed()[:-1] + ', "op": "ntxent"}', "duplicate key 'op'"),
    "unknown major version": (changed(schema="pmlkit.record/2"), "pmlkit.record/2"),
    "no version": (json.dumps({k: v for k, v in good().items() if k != "schema"}), "schema is None"),
    "NaN": (json.dumps(good() | {"wall_s": float("nan")}), "NaN is not JSON"),
    "Infinity": (json.dumps(good() | {"wall_s": float("inf")}), "Infinity is not JSON"),
    "unknown status": (changed(status="fine"), "Invalid enum value 'fine'"),
    "samples with a failed status": (changed(status="oom", reason="x"), "contradicts samples_ns"),
    "ok without samples": (changed(samples_ns=None), "contradicts samples_ns"),
    "ok with a failed check": (changed(check=good()["check"] | {"rms_rel": 1.0}), "without a passed check"),
    "ok without a check": (changed(check=None), "without a passed check"),
    "ok with a reason": (changed(reason="slow"), "contradicts reason"),
    "failed without a reason": (changed(status="oom", samples_ns=None, reason=None), "contradicts reason"),
    "zero time called ok": (changed(samples_ns={"pair": [[0]]}), "timer_error"),
    "ranks of different count": (changed(samples_ns={"pair": [[1, 2], [3]]}), "one entry per rank"),
    "text for a number": (changed(order="12"), "Expected `int`"),
    "not an object": ("[1, 2]", "schema is None"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_one_clear_error_and_good_lines_survive(tmp_path: Path, kind: str) -> None:
    """Every kind of bad line is one problem with file and line; the lines around it are kept."""
    line, message = BAD_LINES[kind]
    path = write(tmp_path / "records.jsonl", changed(), line, changed(order=9))
    lines = read_lines(path, Record, SCHEMA)
    assert [record.order for record in lines.records] == [good()["order"], 9]
    (problem,) = lines.problems
    assert problem.line == 2
    assert str(problem).startswith(path.as_posix() + ":2: ")
    assert message in problem.message


def test_torn_last_line(tmp_path: Path) -> None:
    """A line cut by a crash is reported as torn; appending again does not glue to it."""
    path = write(tmp_path / "records.jsonl", changed(), changed()[:100], end="")
    (problem,) = read_lines(path, Record, SCHEMA).problems
    assert problem.line == 2
    assert "torn last line" in problem.message
    append_line(path, msgspec.convert(good(), Record))
    lines = read_lines(path, Record, SCHEMA)
    assert len(lines.records) == 2
    assert [p.line for p in lines.problems] == [2]


def test_nan_is_never_written(tmp_path: Path) -> None:
    """A record with NaN is refused before anything reaches the file."""
    record = msgspec.convert(good(), Record)
    record.wall_s = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_line(tmp_path / "records.jsonl", record)
    assert not (tmp_path / "records.jsonl").exists()


def test_a_check_that_is_not_finite_fails() -> None:
    """An answer that is not finite is stored as null and never passes."""
    check = good()["check"] | {"rms_rel": None, "max_rel": None}
    record = good() | {"status": "wrong_result", "reason": "not finite", "samples_ns": None, "check": check}
    assert not msgspec.convert(record, Record).check.passed  # type: ignore[union-attr]


def test_nothing_derived_is_stored() -> None:
    """No field of a record is a speed-up, a rate or a percentage."""
    names = " ".join(Record.__struct_fields__)
    assert not any(word in names for word in ("tflops", "gbps", "percent", "speedup", "mean", "median"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "run.json:1: "), ('{"schema": "pmlkit.record/9"}', "pmlkit.record/9"), ('{"schema": "pmlkit.record/1"}', "missing")],
)
def test_a_bad_run_head_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    """A run.json that cannot be used names the file and the reason."""
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(PmlkitError, match=message):
        read_run(tmp_path)


@pytest.mark.parametrize("text", ['"order": 1, "order": 1, ', '"unheard_of": 1, ', '"wall_s": NaN, '])
def test_a_whole_file_is_read_as_strictly_as_its_lines(tmp_path: Path, text: str) -> None:
    """Reading a file in one go finds what reading it line by line does: one bad line among thousands, by its number."""
    good = [json.dumps(msgspec.to_builtins(record)) for record in sample_run.records()]
    bad = good[5].replace("{", "{" + text, 1)
    path = tmp_path / "records.jsonl"
    path.write_text("".join(f"{line}\n" for line in [*good[:5], bad, *good[6:]]))
    lines = read_lines(path, Record, SCHEMA)
    assert [problem.line for problem in lines.problems] == [6]
    assert len(lines.records) == len(good) - 1
    path.write_text("".join(f"{line}\n" for line in good))
    assert read_lines(path, Record, SCHEMA).records == sample_run.records()
