"""The runner against subjects that fail in every way, and against the real ones."""

import platform
from pathlib import Path

import msgspec
import pytest

from pmlkit import paths
from pmlkit.bench import runner
from pmlkit.bench.process import scrub
from pmlkit.campaign import Campaign, campaign, loss_case
from pmlkit.case import Case
from pmlkit.protocol import Protocol
from pmlkit.record import Record
from pmlkit.registry import Subject, subject
from pmlkit.run import read_run

QUICK = Protocol(name="test", processes=1, most=1, blocks=2, block_s=0.001, warmup=1, warmup_s=0.0, timeout_s=60)


@pytest.fixture(autouse=True)
def own_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "runs", lambda: tmp_path / "runs")


def fake(name: str, **changes) -> Subject:
    known = msgspec.structs.replace(subject("reference"), key=name, name=name, bind=f"tests.fake_subjects:{name}", math="plain")
    return msgspec.structs.replace(known, **changes)


def run_arms(subjects: dict[str, Subject], protocol: Protocol = QUICK, **changes) -> list[Record]:
    """Run one small case for these subjects and return the records."""
    plan = Campaign(
        name="test",
        question="?",
        cases=(loss_case("contrastive", 16, "fp32"),),
        arms=subjects,
        baseline=next(iter(subjects)),
        protocol=protocol,
    )
    folder = runner.run_campaign(msgspec.structs.replace(plan, **changes))
    run, lines = read_run(folder)
    assert lines.problems == []
    assert run.planned == len(plan.cases) * len(subjects)
    return lines.records


EXPECTED = {
    "fine": ("ok", None),
    "wrong": ("wrong_result", "differs by"),
    "not_finite": ("wrong_result", "is not finite"),
    "killed": ("host_oom", "signal 9"),
    "aborts": ("crashed", "signal 6"),
    "silent": ("crashed", "exited with status 0 without an outcome"),
    "garbage": ("crashed", "not an outcome"),
    "out_of_memory": ("host_oom", "DefaultCPUAllocator"),
    "device_out_of_memory": ("oom", "407.00 GiB"),
    "raises": ("error", "RuntimeError: broken in <project>/tests/fake_subjects.py"),
    "unsupported": ("unsupported", "no such kernel"),
}


def test_every_fault_becomes_one_typed_record() -> None:
    """A subject that is wrong, dies, lies, stays silent or runs out of memory costs its own record and no other."""
    records = run_arms({name: fake(name) for name in EXPECTED})
    found = {record.arm: record for record in records}
    assert set(found) == set(EXPECTED)
    for name, (status, reason) in EXPECTED.items():
        record = found[name]
        assert record.status == status, f"{name}: {record.status}, {record.reason}"
        assert (record.reason is None) if reason is None else (reason in (record.reason or "")), f"{name}: {record.reason}"
        assert (record.samples_ns is not None) == (status == "ok")
    assert "a subject may print" in found["fine"].log_tail


def test_a_hanging_worker_times_out() -> None:
    """A worker that does not answer in time is ended and recorded as a time-out; its neighbour still runs."""
    protocol = msgspec.structs.replace(QUICK, timeout_s=20)
    records = run_arms({"hangs": fake("hangs"), "fine": fake("fine")}, protocol)
    assert {record.arm: record.status for record in records} == {"hangs": "timeout", "fine": "ok"}


def test_a_release_that_is_not_installed_is_unsupported() -> None:
    """A subject names its version; another installed version is not measured in its place."""
    other = msgspec.structs.replace(subject("pml-2.9.0"), key="pml-1.0", version="1.0")
    (record,) = run_arms({"pml-1.0": other})
    assert record.status == "unsupported"
    assert "pytorch-metric-learning 1.0 is not installed (found 2.9.0)" in (record.reason or "")


def test_a_precision_without_a_path_is_unsupported() -> None:
    """A case outside a subject's precisions is a record that says so."""
    (record,) = run_arms({"fine": fake("fine", precisions=("bf16",))})
    assert (record.status, record.reason) == ("unsupported", "fine has no fp32 path")


def test_the_budget_stops_between_cases() -> None:
    """A budget that is spent leaves the rest unrecorded; planned and recorded differ and nothing is invented."""
    plan = msgspec.structs.replace(campaign("losses-cpu"), arms={"fine": fake("fine")}, baseline="fine", protocol=QUICK)
    run, lines = read_run(runner.run_campaign(plan, budget_s=0.0))
    assert run.planned == 10
    assert lines.records == []


def test_a_real_campaign_end_to_end() -> None:
    """PML 2.9.0, its A/A twin and the reference on one case: checked, timed, profiled, all raw samples kept."""
    subjects = {"pml": subject("pml-2.9.0"), "reference": subject("reference")}
    records = run_arms(subjects, cases=(loss_case("batch_hard_triplet", 64, "bf16"),))
    for record in records:
        assert record.status == "ok", record.reason
        assert record.samples_ns is not None
        assert set(record.samples_ns) == {"pair", "forward", "backward"}
        assert all(len(samples) == QUICK.blocks for samples in record.samples_ns.values())
        assert record.timer is not None
        assert record.timer.method == "wall"
        assert record.memory is not None
        assert record.memory[0].allocated_peak_bytes > record.memory[0].baseline_bytes == 64 * 128 * 2
        assert record.work is not None
        assert record.work.flops == {"bf16": 2 * 64 * 64 * 128}
    pml = next(record for record in records if record.arm == "pml")
    assert pml.check is not None
    assert "at the subject's own triplets" in pml.check.reference
    assert (pml.check.plain_rms_rel or 0) > pml.check.limit > (pml.check.rms_rel or 1)


