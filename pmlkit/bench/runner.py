"""Runs a campaign: a fresh process per case, arm and replicate; one record a process, written before the next starts."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import get_args

import msgspec

from pmlkit import environment, paths
from pmlkit.bench.locks import Interrupt, device_lock, locked
from pmlkit.bench.outcome import Outcome
from pmlkit.bench.process import Worker, scrub
from pmlkit.bench.progress import Progress
from pmlkit.bench.schedule import groups, job_key, missing, rounds, wide_cases
from pmlkit.campaign import SENTINEL, Campaign, Job, expand
from pmlkit.errors import PmlkitError, nearest
from pmlkit.jsonl import append_line
from pmlkit.record import Record, Status
from pmlkit.registry import work_of
from pmlkit.run import Run, Sitting, read_run


def run_campaign(
    campaign: Campaign, *, seed: int = 0, budget_s: float | None = None, resume: str = "", retry: Collection[str] = ()
) -> Path:
    """Run every job of the campaign that the run folder does not hold yet, and return the folder.

    budget_s: stop cleanly between two cases once this many seconds have passed; what was recorded stays.
    resume: name of an interrupted run of the same campaign; only its missing jobs run, in its own order.
    retry: statuses, such as `error` and `timeout`, whose jobs run once more; their earlier records stay in the file.
    Raises PmlkitError if the folder cannot be made or is in use, or if the run to resume is of another plan or machine,
    and KeyboardInterrupt after the processes of the case in flight have been recorded.
    """
    deadline = time.monotonic() + budget_s if budget_s is not None else float("inf")
    with ExitStack() as stack:
        stack.enter_context(device_lock(campaign.protocol.device))
        if resume:
            folder = paths.find_run(resume)
            run = resume_run(campaign, folder)
        else:
            run = start_run(campaign, seed, budget_s)
            folder = paths.runs() / run.run_id
        stack.enter_context(locked(folder))
        interrupt = stack.enter_context(Interrupt())
        sit(run, campaign, folder, retry, deadline, interrupt)
        if interrupt.seen:
            raise KeyboardInterrupt
    return folder


def check_statuses(words: Collection[str]) -> set[str]:
    """Return the words as a set of statuses. Raises PmlkitError for one that is none, or that no retry can mend."""
    known = [status for status in get_args(Status) if status != "ok"]
    for word in words:
        if word not in known:
            raise PmlkitError(f"--retry {word!r}: {nearest(word, known)}")
    return set(words)


def sit(run: Run, campaign: Campaign, folder: Path, retry: Collection[str], deadline: float, interrupt: Interrupt) -> None:
    """Measure until nothing is missing or something ends it, and note in `sittings.jsonl` what did."""

    measuring = measure_lasting if campaign.protocol.lasting else partial(measure, ahead=campaign.protocol.ahead)

    def stop() -> str:
        return "interrupted" if interrupt.seen else "budget" if time.monotonic() >= deadline else ""

    started_at, records = datetime.now(UTC), read_run(folder)[1].records
    before = len(records)
    progress = Progress(campaign.name)
    ended_by = ""
    try:
        for jobs in rounds(campaign, run.seed, records, retry):
            progress.expect(len(jobs))
            begun = len(records)
            for record in measuring(run, groups(campaign, jobs, records, stop), stop):
                append_line(folder / "records.jsonl", record)
                records.append(record)
                if record.arm != SENTINEL:
                    progress.update(record)
            if missing(jobs, records[begun:]):
                ended_by = stop()
                break
    finally:
        progress.close()
    if len(records) > before:
        wide = sum(wide_cases(campaign, records).values())
        sitting = Sitting(
            run_id=run.run_id,
            started_at=started_at.isoformat(timespec="seconds"),
            ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
            ended_by=ended_by or ("most" if wide else "narrow"),  # pyright: ignore[reportArgumentType]
            records=len(records) - before,
            wide=wide,
        )
        append_line(folder / "sittings.jsonl", sitting)


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
        planned=campaign.planned,
        command=f"python -m pmlkit run {campaign.name} --protocol {campaign.protocol.name} --seed {seed}{budget}",
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
    for what, then, today in (
        ("campaign", run.campaign, campaign.name),
        ("protocol", run.protocol, campaign.protocol.name),
        ("number of planned processes", run.planned, campaign.planned),
        *((name, run.environment.get(name), now[name]) for name in ("host", "cpu", "gpus", "packages", "git")),
    ):
        if then != today:
            raise PmlkitError(f"cannot resume {run.run_id}: its {what} was {then}, now it is {today}; start a new run")
    keys = {job_key(job) for job in expand(campaign, run.seed, range(campaign.protocol.most))}
    if strange := {record.key for record in lines.records if record.arm != SENTINEL} - keys:
        raise PmlkitError(f"cannot resume {run.run_id}: it holds {len(strange)} records of another plan; start a new run")
    return run


def measure(run: Run, groups: Iterable[list[Job]], stop: Callable[[], object], ahead: int = 0) -> Iterator[Record]:
    """Run groups of jobs. The workers of a group, and of `ahead` later groups, import at the same time; one measures.

    Starting is most of a short case's cost, so it is shared between the cores; only one worker ever touches the device.
    stop: once it is true, groups that have only imported are dropped, all but the sentinel.
    """
    waiting, started = iter(groups), deque[list[Sharers]]()
    try:
        while True:
            while len(started) <= ahead and (group := next(waiting, None)) is not None:
                started.append([])
                for jobs in by_process(group):
                    started[-1].append(Sharers(jobs))
            if not started:
                return
            if stop() and started[0][0].jobs[0].arm != SENTINEL:
                for sharers in started[0]:
                    sharers.close()
            else:
                for sharers in started[0]:
                    sharers.worker.wait_ready()
                for sharers in started[0]:
                    yield from sharers.measure(run)
                    sharers.close()
            started.popleft()
    finally:
        for sharers in (sharers for group in started for sharers in group):
            sharers.close()


def measure_lasting(run: Run, groups: Iterable[list[Job]], stop: Callable[[], object]) -> Iterator[Record]:
    """Run groups of jobs. A process lives as long as its arm has jobs of one round; only one at a time measures."""
    living: dict[tuple[str, int], Sharers] = {}
    try:
        for group in groups:
            for jobs in by_process(group):
                if stop() and jobs[0].arm != SENTINEL:
                    continue
                key = jobs[0].arm, jobs[0].replicate if jobs[0].arm != SENTINEL else 0
                for old in [one for one in living if one[0] == key[0] and one != key]:
                    living.pop(old).close()
                if key not in living:
                    living[key] = Sharers(jobs)
                    living[key].worker.wait_ready()
                living[key].jobs = jobs
                yield from living[key].measure(run)
    finally:
        for sharers in living.values():
            sharers.close()


def by_process(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs as lists that share a process, in the order of the first of each."""
    shared: dict[tuple[str | None, ...], list[Job]] = {}
    for job in jobs:
        name = job.subject.process or f"arm {job.arm}"
        shared.setdefault((name, job.subject.interpreter, job.subject.path), []).append(job)
    return list(shared.values())


