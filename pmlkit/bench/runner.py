"""Runs a campaign: a fresh process per case, arm and replicate; one record a process, written before the next starts."""

import itertools
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from pmlkit import environment, paths
from pmlkit.bench.process import Worker, scrub
from pmlkit.bench.progress import Progress
from pmlkit.bench.worker import Outcome
from pmlkit.campaign import Campaign, Job, expand
from pmlkit.errors import PmlkitError
from pmlkit.jsonl import append_line
from pmlkit.record import Record, Run
from pmlkit.registry import loss_work


def run_campaign(campaign: Campaign, *, seed: int = 0, budget_s: float | None = None, note: str = "") -> Path:
    """Run every job of the campaign and return the run folder.

    budget_s: stop cleanly between two cases once this many seconds have passed; what was recorded stays.
    Raises PmlkitError if the run folder cannot be made.
    """
    jobs = list(expand(campaign, seed))
    run = start_run(campaign, seed, len(jobs), note)
    folder = paths.runs() / run.run_id
    progress = Progress(len(jobs), campaign.name)
    deadline = time.monotonic() + budget_s if budget_s is not None else float("inf")
    try:
        for _, group in itertools.groupby(jobs, key=lambda job: (job.replicate, job.case.case_id)):
            if time.monotonic() >= deadline:
                break
            for record in run_group(run, list(group)):
                append_line(folder / "records.jsonl", record)
                progress.update(record)
    finally:
        progress.close()
    return folder


def start_run(campaign: Campaign, seed: int, planned: int, note: str = "") -> Run:
    """Make the run folder and write its head. The id carries time and (hashed) host, so folders merge by copying."""
    about = environment.describe()
    now = datetime.now(UTC)
    run = Run(
        run_id=f"{now:%Y%m%dT%H%M%SZ}-{campaign.name}-{about['host'][:6]}",
        campaign=campaign.name,
        protocol=campaign.protocol.name,
        started_at=now.isoformat(timespec="seconds"),
        seed=seed,
        planned=planned,
        command=f"python -m pmlkit run {campaign.name} --seed {seed}",
        environment=about,
        note=note,
    )
    folder = paths.runs() / run.run_id
    try:
        folder.mkdir(parents=True)
        (folder / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")
    except OSError as error:
        raise PmlkitError(
            f"cannot start a run in {paths.relative(folder)}: {error.strerror}; wait a second or make room"
        ) from None
    return run


def run_group(run: Run, jobs: list[Job]) -> list[Record]:
    """Run the arms of one case in one round. All import at the same time, then they are measured one after another.

    Starting is most of a short case's cost, so it is shared between the cores; nothing else runs while one is measured.
    """
    workers: list[Worker] = []
    records = []
    try:
        workers = [Worker(job) for job in jobs]
        for worker in workers:
            worker.wait_ready()
        for worker in workers:
            started_at, begin = datetime.now(UTC), time.monotonic()
            outcome = worker.measure()
            records.append(make_record(run, worker, outcome, started_at, time.monotonic() - begin))
    finally:
        for worker in workers:
            worker.close()
    return records


def make_record(run: Run, worker: Worker, outcome: Outcome, started_at: datetime, wall_s: float) -> Record:
    """Join what the worker saw with what the campaign knows. A self-contradicting outcome becomes `crashed`."""
    job = worker.job
    case, subject = job.case, job.subject
    known = {
        "run_id": run.run_id,
        "case_id": case.case_id,
        "arm": job.arm,
        "replicate": job.replicate,
        "round": job.replicate,
        "order": job.order,
        "started_at": started_at.isoformat(timespec="milliseconds"),
        "wall_s": round(wall_s, 3),
        "protocol": job.protocol.name,
        "subject": subject.name,
        "version": subject.version,
        "math": subject.math,
        "work": loss_work(case.op, case.shape, case.precision),
        "log_tail": worker.log_tail(),
        **msgspec.structs.asdict(case),
    }
    outcome.reason = scrub(outcome.reason) if outcome.reason else None
    try:
        return Record(**known, **msgspec.structs.asdict(outcome))
    except ValueError as error:
        return Record(**known, status="crashed", reason=f"the worker's outcome contradicts itself: {error}")
