"""The importer of the PML page: what it reads, what it refuses, and the committed records."""

import csv
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from pmlkit.errors import PmlkitError
from pmlkit.losses.work import loss_work
from pmlkit.paths import data
from pmlkit.published.__main__ import import_file, main, write_source
from pmlkit.published.pml_page import import_page
from pmlkit.release import LossValues, PublishedRecord, read_published

SMALL = Path(__file__).parent / "fixtures" / "page_small.txt"
FIRST = "card-a-40gb/contrastive/standard/fp32/n64/2.10"


@pytest.fixture
def small() -> list[PublishedRecord]:
    """The records of the small page."""
    return import_page(SMALL.read_text(), "some/folder/page_small.txt")


@pytest.fixture(scope="module")
def committed() -> list[PublishedRecord]:
    """The committed records."""
    lines = read_published("pml-3.0.1")
    assert not lines.problems
    return lines.records


def edited(line: int, *new: str) -> str:
    """Return the small page with one line replaced by others (none: dropped)."""
    lines = SMALL.read_text().split("\n")
    lines[line - 1 : line] = new
    return "\n".join(lines)


def test_small_page_first_record(small: list[PublishedRecord]) -> None:
    """A row becomes a record with every field where it belongs, sizes read from the page."""
    record = small[0]
    assert (record.row, record.file, record.op) == (FIRST, "page_small.txt", "contrastive")
    assert record.shape == {"N": 64, "D": 32, "per_class": 2}
    assert record.work == loss_work("contrastive", record.shape, "fp32")
    assert record.environment["gpu_memory_gib"] == "39.5" and record.environment["cuda"] == "99.0"
    assert list(record.printed.values()) == ["2", "0.659", "1.3", "1.95\N{EN DASH}2.04", "30"]
    assert record.loss and record.loss.low_ms and record.loss.low_ms.value == 1.95


def test_small_page_proxies_and_oom(small: list[PublishedRecord]) -> None:
    """A proxy loss has classes, an oom row keeps its dashes and no value."""
    oom = next(record for record in small if record.status == "oom")
    assert oom.shape == {"N": 1024, "D": 32, "C": 1100} and oom.precision == "bf16" and oom.gpu == "Card B"
    assert set(oom.printed.values()) == {"—"}
    assert oom.loss == LossValues(**dict.fromkeys(LossValues.__struct_fields__))


def test_versions_stay_strings(small: list[PublishedRecord]) -> None:
    """2.10 does not become 2.1, and a hash that looks like a float stays an identifier beside its display name."""
    assert {(record.version, record.display_name) for record in small} == {
        ("2.10", "2.10"), ("candidate-12e4567", "2.11 code"),
    }  # fmt: skip


def test_copy_with_other_spacing(small: list[PublishedRecord]) -> None:
    """Carriage returns, no-break spaces and blank lines of another copy change nothing."""
    text = SMALL.read_text().replace("Card B", "Card\u00a0B").replace("2.10 |\n", "2.10 |\r\n\n")
    assert import_page(text, "page_small.txt") == small


MALFORMED = [
    (28, ["Peak |"], 21, "'GPU': expected a table with the column 'Peak MiB'"),
    (23, [], 21, "expected a table with the column 'Status'"),
    (28, ["Peak MiB |", "Joules |"], 21, "expected a header of the 8 columns"),
    (31, ["okay |"], 31, "'okay': expected a known status; did you mean 'ok'?"),
    (20, ["Contrastve · standard · float32 · batch 64"], 20, "'Contrastve': expected a known loss title; did you mean"),
    (20, ["Contrastive · standard · float16 · batch 64"], 20, "'float16': expected a known dtype"),
    (20, ["Contrastive · long · float32 · batch 64"], 20, "'long': expected a known category"),
    (20, ["Contrastive · standard · batch 64"], 20, "'LOSS · CATEGORY · DTYPE · batch N'"),
    (32, ["2.O |"], 32, "'2.O': expected a number"),
    (32, ["1e3 |"], 32, "'1e3': expected a number"),
    (32, ["21,18 |"], 32, "'21,18': expected a number"),
    (32, ["2.001 |"], 32, "three significant digits"),
    (32, ["0 |"], 32, "expected a positive number"),
    (32, ["— |"], 32, "expected a number beside status ok"),
    (35, ["1.95-2.04 |"], 35, "'1.95-2.04': expected a range LOW\N{EN DASH}HIGH with an en dash"),
    (35, ["2.04\N{EN DASH}1.95 |"], 35, "expected low and high around the total 2"),
    (35, ["2.95\N{EN DASH}3.04 |"], 35, "expected low and high around the total 2"),
    (36, [], 29, "'Card-A 40GB': expected a row of 8 cells, found 7"),
    (36, ["30 |", "31 |"], 29, "expected a row of 8 cells, found 9"),
    (29, ["| Card-C 40GB |"], 29, "expected a known GPU of the hardware table; did you mean 'Card-A 40GB'?"),
    (38, ["2.10 |"], 38, "'2.10': expected each version once for Card-A 40GB in a table"),
    (38, ["2.12 code |"], 38, "'2.12 code': expected a release number"),
    (3, ["keep their identifiers."], 38, "'2.11 code': expected a release number"),
    (14, ["| Card-A 40GB |"], 14, "expected each GPU once in the hardware table"),
    (18, [], 14, "expected a row of 5 cells, found 4"),
    (19, [], 19, "'standard': expected a known category"),
    (20, ["ProxyAnchor · standard · bfloat16 · batch 1,024"], 61, "this title stands twice"),
    (19, ["NT-Xent · standard · float32 · batch 8"], 19, "expected a table below this title"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "new", "at", "expected"), MALFORMED)
