"""Writes data/sample: one small run in which every status and several flags occur. The numbers are invented.

    python -m tests.sample_run

A test holds the committed files equal to what this module writes.
"""

import random
from pathlib import Path
from typing import Any, get_args

import msgspec

from pmlkit import paths
from pmlkit.campaign import loss_case
from pmlkit.case import Case
from pmlkit.jsonl import append_line
from pmlkit.record import Check, Conditions, Flag, Memory, Record, Status, Timer
from pmlkit.registry import LOSSES, SUBJECTS, work_of
from pmlkit.run import Run

RUN_ID = "20260101T000000Z-sample-000000"
ARMS = {"pml": "pml-2.9.0", "pml-again": "pml-2.9.0", "reference": "reference"}
REASONS: dict[str, str] = {
    "wrong_result": "the answer differs by 3.10e-01, limit 2e-02 (closed form in float64 on the same rounded inputs)",
    "unsupported": "pytorch-metric-learning has no such path",
    "oom": "OutOfMemoryError: tried to allocate 407.00 GiB",
    "host_oom": "killed by signal 9, most likely by the out-of-memory killer",
    "timeout": "no answer within 120 s",
    "crashed": "killed by signal 11 (SIGSEGV)",
    "error": "RuntimeError: an invented error",
    "skipped": "the budget ended before this case",
    "graph_capture_failed": "the stream was capturing when the subject synchronised",
    "timer_error": "a block of 20 iterations took 0 ns",
}


def cases() -> list[Case]:
    """Return one case per loss and size, enough that every status has a place of its own."""
    sizes = ((128, "fp32"), (512, "fp32"), (512, "bf16"), (2048, "bf16"))
    return [loss_case(op, rows, precision) for rows, precision in sizes for op in LOSSES]


def records() -> list[Record]:
    """Return the invented records: most are ok, and each other status occurs once for the reference arm."""
    rng = random.Random(0)
    bad = [status for status in get_args(Status) if status != "ok"]
    made = []
    for replicate in range(3):
        for number, case in enumerate(cases()):
            for place, (arm, key) in enumerate(ARMS.items()):
                special = number - 4 if arm == "reference" and replicate == 0 and number >= 4 else len(bad)
                status = bad[special] if special < len(bad) else "ok"
                order = (replicate * len(cases()) + number) * len(ARMS) + place
                made.append(_record(case, arm, key, replicate, order, status, rng))
    return made


def _record(case: Case, arm: str, key: str, replicate: int, order: int, status: Any, rng: random.Random) -> Record:
    subject = SUBJECTS[key]
    pace = {"contrastive": 1.0, "batch_hard_triplet": 1.3, "ntxent": 4.0, "proxy_anchor": 1.8}[case.op]
    pair = pace * case.shape["N"] ** 1.2 * (0.4 if arm == "reference" else 1.0) * 4e4 * rng.gauss(1, 0.01)
    samples = {
        phase: [[0 if status == "timer_error" else int(share * pair * rng.gauss(1, 0.01))] for _ in range(3)]
        for phase, share in (("pair", 1.0), ("forward", 0.45), ("backward", 0.53))
    }
    timed, wrong = status in ("ok", "timer_error"), status == "wrong_result"
    error = 0.31 if wrong else 4e-7 if case.precision == "fp32" else 8e-3
    checked = timed or wrong
    flags: list[Flag] = ["below_resolution"] if status == "timer_error" else ["unsteady"] if order == 20 else []
    base = case.shape["N"] * case.shape["D"] * (4 if case.precision == "fp32" else 2)
    return Record(
        run_id=RUN_ID,
        case_id=case.case_id,
        arm=arm,
        replicate=replicate,
        round=replicate,
        order=order,
        started_at=f"2026-01-01T00:{order // 60:02d}:{order % 60:02d}.000+00:00",
        wall_s=1.0,
        protocol="sample",
        subject=subject.name,
        version=subject.version,
        math=subject.math,
        status=status,
        reason=REASONS.get(status),
        flags=flags,
        check=Check(max_rel=error, rms_rel=error, worst_row=7, reference="invented", limit=2e-2) if checked else None,
        timer=Timer(method="wall", cache="as-in-loop", warmup=3, warmup_s=0.1, inner=20, resolution_ns=60.0) if timed else None,
        samples_ns=samples if timed else None,
        memory=[Memory(source="profiler", baseline_bytes=base, allocated_peak_bytes=9 * base)] if status == "ok" else None,
        work=work_of(case),
        conditions=[Conditions(load_1m=[0.5, 0.6])] if status == "ok" else None,
        **msgspec.structs.asdict(case),
    )


def run() -> Run:
    """Return the head of the sample run."""
    return Run(
        run_id=RUN_ID,
        campaign="sample",
        protocol="sample",
        device="cpu",
        baseline="pml",
        started_at="2026-01-01T00:00:00+00:00",
        seed=0,
        planned=len(records()),
        command="python -m tests.sample_run",
        environment={"cpu": "an invented processor", "cores": 2, "packages": {"torch": "0.0"}, "gpus": [], "git": None},
        sample=True,
    )


def write(folder: Path) -> None:
    """Write the sample run into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(run()), indent=1) + b"\n")
    (folder / "records.jsonl").unlink(missing_ok=True)
    for record in records():
        append_line(folder / "records.jsonl", record)


if __name__ == "__main__":
    write(paths.data() / "sample")
