"""What a run survives: killed runners and workers, two runners at once, a full disk, a changed machine."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from pmlkit import paths
from pmlkit.bench import locks, runner
from pmlkit.campaign import Campaign, loss_case
from pmlkit.errors import PmlkitError
from pmlkit.protocol import Protocol
from pmlkit.record import Record
from pmlkit.registry import subject
from pmlkit.run import read_run, read_sittings

PLAN = Campaign(
    name="durable",
    question="?",
    cases=tuple(loss_case(op, 16, "fp32") for op in ("contrastive", "ntxent")),
    arms={"a": subject("reference"), "b": subject("reference")},
    baseline="a",
    protocol=Protocol(name="test", processes=2, most=2, blocks=2, block_s=0.001, warmup=1, warmup_s=0.0, timeout_s=60),
)
SCRIPT = """
import sys
from pathlib import Path
from pmlkit import paths
from pmlkit.bench import locks, runner
from tests.test_durability import PLAN
paths.runs = lambda: Path(sys.argv[1])
runner.run_campaign(PLAN)
"""


@pytest.fixture(autouse=True)
def own_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "runs", lambda: tmp_path / "runs")


def records(folder: Path) -> list[Record]:
    return read_run(folder)[1].records


def start_and_kill(tmp_path: Path, after: int) -> Path:
    """Start a runner in its own process, kill it with signal 9 once it has recorded `after` processes."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "runs")], cwd=paths.root(), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        files = list((tmp_path / "runs").glob("*/records.jsonl"))
        if files and len(files[0].read_text().splitlines()) >= after:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def test_a_killed_runner_loses_only_the_case_in_flight(tmp_path: Path) -> None:
    """After kill -9 every whole line is there; resuming runs exactly the missing jobs and no other."""
    folder = start_and_kill(tmp_path, after=3)
    before = records(folder)
    assert 2 <= len(before) < 8
    assert runner.run_campaign(PLAN, resume=str(folder)) == folder
    after = records(folder)
    assert after[: len(before)] == before
    assert len(after) == len({record.key for record in after}) == 8
    assert {record.status for record in after} == {"ok"}


def test_resuming_a_complete_run_does_nothing(tmp_path: Path) -> None:
    """A finished run has nothing missing; its file is not touched."""
    folder = runner.run_campaign(PLAN)
    content = (folder / "records.jsonl").read_bytes()
    runner.run_campaign(PLAN, resume=str(folder))
    assert (folder / "records.jsonl").read_bytes() == content


def test_a_torn_line_is_run_again(tmp_path: Path) -> None:
    """A record cut by a crash counts as missing; the good ones stay."""
    folder = runner.run_campaign(PLAN)
    path = folder / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    runner.run_campaign(PLAN, resume=str(folder))
    _, lines = read_run(folder)
    assert len(lines.records) == 8
    assert [problem.line for problem in lines.problems] == [8]


def test_two_runners_on_one_folder_are_refused(tmp_path: Path) -> None:
    """While one runner holds the folder another gets a clear error; afterwards it may go on."""
    folder = runner.run_campaign(PLAN, budget_s=0.0)
    with runner.locked(folder), pytest.raises(PmlkitError, match="being written by another process"):
        runner.run_campaign(PLAN, resume=str(folder))
    with runner.locked(folder):
        pass


