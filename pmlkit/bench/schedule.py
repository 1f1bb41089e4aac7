"""What a campaign runs next: the first rounds, then more until every interval is narrow, with a sentinel throughout."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator

from pmlkit.campaign import SENTINEL, Campaign, Job, expand
from pmlkit.record import Record
from pmlkit.stats import LEAST_MARGIN, noise_floor, ratio_of_times

SENTINEL_EVERY = 10

Key = tuple[str, str, str, str, int]


def job_key(job: Job) -> Key:
    """Return the key that the job's record will have."""
    return (job.case.case_id, job.subject.name, job.subject.version, job.arm, job.replicate)


def missing(jobs: Iterable[Job], records: Iterable[Record], retry: Collection[str] = ()) -> list[Job]:
    """Return the jobs that no record answers; one whose last record has a status in `retry` counts as missing."""
    last = {record.key: record.status for record in records}
    done = {key for key, status in last.items() if status not in retry}
    return [job for job in jobs if job_key(job) not in done]


def wide_cases(campaign: Campaign, records: Iterable[Record]) -> dict[str, int]:
    """Return the cases with a comparison that is not decided narrowly enough, and how many of its arms are such.

    Narrow: half the interval on the ratio of pair times is at most half the margin (2 % or the A/A floor so far), on
    logarithms. Only the width counts, never which side is ahead. What is not `ok` on both sides cannot be compared.
    """
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        value = record.iteration_ns("pair")
        if value is not None and record.arm != SENTINEL:
            values.setdefault((record.case_id, record.arm), []).append(value)
    base, same = campaign.baseline, campaign.arms[campaign.baseline]
    cases = [case.case_id for case in campaign.cases]
    twins = [arm for arm, subject in campaign.arms.items() if subject == same and arm != base]
    pairs = [(values.get((case, base), []), values.get((case, twin), [])) for case in cases for twin in twins]
    margin = max(LEAST_MARGIN, noise_floor([a for a, _ in pairs], [b for _, b in pairs]) or 0.0)
    wide: dict[str, int] = {}
    for case, arm in itertools.product(cases, campaign.arms):
        sides = values.get((case, base), []), values.get((case, arm), [])
        if arm != base and min(map(len, sides)) > 1:
            ratio = ratio_of_times(*sides)
            if math.log(ratio.high / ratio.low) / 2 > math.log1p(margin) / 2:
                wide[case] = wide.get(case, 0) + 1
    return wide


def rounds(campaign: Campaign, seed: int, records: list[Record], retry: Collection[str] = ()) -> Iterator[list[Job]]:
    """Yield the missing jobs of the first rounds, then of one more round at a time for the cases that need it.

    `records` grows while the jobs run. A round is decided on the complete rounds before it alone, so that a resumed run
    takes the same decisions.
    """
    start = campaign.protocol.processes
    yield missing(expand(campaign, seed, range(start)), records, retry)
    for replicate in range(start, campaign.protocol.most):
        wide = wide_cases(campaign, [record for record in records if record.replicate < replicate])
        if not wide:
            return
        yield missing(expand(campaign, seed, range(replicate, replicate + 1), wide), records, retry)


def groups(campaign: Campaign, jobs: Iterable[Job], records: list[Record], stop: Callable[[], object]) -> Iterator[list[Job]]:
    """Yield the jobs as groups, the arms of a case in one round, with the sentinel first, after every ten jobs, and last.

    stop: asked before each group; once it is true only the last sentinel follows.
    """
    number = sum(record.arm == SENTINEL for record in records)
    since: int | None = None
    for _, group in itertools.groupby(jobs, key=lambda job: (job.replicate, job.case.case_id)):
        if stop():
            break
        if since is None or since >= SENTINEL_EVERY:
            yield from _sentinel(campaign, number)
            since, number = 0, number + 1
        yield (arms := list(group))
        since += len(arms)
    if since is not None:
        yield from _sentinel(campaign, number)


def _sentinel(campaign: Campaign, number: int) -> Iterator[list[Job]]:
    """Yield the sentinel's group, if the campaign has one; `number` counts its processes over the whole run."""
    if campaign.sentinel is not None:
        case, subject = campaign.sentinel
        yield [Job(case=case, subject=subject, arm=SENTINEL, replicate=number, order=number, protocol=campaign.protocol)]