def test_malformed_page(line: int, new: list[str], at: int, expected: str) -> None:
    """A malformed page is refused with file, line, the offending text and what was expected."""
    with pytest.raises(PmlkitError) as caught:
        import_page(edited(line, *new), "page_small.txt")
    assert str(caught.value).startswith(f"page_small.txt:{at}: ") and expected in str(caught.value)


def test_truncated_page() -> None:
    """A copy that lost its last rows is refused, not imported short; so is a page without tables."""
    lines = SMALL.read_text().split("\n")
    with pytest.raises(PmlkitError, match=r"page\.txt:61: .*expected a row for Card B and version 2\.11 code"):
        import_page("\n".join(lines[:93]), "page.txt")
    with pytest.raises(PmlkitError, match=r"page\.txt:1: .*found none"):
        import_page("\n".join(lines[:19]), "page.txt")
    with pytest.raises(PmlkitError, match=r"page\.txt:2: '5': expected the first cell of a row"):
        import_page("prose\n5 |\n", "page.txt")


def test_write_is_repeatable(small: list[PublishedRecord], tmp_path: Path) -> None:
    """The same records give the same bytes, and a row that stands twice is refused."""
    first = [path.read_bytes() for path in write_source(small, tmp_path / "a")]
    assert first == [path.read_bytes() for path in write_source(small, tmp_path / "b")]
    with pytest.raises(PmlkitError, match="stands 2 times"):
        write_source([small[0], small[0]], tmp_path)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes both files and counts by status; bad input ends with status 2 and a remedy."""
    monkeypatch.setenv("PMLKIT_HOME", str(tmp_path))
    assert main(["pml-3.0.1", str(SMALL)]) == 0
    assert "8 records: 7 ok, 1 oom" in capsys.readouterr().out
    assert len(read_published("pml-3.0.1").records) == 8
    assert main(["pml-3.0.2", str(SMALL)]) == 2 and "did you mean 'pml-3.0.1'?" in capsys.readouterr().err
    assert main(["pml-3.0.1"]) == 2 and "usage" in capsys.readouterr().err
    with pytest.raises(PmlkitError, match=r"missing\.txt: .*pass the file as published"):
        import_file("pml-3.0.1", tmp_path / "missing.txt")


def test_committed_counts(committed: list[PublishedRecord]) -> None:
    """The committed source holds 20 configurations on 2 GPUs in 3 versions: 116 ok, 4 oom."""
    assert Counter(record.status for record in committed) == {"ok": 116, "oom": 4}
    axes = [{getattr(record, axis) for record in committed} for axis in ("gpu", "version", "op")]
    assert [len(values) for values in axes] == [2, 3, 4]
    assert len({record.row for record in committed}) == 120
    names = Counter((record.version, record.display_name) for record in committed)
    assert names[("candidate-32bcfa8", "3.0.1 code")] == 40 and names[("2.9.0", "2.9.0")] == 40


@pytest.mark.parametrize(
    ("text", "half_width"),
    [("2", 0.005), ("30", 0.05), ("2,118", 0.5), ("0.659", 0.0005), ("22.1", 0.05), ("134", 0.5)],
)
def test_committed_half_width(committed: list[PublishedRecord], text: str, half_width: float) -> None:
    """A figure's half-width is half its third significant digit, dropped zeros counted, half a unit from 1,000."""
    columns = {"total": "total_ms", "forward": "forward_ms", "backward": "backward_ms", "peak": "peak_mib"}
    found = [
        getattr(record.loss, columns[name])
        for record in committed
        for name, printed in record.printed.items()
        if printed == text
    ]
    assert found and {(p.value, p.half_width) for p in found} == {(float(text.replace(",", "")), half_width)}


def test_committed_round_trip(committed: list[PublishedRecord]) -> None:
    """Values survive JSON, printed strings and values agree, and the table has the same rows and strings."""
    assert [msgspec.json.decode(msgspec.json.encode(r), type=PublishedRecord) for r in committed] == committed
    with (data() / "published" / "pml-3.0.1.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["row"] for row in table] == [record.row for record in committed]
    for row, record in zip(table, committed, strict=True):
        assert {name: row[f"printed_{name}"] for name in record.printed} == record.printed
        assert (row["version"], row["status"]) == (record.version, record.status)
        if record.loss and record.loss.total_ms:
            assert record.loss.total_ms.value == float(record.printed["total"].replace(",", ""))