def test_a_full_disk_is_a_clear_stop(tmp_path: Path) -> None:
    """When no whole line fits, the runner stops with the remedy; the file ends with the last whole line and resumes."""
    script = SCRIPT.replace("runner.run_campaign(PLAN)", "").strip() + (
        "\nimport resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))\n"
        "runner.run_campaign(PLAN)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "runs")], cwd=paths.root(), capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "make room, then resume" in done.stderr.splitlines()[-1]
    (folder,) = (tmp_path / "runs").iterdir()
    _, lines = read_run(folder)
    assert lines.problems == []
    assert 0 < len(lines.records) < 8
    runner.run_campaign(PLAN, resume=str(folder))
    assert len(records(folder)) == 8


def test_an_interrupt_lets_the_process_in_flight_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the third record ends the group in flight, records it, says so, and raises; resuming does the rest."""
    made: list[Record] = []

    def interrupt(self, record: Record) -> None:
        made.append(record)
        if len(made) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(runner.Progress, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.run_campaign(PLAN)
    (folder,) = (tmp_path / "runs").iterdir()
    assert records(folder) == made
    assert len(made) == 4
    assert [(sitting.ended_by, sitting.records) for sitting in read_sittings(folder)] == [("interrupted", 4)]
    runner.run_campaign(PLAN, resume=str(folder))
    assert len(records(folder)) == 8
    assert read_sittings(folder)[-1].ended_by in ("narrow", "most")


@pytest.mark.parametrize("ahead", [1, 2])
def test_groups_that_only_import_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """However many cases import ahead, Ctrl-C ends the run after the case in flight, and resuming measures them."""
    plan = msgspec.structs.replace(PLAN, protocol=msgspec.structs.replace(PLAN.protocol, ahead=ahead))
    seen: list[Record] = []

    def interrupt(self, record: Record) -> None:
        seen.append(record)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(runner.Progress, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.run_campaign(plan)
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(records(folder)) == 2
    runner.run_campaign(plan, resume=str(folder))
    assert len(records(folder)) == len({record.key for record in records(folder)}) == 8


def test_a_second_interrupt_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever presses twice does not wait; whole records stay and no worker is left behind."""

    def interrupt(self, record: Record) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(runner.Progress, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.run_campaign(PLAN)
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(records(folder)) == 1


def test_two_campaigns_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is held by its UUID, whatever folder the runs are in; without a device a GPU campaign does not begin."""
    monkeypatch.setattr(locks, "visible_card", lambda: "0123456789abcdef")
    with locks.device_lock("cuda"):
        with pytest.raises(PmlkitError, match="another campaign is measuring on this GPU"), locks.device_lock("cuda"):
            pass
        with locks.device_lock("cpu"), locks.device_lock("cpu"):
            pass
    monkeypatch.setattr(locks, "visible_card", lambda: "")
    with pytest.raises(PmlkitError, match="needs a CUDA device"), locks.device_lock("cuda"):
        pass


def test_a_retried_status_runs_once_more() -> None:
    """`retry` runs exactly the jobs of that status again and keeps their earlier records; unknown words are refused."""
    name = "raises"
    fake = msgspec.structs.replace(subject("reference"), key=name, name=name, bind=f"tests.fake_subjects:{name}")
    plan = msgspec.structs.replace(PLAN, cases=PLAN.cases[:1], arms={"a": subject("reference"), "b": fake})
    folder = runner.run_campaign(plan)
    runner.run_campaign(plan, resume=str(folder), retry=runner.check_statuses(["error"]))
    assert Counter(record.arm for record in records(folder)) == {"a": 2, "b": 4}
    with pytest.raises(PmlkitError, match="--retry 'eror': did you mean"):
        runner.check_statuses(["eror"])


def with_three_processes(plan: Campaign) -> Campaign:
    return msgspec.structs.replace(plan, protocol=msgspec.structs.replace(plan.protocol, processes=3, most=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: msgspec.structs.replace(plan, name="other"), "its campaign was durable, now it is other"),
        (
            with_three_processes,
            "number of planned processes was 8, now it is 12",
        ),
    ],
)
def test_another_plan_cannot_resume(change, message: str) -> None:
    """A run goes on only with the campaign it was started with."""
    folder = runner.run_campaign(PLAN, budget_s=0.0)
    with pytest.raises(PmlkitError, match=message):
        runner.run_campaign(change(PLAN), resume=str(folder))


def test_other_cases_cannot_resume() -> None:
    """A plan of equal name and size but other cases is refused: its records would be mixed with strangers."""
    folder = runner.run_campaign(PLAN)
    other = msgspec.structs.replace(PLAN, cases=tuple(loss_case(op, 24, "fp32") for op in ("contrastive", "ntxent")))
    with pytest.raises(PmlkitError, match="8 records of another plan"):
        runner.run_campaign(other, resume=str(folder))


def test_another_machine_cannot_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run never mixes two machines or two sets of packages."""
    folder = runner.run_campaign(PLAN, budget_s=0.0)
    real = runner.environment.describe()
    monkeypatch.setattr(runner.environment, "describe", lambda: real | {"packages": {"torch": "9.9"}})
    with pytest.raises(PmlkitError, match="its packages was"):
        runner.run_campaign(PLAN, resume=str(folder))


def test_a_clock_that_goes_backwards_is_a_timer_error() -> None:
    """Negative time is recorded as it came, with its own status, and is never ranked."""
    name = "clock_goes_backwards"
    fake = msgspec.structs.replace(subject("reference"), key=name, name=name, bind=f"tests.fake_subjects:{name}")
    once = msgspec.structs.replace(PLAN.protocol, processes=1, most=1)
    plan = msgspec.structs.replace(PLAN, cases=PLAN.cases[:1], arms={"a": fake}, protocol=once)
    (record,) = records(runner.run_campaign(plan))
    assert record.status == "timer_error"
    assert record.samples_ns is not None
    assert min(ranks[0] for samples in record.samples_ns.values() for ranks in samples) < 0
