"""The importer of the GB300 report: what it reads, what it refuses, and the committed records."""

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pmlkit.errors import PmlkitError
from pmlkit.moe.work import layer_work
from pmlkit.paths import data
from pmlkit.published.__main__ import write_source
from pmlkit.published.moe_report import import_report
from pmlkit.release import PublishedRecord, read_published

SMALL = Path(__file__).parent / "fixtures" / "report_small.json"
FIRST = "inference-ep2-bf16-standard-single_layer-F128-i1"
TRAINING = "training-ep2-mxfp8-mega-single_layer-F128-i1"


@pytest.fixture
def small() -> list[PublishedRecord]:
    """The records of the small report."""
    return import_report(SMALL.read_text(), "some/folder/report_small.json")


@pytest.fixture(scope="module")
def committed() -> list[PublishedRecord]:
    """The committed records."""
    lines = read_published("gb300-moe")
    assert not lines.problems
    return lines.records


def edited(case: str, edit: Callable[[dict[str, Any]], Any]) -> str:
    """Return the small report with one case changed in place."""
    document = json.loads(SMALL.read_text())
    edit(next(c for c in document["cases"] if c["id"] == case))
    return json.dumps(document)


def refusal(text: str) -> str:
    """Return the message with which a report is refused; it names the file and a remedy."""
    with pytest.raises(PmlkitError) as caught:
        import_report(text, "report.json")
    assert str(caught.value).startswith("report.json:") and "correct the file, or teach" in str(caught.value)
    return str(caught.value)


def test_small_report_record(small: list[PublishedRecord]) -> None:
    """A case becomes a record with every field where it belongs and the work of its layer."""
    record = small[-1]
    assert record.moe and record.row == TRAINING and record.file == "report_small.json"
    assert (record.gpu, record.subject, record.version, record.pipeline) == ("Invented Card", None, None, "mega")
    assert record.shape == {"T": 64, "D": 64, "E": 4, "K": 2, "F": 128}
    assert record.environment["date"] == "2001-02-03"
    assert list(record.moe.windows_ms) == ["forward", "backward", "layer"]
    assert record.moe.windows_ms["layer"] == [0.9, 0.91, 0.92] and record.moe.layer_ms == 0.91
    sizes = {"tokens": 64, "hidden": 64, "width": 128, "experts": 4, "top_k": 2, "ep": 2}
    assert record.work == layer_work(**sizes, precision="mxfp8", mode="training", imbalance=1.0)


def test_printed_digits_are_kept(small: list[PublishedRecord]) -> None:
    """Literals stand as in the file: no digit and no zero is lost, null has none."""
    printed = small[0].printed
    assert printed["analyticalHBMGBps"] == "321.00000000000000000010" and printed["allocatedPeakGiB"] == "0.500"
    assert printed["ep"] == "2" and "backwardMS" not in printed and "mode" not in printed


def test_repeated_configuration_stays_two_rows(small: list[PublishedRecord], tmp_path: Path) -> None:
    """One configuration under two categories gives two records, in the files too."""
    assert [record.category for record in small[:2]] == ["single_layer", "width"]
    jsonl, table = write_source(small, tmp_path)
    assert len(jsonl.read_text().splitlines()) == 4 and len(table.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [("numericalAccepted", False, "wrong_result"), ("graphAccepted", False, "wrong_result"), ("ooms", 2, "oom")],
)
def test_status_from_flags(key: str, value: Any, status: str) -> None:
    """A case that was refused or ran out of memory says so and keeps its values."""
    record = import_report(edited(FIRST, lambda case: case.update({key: value})), "report.json")[0]
    assert record.status == status and record.moe and record.moe.layer_ms == 0.25


