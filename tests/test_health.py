"""Whether a run can be trusted: drift of the sentinel, outliers, what ended it, verdicts that the clock explains."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pmlkit.campaign import SENTINEL
from pmlkit.jsonl import append_line
from pmlkit.record import Conditions, Kernels, Record
from pmlkit.report.compare import compare
from pmlkit.report.frames import cells_measured, cells_published, frame_records
from pmlkit.report.health import drift, outliers, validity, verdict_health
from pmlkit.report.load import load_run, load_source
from pmlkit.report.pace import frame_pace, frame_survivors, table_pace, table_survivors, verdict_pace, verdict_survivors
from pmlkit.report.plots.run import plot_pace
from pmlkit.report.verdicts import flat_series
from pmlkit.run import Sitting
from tests import sample_run

OK = next(record for record in sample_run.records() if record.status == "ok" and record.arm == "pml")


def at(milliseconds: float, **changes) -> Record:
    """Return an ok record whose pair takes this long."""
    samples = {"pair": [[round(20 * 1e6 * milliseconds)]], "forward": [[1]], "backward": [[1]]}
    return msgspec.structs.replace(OK, samples_ns=samples, **changes)


def run_of(folder: Path, records: list[Record], sittings: tuple[Sitting, ...] = ()) -> str:
    folder.mkdir()
    (folder / "run.json").write_bytes(msgspec.json.encode(sample_run.run()))
    for record in records:
        append_line(folder / "records.jsonl", record)
    for sitting in sittings:
        append_line(folder / "sittings.jsonl", sitting)
    return str(folder)


def sentinels(slope: float, noise: float) -> list[Record]:
    """Return 20 sentinel records a minute apart that become slower by `slope` in all."""
    rng = np.random.default_rng(0)
    times = [math.exp(math.log1p(slope) * i / 19 + rng.normal(0, noise)) for i in range(20)]
    return [at(ms, arm=SENTINEL, replicate=i, started_at=f"2026-01-01T00:{i:02d}:00+00:00") for i, ms in enumerate(times)]


@pytest.mark.parametrize(("slope", "noise", "fails"), [(0.05, 0.002, True), (0.01, 0.002, False), (0.03, 0.2, False)])
def test_drift(tmp_path: Path, slope: float, noise: float, fails: bool) -> None:
    """A steady 5 % fails the run, 1 % does not, and 3 % under 20 % noise cannot be told from none."""
    data = load_run(run_of(tmp_path / "r", [*sample_run.records(), *sentinels(slope, noise)]))
    found = drift(data)
    assert found is not None
    assert found.fails == fails
    if noise < 0.1:
        assert found.change == pytest.approx(slope, abs=0.003)
        assert found.low < slope < found.high
    assert ("THE MACHINE DRIFTED" in validity(data)) == fails
    assert ("FAILS the run" in verdict_health(data).text) == fails
    assert len(data.records) == len(sample_run.records()), "the sentinel is no arm of the campaign"


def test_a_retried_process_counts_once_with_its_last_try(tmp_path: Path) -> None:
    """The later record of one key replaces the earlier in the tables, and the page says so; the file keeps both."""
    first = sample_run.records()
    broken = next(i for i, record in enumerate(first) if record.status == "error")
    again = msgspec.structs.replace(
        at(1.0), **{k: getattr(first[broken], k) for k in ("case_id", "arm", "subject", "version", "replicate")}
    )
    again = msgspec.structs.replace(again, op=first[broken].op, precision=first[broken].precision, shape=first[broken].shape)
    assert again.key == first[broken].key
    data = load_run(run_of(tmp_path / "r", [*first, again]))
    assert len(data.records) == len(first)
    assert sum(record.status == "error" for record in data.records) == 0
    assert "1 records are superseded" in str(data.problems[0])


def test_outliers_are_flagged_and_kept() -> None:
    """One process at twice the time of seven is named, with what leaving it out would do; equal times name none."""
    times = [1.0, 1.01, 0.99, 1.005, 0.995, 1.0, 2.0]
    frame = frame_records(sample_run.run(), [at(ms, replicate=i) for i, ms in enumerate(times)])
    far = outliers(frame)
    assert far["replicate"].tolist() == [6]
    assert far["shift"].iloc[0] == pytest.approx(2 ** (-1 / 7) - 1, abs=1e-3)
    assert outliers(frame_records(sample_run.run(), [at(1.0, replicate=i) for i in range(7)])).empty


def test_what_ended_the_run_is_said(tmp_path: Path) -> None:
    """The last sitting's reason and the comparisons that stayed wide are on the page."""
    sitting = Sitting(run_id="r", started_at="", ended_at="", ended_by="budget", records=3, wide=4)
    text = verdict_health(load_run(run_of(tmp_path / "r", sample_run.records(), (sitting,)))).text
    assert "the budget was spent; 4 comparisons are wider" in text


