"""Runs that are not as expected: every one of them still gives a report, or one clear error."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pmlkit.errors import PmlkitError
from pmlkit.jsonl import append_line
from pmlkit.record import Record
from pmlkit.report.health import verdict_health
from pmlkit.report.load import load_run, load_source, provenance
from pmlkit.report.plots.losses import plot_ratios
from pmlkit.report.plots.run import plot_order, plot_phases
from pmlkit.report.tables.losses import table_measured, table_verdicts
from pmlkit.report.tables.run import table_checks, table_control, table_failures, table_statuses
from pmlkit.report.verdicts import verdict_run, verdict_run_roofs
from tests import sample_run

GPU = {"name": "NVIDIA H200", "power_limit_w": 700.0}


def write(folder: Path, keep: Callable[[Record], bool] = lambda record: True, again: int = 0, **head) -> str:
    """Write a variant of the sample run and return its folder's name."""
    folder.mkdir()
    run = msgspec.structs.replace(sample_run.run(), **head)
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    records = [record for record in sample_run.records() if keep(record)]
    for record in [*records, *records[:again]]:
        append_line(folder / "records.jsonl", record)
    return str(folder)


def show(name: str) -> str:
    """Make everything that the pages 00, 20, 30 and 90 make of a run; return its sentences."""
    data = load_run(name)
    tables = [table_statuses(data), table_failures(data), table_control(data), table_checks(data)]
    tables += [table_measured(data.frame, "m"), table_verdicts(data.pairs, "p", "c")]
    figures = [plot_ratios(data.comparisons, data.margin), plot_order(data.frame), plot_phases(data.frame)]
    assert all(table.markup() and table.text() for table in tables)
    assert all(figure.svg() and figure.alt for figure in figures)
    return "\n".join(page.text for page in (verdict_run(data), verdict_health(data), verdict_run_roofs(data), provenance(data)))


def test_one_arm(tmp_path: Path) -> None:
    """A run of one arm has no comparison and no control, and says so."""
    text = show(write(tmp_path / "r", lambda record: record.arm == "reference"))
    assert "no A/A control could be judged" in text
    assert "false alarms" not in text


def test_failures_of_a_case_and_arm_are_one_row(tmp_path: Path) -> None:
    """Every process that failed is counted, in one row for each case, arm and end."""
    name = write(tmp_path / "r", lambda record: record.status != "ok")
    once = table_failures(load_run(name)).frame
    for record in load_run(name).records[:3]:
        append_line(tmp_path / "r" / "records.jsonl", msgspec.structs.replace(record, replicate=9))
    twice = table_failures(load_run(name)).frame
    assert once["processes"].tolist() == [1] * 10
    assert sorted(twice["processes"]) == [1] * 7 + [2] * 3


def test_one_replicate(tmp_path: Path) -> None:
    """With one process a case nothing is judged, no drift is claimed."""
    text = show(write(tmp_path / "r", lambda record: record.replicate == 1))
    assert "one process only" in text
    assert "false alarms" not in text
    assert "Drift" not in text


def test_nothing_ok(tmp_path: Path) -> None:
    """A run in which nothing ran is said to have measured nothing."""
    assert "NOTHING WAS MEASURED" in show(write(tmp_path / "r", lambda record: record.status != "ok"))


def test_without_the_baseline(tmp_path: Path) -> None:
    """If the campaign's baseline did not run, the first recorded arm stands in."""
    name = write(tmp_path / "r", lambda record: record.arm != "pml")
    assert load_run(name).baseline == "pml-again"
    assert show(name)


def test_two_versions_in_one_arm_are_refused(tmp_path: Path) -> None:
    """Two releases are never averaged into one cell."""
    name = write(tmp_path / "r")
    lines = Path(name, "records.jsonl").read_text().splitlines()
    changed = json.loads(lines[0]) | {"version": "3.0.0", "replicate": 9}
    Path(name, "records.jsonl").write_text("\n".join([*lines, json.dumps(changed)]) + "\n")
    with pytest.raises(PmlkitError, match=r"mixes .*2\.9\.0 and .*3\.0\.0"):
        load_run(name).cells  # noqa: B018


def test_two_widths_are_two_cases(tmp_path: Path) -> None:
    """Cases that differ only in a size that no column shows keep their own cells."""
    name = write(tmp_path / "r")
    cells = len(load_run(name).cells)
    lines = [json.loads(line) for line in Path(name, "records.jsonl").read_text().splitlines()]
    wider = [line | {"shape": line["shape"] | {"D": 256}, "case_id": line["case_id"] + "x"} for line in lines]
    Path(name, "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines + wider))
    assert len(load_run(name).cells) == 2 * cells
    assert show(name)


def test_repeated_records_count_once(tmp_path: Path) -> None:
    """A record that stands twice is one process, and the page says so."""
    data = load_run(write(tmp_path / "r", again=3))
    assert len(data.records) == 144
    assert "3 records are superseded by a later try" in str(data.problems[0])


def test_a_cpu_run_on_a_host_with_a_gpu_is_a_cpu_run(tmp_path: Path) -> None:
    """What was measured decides, not what the host has: no GPU is named and no percentage given."""
    environment = sample_run.run().environment | {"gpus": [GPU]}
    text = show(write(tmp_path / "r", environment=environment))
    assert "H200" not in text
    assert "no percentage is given" in text


@pytest.mark.parametrize(("power", "known"), [(700.0, True), (500.0, False)])
def test_a_gpu_run_has_its_board_unless_capped(tmp_path: Path, power: float, known: bool) -> None:
    """A GPU run is held against its board; a power-capped card gets no percentage."""
    environment = sample_run.run().environment | {"gpus": [GPU | {"power_limit_w": power}]}
    text = show(write(tmp_path / "r", environment=environment, device="cuda"))
    assert "NVIDIA H200" in text
    assert ("share of the nearest roof" in text) == known


def test_a_folder_elsewhere_is_not_named(tmp_path: Path) -> None:
    """A run outside the project is shown by its id: no page names a folder of the machine."""
    assert str(tmp_path) not in provenance(load_run(write(tmp_path / "r"))).text


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("gb300-moe", "losses", "is not about losses: use pml-3.0.1"),
        ("pml-3.0.1", "moe", "is not about moe: use gb300-moe"),
        ("pml-3", "losses", "did you mean 'pml-3.0.1'"),
    ],
)
def test_a_source_of_the_wrong_kind(key: str, kind, message: str) -> None:
    """A source is refused by the page that cannot show it, with the one that fits."""
    with pytest.raises(PmlkitError, match=message):
        load_source(key, kind)


def test_an_empty_run_says_what_to_do(tmp_path: Path) -> None:
    """A folder with a head and no usable line is one error with the first problem."""
    name = write(tmp_path / "r", lambda record: False)
    Path(name, "records.jsonl").write_text("{\n")
    with pytest.raises(PmlkitError, match=r"no usable record: .*records\.jsonl:1"):
        load_run(name)
