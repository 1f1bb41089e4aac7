"""Frames: one row a record, and one number a process."""

import msgspec
import pandas as pd
import pytest

from pmlkit.registry import LOSSES
from pmlkit.report.frames import cells_measured, frame_records, iteration_ms, rebuild_processes
from pmlkit.report.load import load_run, load_source
from tests import sample_run

RECORDS = sample_run.records()


def frame() -> pd.DataFrame:
    return frame_records(sample_run.run(), RECORDS)


def test_one_row_a_record_in_registry_order() -> None:
    """No record is lost or merged; rows are sorted by case and arm, and keep their order in time."""
    rows = frame()
    assert len(rows) == len(RECORDS)
    assert list(dict.fromkeys(rows["op"])) == list(LOSSES)
    assert sorted(rows["order"]) == list(range(len(RECORDS)))


def test_median_over_samples_of_the_slowest_rank() -> None:
    """Samples are totals of inner iterations; of several ranks the slowest counts; a failed case has no number."""
    ok = next(record for record in RECORDS if record.status == "ok")
    samples = {"pair": [[10_000_000, 40_000_000], [20_000_000, 5_000_000], [60_000_000, 1]]}
    ranks = msgspec.structs.replace(ok, samples_ns=samples)
    assert iteration_ms(ranks, "pair") == 40 / 20
    assert iteration_ms(ranks, "forward") is None
    assert all(iteration_ms(record, "pair") is None for record in RECORDS if record.status != "ok")


def test_cells_hold_every_process_or_the_failure() -> None:
    """A cell of an arm that failed once has no values and names the status; the others have three."""
    cells = cells_measured(sample_run.run(), RECORDS)
    assert len(cells) == len(sample_run.cases()) * len(sample_run.ARMS)
    failed = cells[cells["status"] != "ok"]
    assert set(failed["status"]) == set(sample_run.REASONS)
    assert failed["values"].map(len).sum() == 0
    assert set(cells.loc[cells["status"] == "ok", "values"].map(len)) == {3}


def test_three_processes_from_mean_and_range() -> None:
    """The middle value follows from the mean; rounding may push it outside, then it stays in the range."""
    assert rebuild_processes(5.15, 4.17, 5.66) == pytest.approx([4.17, 5.62, 5.66])
    assert rebuild_processes(30.0, 29.9, 30.0) == [29.9, 30.0, 30.0]
    assert rebuild_processes(1.4, 1.4, 1.4) == [1.4, 1.4, 1.4]


def test_published_frame_keeps_names_and_digits() -> None:
    """Display name and identifier are both there, printed strings untouched."""
    row = (
        load_source("pml-3.0.1", "losses")
        .frame.query("label == '3.0.1 code' and op == 'batch_hard_triplet' and N == 512")
        .iloc[0]
    )
    assert row["version"] == "candidate-32bcfa8"
    assert (row["printed_backward"], row["backward_ms"], row["backward_ms_hw"]) == ("2", 2.0, 0.005)


def test_a_run_loads_with_its_control() -> None:
    """The sample run knows its baseline, its candidates, its A/A pair and its margin."""
    data = load_run("sample")
    assert data.baseline == "pml"
    assert data.candidates == ["reference", "pml-again"]
    assert data.controls == [("pml", "pml-again")]
    assert data.margin == max(0.02, data.floor or 0)
    assert data.problems == []