@pytest.mark.parametrize(("mhz", "verdict", "change"), [(1000.0, "faster", ""), (2000.0, "inconclusive", "clock-confounded")])
def test_a_verdict_must_hold_in_clock_cycles(mhz: float, verdict: str, change: str) -> None:
    """Half the time at the same clock is faster; half the time at twice the clock is the clock's doing."""
    rng = np.random.default_rng(0)
    records = [
        at(ms * float(np.exp(rng.normal(0, 0.002))), arm=arm, replicate=i, conditions=[Conditions(sm_mhz=[clock, clock])])
        for arm, ms, clock in (("a", 2.0, 1000.0), ("b", 1.0, mhz))
        for i in range(7)
    ]
    row = compare(cells_measured(sample_run.run(), records), "a", "b").iloc[0]
    assert (row["verdict"], row["change"]) == (verdict, change)
    assert row["ratio"] == pytest.approx(0.5, rel=0.01)


def test_who_sets_the_pace(tmp_path: Path) -> None:
    """Busy for 10 % of the wall time = the host, for 95 % = the device; without a profile nothing is claimed."""

    def seen(arm: str, busy_ms: float) -> list[Record]:
        records = []
        for i in range(5):
            one = at(
                1.0, arm=arm, replicate=i, kernels=[Kernels(pairs=5, launches=50, busy_ns=int(5e6 * busy_ms), queued_ns=None)]
            )
            records.append(msgspec.structs.replace(one, samples_ns={**(one.samples_ns or {}), "pair_wall": [[20_000_000]]}))
        return records

    data = load_run(run_of(tmp_path / "r", [*seen("pml", 0.1), *seen("reference", 0.95)]))
    pace = frame_pace(data).set_index("label")
    assert pace["pace"].to_dict() == {"pml": "host", "reference": "device"}
    assert pace.loc["pml", "launches"] == 10
    assert pace.loc["pml", "busy_share"] == pytest.approx(0.1)
    assert "pml: 1 of 1 cases time the host (device busy 10 %" in verdict_pace(data).text
    assert table_pace(data).text()
    assert "pml: median 10 %" in plot_pace(frame_pace(data)).alt
    assert "not told apart" in verdict_pace(load_run("sample")).text
    assert plot_pace(frame_pace(load_run("sample"))).alt


def test_which_published_differences_survive(tmp_path: Path) -> None:
    """On the RTX 5090 13 of 18 differences are decided; those of flat series or of host-bound pairs are the host's."""
    published = load_source("pml-3.0.1", "losses")
    judged = compare(cells_published(published.frame), "2.9.0", "3.0.1 code")
    flat = flat_series(published.frame)
    assert len(flat) == 21
    names = [msgspec.structs.replace(OK, case_id=case, replicate=i) for case in judged["case"].unique() for i in range(2)]
    busy = [
        msgspec.structs.replace(
            record,
            kernels=[Kernels(pairs=1, launches=1, busy_ns=19_000_000, queued_ns=None)],
            samples_ns={**(record.samples_ns or {}), "pair_wall": [[20 * 20_000_000]]},
        )
        for record in names
    ]
    data = load_run(run_of(tmp_path / "r", busy))
    table = frame_survivors(judged, flat, data)
    assert set(table["pace"]) == {"device"}
    assert table.groupby("gpu")["decided"].sum().max() == 13
    assert (table["survives"] == (table["decided"] & ~table["flat"])).all()
    assert 0 < table["survives"].sum() < table["decided"].sum()
    text = verdict_survivors(table, data).text
    assert "13 of 18 published differences survive" in text
    assert "unknown" not in text
    assert "the loss, perhaps" in table_survivors(table, data).text()
    sample = frame_survivors(judged, flat, load_run("sample"))
    assert "The pace of 20 cases is unknown" in verdict_survivors(sample, load_run("sample")).text
