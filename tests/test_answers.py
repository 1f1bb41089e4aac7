"""The pages on gradients and capacity: every number they say, on runs made for it."""

from pathlib import Path

import msgspec
import pytest

from pmlkit import paths
from pmlkit.campaign import loss_case
from pmlkit.jsonl import append_line
from pmlkit.record import Capacity, Check, Memory, Record, Timer
from pmlkit.report.capacity import frame_capacity, plot_capacity, table_capacity, verdict_capacity
from pmlkit.report.gradients import frame_gradients, plot_gradients, table_gradients, verdict_gradients
from pmlkit.report.load import RunData, load_run
from tests import sample_run


def run_of(folder: Path, *records: Record) -> RunData:
    folder.mkdir()
    (folder / "run.json").write_bytes(msgspec.json.encode(sample_run.run()))
    for record in records:
        append_line(folder / "records.jsonl", record)
    return load_run(str(folder))


def record(arm: str, precision: str, error: float | None, capacity: Capacity | None = None, **layout: int) -> Record:
    """Return a record of a contrastive case with an error, wrong above 1e-2, and perhaps a capacity."""
    case = loss_case("contrastive", 512 if capacity is None else 2**20, precision, **layout)
    wrong = error is None or error > 1e-2
    return Record(
        run_id="r", case_id=case.case_id, arm=arm, replicate=0, round=0, order=0, started_at="2026-01-01T00:00:00.000+00:00",
        wall_s=1.0, protocol="p", subject=arm, version="1", math="plain", status="wrong_result" if wrong else "ok",
        reason="wrong" if wrong else None, check=Check(max_rel=error, rms_rel=error, worst_row=0, reference="r", limit=1e-2),
        timer=None if wrong else Timer(method="wall", cache="hot", warmup=1, warmup_s=0.0, inner=1, resolution_ns=1.0),
        samples_ns=None if wrong else {"pair": [[2_000_000]]}, capacity=capacity,
        memory=[Memory(source="cuda", baseline_bytes=0, allocated_peak_bytes=3 * 2**20)], **msgspec.structs.asdict(case),
    )  # fmt: skip


def test_errors_are_told_beside_the_promise(tmp_path: Path) -> None:
    """Within and beyond the promise are counted for each arm; NaN is beyond everything; layouts stay apart."""
    data = run_of(
        tmp_path / "r",
        record("fused", "fp32", 1e-6),
        record("fused", "bf16", 2e-3),
        record("fused", "fp32", 1.5e-6, spread=21),
        record("pml", "fp32", 4e-6),
        record("pml", "bf16", 2e-2),
        record("pml", "fp32", None, spread=21),
    )
    table = frame_gradients(data)
    assert len(table) == 6
    assert table.set_index(["label", "precision", "layout"])["share"].to_dict() == pytest.approx(
        {
            ("fused", "fp32", "random"): 0.5,
            ("fused", "bf16", "random"): 0.5,
            ("fused", "fp32", "clusters 0.021 wide"): 0.75,
            ("pml", "fp32", "random"): 2.0,
            ("pml", "bf16", "random"): 5.0,
            ("pml", "fp32", "clusters 0.021 wide"): float("inf"),
        }
    )
    words = verdict_gradients(data).text
    assert "fused: 3 of 3 answers are within" in words
    assert "Contrastive float32 512, clusters 0.021 wide, with 1.5e-06, 0.75 times the promise" in words
    assert "pml: 0 of 3 answers are within" in words
    assert len(table_gradients(data).frame) == 3
    assert "fused: 3 of 3; pml: 0 of 2" in plot_gradients(data).alt


def test_capacities_are_told(tmp_path: Path) -> None:
    """The largest batch of every arm, where it ends and why; a case that runs whole has no end."""
    data = run_of(
        tmp_path / "r",
        record("fused", "bf16", 1e-3, Capacity(largest=2**20)),
        record("fused", "fp32", 1e-6, Capacity(largest=2**20)),
        record("pml", "bf16", 1e-3, Capacity(largest=1536, refused=1560, reason="OutOfMemoryError: no room")),
    )
    table = frame_capacity(data)
    assert table.set_index(["label", "precision"])["largest"].to_dict() == {
        ("fused", "bf16"): 2**20, ("fused", "fp32"): 2**20, ("pml", "bf16"): 1536,
    }  # fmt: skip
    words = verdict_capacity(data).text
    assert "fused on CPU: an invented processor: 2 of 2 cases run with all 1,048,576 rows" in words
    assert "pml on CPU: an invented processor: 0 of 1 cases" in words
    assert "the smallest largest batch is 1,536 rows (Contrastive bfloat16)" in words
    shown = table_capacity(data).frame
    assert shown["refused because"].tolist().count("OutOfMemoryError: no room") == 1
    assert shown["peak, MiB"].tolist() == [3.0] * 3
    assert "Contrastive bfloat16, pml: 1,536" in plot_capacity(data).alt


def test_a_run_without_them_says_so() -> None:
    """The sample sought no capacity; its page says how to seek one."""
    data = load_run("sample")
    assert "python -m pmlkit run loss-capacity" in verdict_capacity(data).text
    assert "0 cases" in plot_capacity(data).alt


def test_a_committed_run_is_found_by_its_whole_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`h200/losses` is not a run of losses-page."""
    for name in ("20260101T000000Z-losses-abcdef", "20260102T000000Z-losses-page-abcdef"):
        folder = tmp_path / "h200" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(sample_run.run(), started_at=name)))
    monkeypatch.setattr(paths, "data", lambda: tmp_path)
    assert paths.find_run("h200/losses").name == "20260101T000000Z-losses-abcdef"
    assert paths.find_run("h200/losses-page").name == "20260102T000000Z-losses-page-abcdef"
