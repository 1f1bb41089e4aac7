"""An invented run of expert layers on an H200: three formats, a rival, a failure. What a test of its page needs."""

from pathlib import Path

import msgspec

from pmlkit.campaign import layer_case
from pmlkit.case import Case
from pmlkit.jsonl import append_line
from pmlkit.record import Check, Memory, Record, Timer
from pmlkit.registry import SUBJECTS, Subject, work_of
from pmlkit.run import Run

CASES = {
    "bf16": (layer_case("bf16", "inference", 48, 3072), {"standard": ("moe-bf16", 2.6), "torch": ("torch-bf16", 2.73)}),
    "train": (layer_case("bf16", "training", 12, 3072, 8192), {"standard": ("moe-bf16", 31.0), "torch": ("torch-bf16", None)}),
    "mxfp8": (layer_case("mxfp8", "inference", 48, 3072), {"staged": ("moe-mxfp8", 1.5), "torch-fp8": ("torch-fp8", 1.8)}),
    "nvfp4": (layer_case("nvfp4", "inference", 384, 3072), {"staged": ("moe-nvfp4", 5.0)}),
}


def record(run_id: str, case: Case, arm: str, subject: Subject, milliseconds: float | None, replicate: int) -> Record:
    """Return a process's record; without a time it ran out of memory."""
    ok = milliseconds is not None
    pair = [[round(5e6 * (milliseconds or 0) * (1 + 0.001 * (window + replicate)))] for window in range(3)]
    timer = Timer(method="graph_replay", cache="as-in-loop", warmup=9, warmup_s=0.1, inner=5, resolution_ns=32.0)
    check = Check(max_rel=0.01, rms_rel=3e-3, worst_row=1, reference="float64", limit=2e-2, graph_accepted=True)
    saved = 2**20 if case.mode == "training" else None
    return Record(
        run_id=run_id, case_id=case.case_id, arm=arm, replicate=replicate, round=replicate, order=replicate,
        started_at="2026-01-01T00:00:00.000+00:00", wall_s=1.0, protocol="moe-short", subject=subject.name,
        version=subject.version, math=subject.math, status="ok" if ok else "oom", reason=None if ok else "too large",
        check=check if ok else None, timer=timer if ok else None, samples_ns={"pair": pair} if ok else None,
        memory=[Memory(source="cuda", baseline_bytes=1, allocated_peak_bytes=2, saved_bytes=saved)], work=work_of(case),
        **msgspec.structs.asdict(msgspec.structs.replace(case, pipeline=subject.pipeline)),
    )  # fmt: skip


def write(folder: Path, device: str = "NVIDIA H200") -> Path:
    """Write the run into a folder and return it."""
    folder.mkdir(parents=True)
    environment = {"cpu": "invented", "cores": 2, "packages": {}, "git": None}
    environment["gpus"] = [{"name": device, "power_limit_w": 700}]
    head = Run(
        run_id="20260101T000000Z-moe-one-gpu-000000", campaign="moe-one-gpu", protocol="moe-short", device="cuda",
        baseline="standard", started_at="2026-01-01T00:00:00+00:00", seed=0, planned=14, command="invented",
        environment=environment,
    )  # fmt: skip
    (folder / "run.json").write_bytes(msgspec.json.encode(head))
    for case, arms in CASES.values():
        for arm, (key, milliseconds) in arms.items():
            for replicate in range(2):
                append_line(folder / "records.jsonl", record(head.run_id, case, arm, SUBJECTS[key], milliseconds, replicate))
    return folder