MALFORMED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda c: c.update(forwardMs=1.0), "unknown key 'forwardMs'; did you mean 'forwardMS'?"),
    (lambda c: c.pop("ooms"), "the key 'ooms' is missing"),
    (lambda c: c.update(layerMS="0.91"), "Expected `float`, got `str` - at `$.layerMS`"),
    (lambda c: c.update(mode="trainig"), "'trainig'"),
    (lambda c: c.update(forwardMS=float("nan")), "forwardMS is nan"),
    (lambda c: c["windows"].update(forward=[0.3, float("inf"), 0.32]), "windows.forward[1] is inf"),
    (lambda c: c.update(forwardMS=0.32), "the forward time 0.32 is not the median of its windows [0.3, 0.31, 0.32]"),
    (lambda c: c.update(layerMS=0.92), "the combined time 0.92 is not the median"),
    (lambda c: c.update(backwardMS=None), "the backward time None is not the median"),
    (lambda c: c["windows"].pop("backward"), "windows are combined, forward"),
    (lambda c: c["windows"].update(combined=[]), "windows.combined [] should be positive times"),
    (lambda c: c["windows"].update(forward=[0.0, 0.31, 0.32]), "windows.forward [0.0, 0.31, 0.32] should be positive"),
    (lambda c: c.update(arenaBytes=12287), "arenaBytes 12287 is not slotBytes 4096 + scratchBytes 8192"),
    (lambda c: c.update(receiveRows=[128]), "1 receiveRows and 2 savedBytes do not fit ep 2"),
    (lambda c: c.update(imbalance=2.0), f"its fields say the id is '{TRAINING[:-1]}2'"),
]


@pytest.mark.parametrize(("edit", "expected"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_case(edit: Callable[[dict[str, Any]], Any], expected: str) -> None:
    """A malformed or contradictory case is refused with file, case id, what is wrong and a remedy."""
    message = refusal(edited(TRAINING, edit))
    assert f"report.json: case {TRAINING!r}: " in message and expected in message


def test_malformed_text() -> None:
    """Keys and cases that stand twice, an impossible layer and broken JSON are refused and placed."""
    text = SMALL.read_text()
    twice = text.replace('"ooms": 0', '"ooms": 0, "ooms": 1', 1)
    assert f"case {FIRST!r}: the key 'ooms' stands twice" in refusal(twice)
    twice = text.replace('"forward": [0.3,', '"forward": [], "forward": [0.3,')
    assert f"case {TRAINING!r}: the key 'windows.forward' stands twice" in refusal(twice)
    line = next(line for line in text.splitlines() if FIRST in line)
    assert f"case {FIRST!r}: this id stands twice" in refusal(text.replace(line, line * 2))
    assert f"case {FIRST!r}: ep 2 in layer_work does not divide 3 experts" in refusal(text.replace('"E": 4', '"E": 3'))
    assert refusal(text[:300]).startswith("report.json:3: ")
    assert "expected an object of 'meta' and a list 'cases'" in refusal("[]")
    assert "cases[0]: the key 'id' is missing" in refusal(text.replace(f'"id": "{FIRST}", ', ""))
    assert "cases[0]: expected an object" in refusal(text.replace("[\n {", "[3,\n {"))
    assert "meta: Object missing required field `date`" in refusal(text.replace('"date": "2001-02-03", ', ""))
    assert "meta: Invalid enum value 2 - at `$.shape.layers`" in refusal(text.replace('"layers": 1', '"layers": 2'))


def test_committed_counts(committed: list[PublishedRecord]) -> None:
    """The committed source holds 63 accepted cases; the seven configurations measured twice are all there."""
    assert Counter(record.status for record in committed) == {"ok": 63}
    axes = ("mode", "ep", "precision", "pipeline", "imbalance")
    counts = Counter((*(getattr(r, axis) for axis in axes), r.shape["F"]) for r in committed)
    assert sorted(counts.values()) == [1] * 49 + [2] * 7
    assert len({record.row for record in committed}) == 63
    assert all(r.subject is None and r.version is None and r.url is None for r in committed)


def test_committed_round_trip(committed: list[PublishedRecord]) -> None:
    """Values survive JSON, equal the printed digits, and the table has the same rows and strings."""
    assert [msgspec.json.decode(msgspec.json.encode(r), type=PublishedRecord) for r in committed] == committed
    with (data() / "published" / "gb300-moe.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["row"] for row in table] == [record.row for record in committed]
    for row, record in zip(table, committed, strict=True):
        assert record.moe and record.moe.layer_ms == float(record.printed["layerMS"])
        assert {name: row[f"printed_{name}"] for name in record.printed} == record.printed
        assert ("backward" in record.moe.windows_ms) == (record.mode == "training")