def test_a_worker_that_cannot_start_or_dies_early_costs_only_its_record() -> None:
    """A missing interpreter is an error record, a death before the measurement a crash; the neighbour still runs."""
    subjects = {
        "nowhere": fake("fine", key="nowhere", interpreter="/no/such/python"),
        "early": fake("fine", key="early", imports=("tests.fake_import_that_dies",)),
        "fine": fake("fine"),
    }
    found = {record.arm: record for record in run_arms(subjects)}
    assert {arm: record.status for arm, record in found.items()} == {"nowhere": "error", "early": "crashed", "fine": "ok"}
    assert "cannot start" in (found["nowhere"].reason or "")
    assert "signal 6" in (found["early"].reason or "")


def test_what_names_this_machine_is_scrubbed() -> None:
    """What enters a record names no folder, user or host: known places by name, all others by their last part."""
    places = f"{paths.root()}/x.py, home {Path.home()}/y, /scratch/alice/lib/site-packages/pkg/z.py"
    text = scrub(f"error in {places} on {platform.node()}")
    assert str(paths.root()) not in text
    assert "alice" not in text
    assert "<project>/x.py" in text
    assert "<elsewhere>/z.py" in text
    assert len(platform.node()) <= 3 or platform.node() not in text
    assert scrub("3/4 of https://example.org/a/b and a/b stay") == "3/4 of https://example.org/a/b and a/b stay"


def test_subjects_may_share_a_process() -> None:
    """Subjects of one process name are measured in one process, in turn; each has its own record, checked and timed."""
    records = run_arms({"one": fake("fine", process="both"), "two": fake("fine", process="both")})
    assert {record.status for record in records} == {"ok"}
    assert [record.log_tail.count("a subject may print") for record in records] == [1, 2]


def test_a_death_in_a_shared_process_costs_only_its_own_record() -> None:
    """Whichever comes first, the subject that shares a process with one that kills it is still measured."""
    records = run_arms({"killed": fake("killed", process="both"), "fine": fake("fine", process="both")})
    assert {record.arm: record.status for record in records} == {"killed": "host_oom", "fine": "ok"}


def test_fused_losses_are_not_replaced_by_their_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor the fused subject has no kernels: its record says so, and no time of the reference passes for it."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (record,) = run_arms({"pmlkit": subject("pmlkit")})
    assert record.status == "unsupported"
    assert "no fused kernels for torch.float32 rows (16, 128) on cpu" in (record.reason or "")


def test_a_fused_loss_is_proved_and_timed_like_any_subject() -> None:
    """In the interpreter the kernels run on a processor: the whole way from campaign to record, answer checked twice."""
    (record,) = run_arms({"pmlkit": subject("pmlkit")})
    assert record.status == "ok", record.reason
    assert record.check is not None
    assert (record.check.rms_rel or 1) < 2e-6


def test_a_lasting_process_measures_all_cases_of_its_arm_and_round() -> None:
    """Arms take turns on each case; a process serves its arm for one round, and a death costs one record."""
    protocol = msgspec.structs.replace(QUICK, processes=2, most=2, lasting=True)
    arms = {"a": fake("names_its_process"), "b": fake("names_its_process"), "dies": fake("killed")}
    cases = tuple(loss_case("contrastive", rows, "fp32") for rows in (8, 16, 24))
    plan = Campaign(name="test", question="?", cases=cases, arms=arms, baseline="a", protocol=protocol)
    plan = msgspec.structs.replace(plan, sentinel=(cases[0], fake("names_its_process")))
    records = read_run(runner.run_campaign(plan))[1].records
    timed = [record for record in records if record.arm in ("a", "b")]
    assert [record.status for record in timed] == ["ok"] * 12
    assert {record.status for record in records if record.arm == "dies"} == {"host_oom"}
    groups = [{record.arm for record in records[start : start + 3]} for start in (1, 4, 7)]
    assert groups == [{"a", "b", "dies"}] * 3
    processes: dict[tuple[str, int], set[str]] = {}
    for record in records:
        if record.arm != "dies":
            line = next(line for line in record.log_tail.splitlines() if line.startswith("process "))
            processes.setdefault((record.arm, record.replicate if record.arm != "sentinel" else 0), set()).add(line)
    assert all(len(one) == 1 for one in processes.values())
    assert len(set.union(*processes.values())) == 5


def test_a_layer_is_measured_through_the_same_engine() -> None:
    """torch's grouped product on this processor: the answer proved, output and gradients, then timed."""
    cases = tuple(
        Case(op="moe_layer", precision="bf16", mode=mode, shape={"T": 8, "D": 32, "E": 3, "K": 2, "F": 16})
        for mode in ("inference", "training")
    )
    arms = {"torch": subject("torch-bf16"), "again": subject("torch-bf16")}
    protocol = msgspec.structs.replace(QUICK, lasting=True)
    plan = Campaign(name="test", question="?", cases=cases, arms=arms, baseline="torch", protocol=protocol)
    records = read_run(runner.run_campaign(plan))[1].records
    assert [record.status for record in records] == ["ok"] * 4, [record.reason for record in records]
    for record in records:
        assert record.samples_ns and record.iteration_ns("pair") and record.work and record.memory
        assert record.work.useful_flops == 6 * 8 * 2 * 32 * 16 * (3 if record.mode == "training" else 1)
        assert (record.memory[0].saved_bytes is not None) == (record.mode == "training")
        assert ("backward" in record.samples_ns) and record.pipeline is None