class Sharers:
    """Jobs that share a process, one after another. After a death the next job gets a process of its own."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.worker = Worker(jobs[0])
        self.begun = False

    def measure(self, run: Run) -> Iterator[Record]:
        """Yield a record for every job."""
        self.begun = True
        for job in self.jobs:
            if job is not self.worker.job:
                if self.worker.problem is None:
                    self.worker.take(job)
                else:
                    self.worker.close()
                    self.worker = Worker(job)
                    self.worker.wait_ready()
            started_at, begin = datetime.now(UTC), time.monotonic()
            outcome = self.worker.measure()
            yield make_record(run, self.worker, outcome, started_at, time.monotonic() - begin)

    def close(self) -> None:
        """End the process: in its own time if it has measured and is well, else at once."""
        if self.begun and self.worker.problem is None:
            self.worker.end()
        self.worker.close()


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
        "work": work_of(case),
        "log_tail": worker.log_tail(),
        **msgspec.structs.asdict(case),
        "pipeline": case.pipeline or subject.pipeline,
    }
    outcome.reason = scrub(outcome.reason) if outcome.reason else None
    try:
        return Record(**known, **msgspec.structs.asdict(outcome))
    except ValueError as error:
        return Record(**known, status="crashed", reason=f"the worker's outcome contradicts itself: {error}")
