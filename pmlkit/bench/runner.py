"""Runs a campaign: a fresh process per case, arm and replicate; one record a process, written before the next starts."""

import fcntl
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from pmlkit.record import Record, Run, read_run
from pmlkit.registry import loss_work


def run_campaign(campaign: Campaign, *, seed: int = 0, budget_s: float | None = None, resume: str = "") -> Path:
    """Run every job of the campaign that the run folder does not hold yet, and return the folder.

    budget_s: stop cleanly between two cases once this many seconds have passed; what was recorded stays.
    resume: name of an interrupted run of the same campaign; only its missing jobs run, in its own order.
    Raises PmlkitError if the folder cannot be made or is in use, or if the run to resume is of another plan or machine.
    """
    if resume:
        folder = paths.find_run(resume)
        run = resume_run(campaign, folder)
    else:
        run = start_run(campaign, seed, budget_s)
        folder = paths.runs() / run.run_id
    with locked(folder):
        done = {record.key for record in read_run(folder)[1].records}
        jobs = [job for job in expand(campaign, run.seed) if job_key(job) not in done]
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


def start_run(campaign: Campaign, seed: int, budget_s: float | None) -> Run:
    """Make the run folder and write its head. The id carries time and (hashed) host, so folders merge by copying."""
    about = environment.describe()
    now = datetime.now(UTC)
    budget = f" --budget {budget_s:g}s" if budget_s is not None else ""
    run = Run(
        run_id=f"{now:%Y%m%dT%H%M%SZ}-{campaign.name}-{about['host'][:6]}",
        campaign=campaign.name,
        protocol=campaign.protocol.name,
        device=campaign.protocol.device,
        baseline=campaign.baseline,
        started_at=now.isoformat(timespec="seconds"),
        seed=seed,
        planned=sum(1 for _ in expand(campaign, seed)),
        command=f"python -m pmlkit run {campaign.name} --seed {seed}{budget}",
        environment=about,
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


def resume_run(campaign: Campaign, folder: Path) -> Run:
    """Return the head of a run to go on with. Raises PmlkitError if its plan, machine, packages or commit are not today's.

    Mixing two machines or two versions in one run would make its comparisons worthless.
    """
    run, lines = read_run(folder)
    now = environment.describe()
    keys = {job_key(job) for job in expand(campaign, run.seed)}
    for what, then, today in (
        ("campaign", run.campaign, campaign.name),
        ("number of planned processes", run.planned, len(keys)),
        *((name, run.environment.get(name), now[name]) for name in ("host", "cpu", "gpus", "packages", "git")),
    ):
        if then != today:
            raise PmlkitError(f"cannot resume {run.run_id}: its {what} was {then}, now it is {today}; start a new run")
    if strange := {record.key for record in lines.records} - keys:
        raise PmlkitError(f"cannot resume {run.run_id}: it holds {len(strange)} records of another plan; start a new run")
    return run


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process. Raises PmlkitError if another runner writes to it.

    The lock belongs to the open file, so it is gone with the process, however that ends.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PmlkitError(
                f"run {folder.name} is being written by another process: wait for it, or start a new run"
            ) from None
        yield


def job_key(job: Job) -> tuple[str, str, str, str, int]:
    """Return the key that the job's record will have."""
    return (job.case.case_id, job.subject.name, job.subject.version, job.arm, job.replicate)


def run_group(run: Run, jobs: list[Job]) -> Iterator[Record]:
    """Run the arms of one case in one round. All import at the same time, then they are measured one after another.

    Starting is most of a short case's cost, so it is shared between the cores; nothing else runs while one is measured.
    """
    workers: list[Worker] = []
    try:
        for job in jobs:
            workers.append(Worker(job))
        for worker in workers:
            worker.wait_ready()
        for worker in workers:
            started_at, begin = datetime.now(UTC), time.monotonic()
            outcome = worker.measure()
            yield make_record(run, worker, outcome, started_at, time.monotonic() - begin)
    finally:
        for worker in workers:
            worker.close()


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
