"""What runs next: missing jobs, added rounds, the sentinel; and what the whole rule does to noise, by simulation."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from pmlkit.bench.schedule import groups, missing, rounds, wide_cases
from pmlkit.campaign import SENTINEL, Campaign, Job, campaign, expand, loss_case
from pmlkit.protocol import PROTOCOLS
from pmlkit.record import Check, Record, Timer
from pmlkit.registry import subject

PLAN = Campaign(
    name="test",
    question="?",
    cases=tuple(loss_case("contrastive", 16 * n, "fp32") for n in range(1, 5)),
    arms={"a": subject("reference"), "twin": subject("reference"), "b": subject("pml-2.9.0")},
    baseline="a",
    protocol=msgspec.structs.replace(PROTOCOLS["pmlkit"], device="cpu"),
    sentinel=(loss_case("ntxent", 16, "fp32"), subject("reference")),
)


def record(job: Job, milliseconds: float, status: str = "ok") -> Record:
    """Return the record of a job whose pair took this long."""
    case, ok = job.case, status == "ok"
    return Record(
        run_id="test",
        case_id=case.case_id,
        arm=job.arm,
        replicate=job.replicate,
        round=job.replicate,
        order=job.order,
        started_at="",
        wall_s=1.0,
        protocol="test",
        subject=job.subject.name,
        version=job.subject.version,
        math="plain",
        status=status,  # type: ignore[arg-type]
        reason=None if ok else "?",
        check=Check(max_rel=0.0, rms_rel=0.0, worst_row=None, reference="?", limit=1.0) if ok else None,
        timer=Timer(method="wall", cache="as-in-loop", warmup=1, warmup_s=0.0, inner=1, resolution_ns=1.0) if ok else None,
        samples_ns={"pair": [[round(1e6 * milliseconds)]]} if ok else None,
        **msgspec.structs.asdict(case),
    )


def play(noise: Callable[[Job], float]) -> tuple[list[Record], int]:
    """Run the whole plan with invented times; return the records and how many rounds there were."""
    records: list[Record] = []
    count = 0
    for jobs in rounds(PLAN, 0, records):
        records += [record(job, noise(job)) for job in jobs]
        count += 1
    return records, count


def test_quiet_cases_stop_after_the_first_rounds() -> None:
    """Where every interval is narrow no round is added: seven processes of every case and arm."""
    rng = np.random.default_rng(0)
    records, stages = play(lambda job: (2.0 if job.arm == "b" else 1.0) * np.exp(rng.normal(0, 0.001)))
    assert stages == 1
    assert len(records) == 7 * 4 * 3
    assert wide_cases(PLAN, records) == {}


def test_only_noisy_cases_get_more_rounds_up_to_the_most() -> None:
    """One case with 10 % noise is repeated up to fifteen times; the quiet ones keep seven."""
    rng = np.random.default_rng(0)
    loud = PLAN.cases[2].case_id
    records, stages = play(lambda job: np.exp(rng.normal(0, 0.1 if job.case.case_id == loud else 0.001)))
    counts = {case.case_id: sum(r.case_id == case.case_id and r.arm == "a" for r in records) for case in PLAN.cases}
    assert stages == 1 + 8
    assert counts == {case.case_id: 15 if case.case_id == loud else 7 for case in PLAN.cases}
    assert len({r.key for r in records}) == len(records)


def test_rounds_are_added_by_width_and_never_by_sign() -> None:
    """Turning every ratio upside down changes nothing about which cases go on."""
    rng = np.random.default_rng(1)
    shifts = {arm: rng.normal(0, 0.02, (4, 15)) for arm in PLAN.arms}

    def times(job: Job, sign: int) -> float:
        return float(np.exp(sign * ((job.arm == "b") * 0.3 + shifts[job.arm][PLAN.cases.index(job.case), job.replicate])))

    one, two = (play(lambda job, sign=sign: times(job, sign))[0] for sign in (1, -1))
    assert [r.key for r in one] == [r.key for r in two]
    assert len(one) > 7 * 4 * 3


def test_a_resumed_run_decides_as_an_unbroken_one() -> None:
    """Cut anywhere, also within an added round, the remaining jobs are exactly those of the unbroken run."""
    rng = np.random.default_rng(0)
    noise = {r: np.exp(rng.normal(0, 0.1, 200)) for r in range(15)}

    def times(job: Job) -> float:
        return noise[job.replicate][job.order % 200]

    whole, _ = play(times)
    for cut in (0, 1, 50, 84, 90, len(whole)):
        records = whole[:cut]
        for jobs in rounds(PLAN, 0, records):
            records += [record(job, times(job)) for job in jobs]
        assert [r.key for r in records] == [r.key for r in whole], cut


def test_retry_runs_what_failed_so_and_nothing_else() -> None:
    """A status named by retry is missing again until a later try ends otherwise."""
    jobs = list(expand(PLAN, 0, range(1)))
    records = [record(job, 1.0, "error" if job.arm == "b" else "ok") for job in jobs]
    assert missing(jobs, records) == []
    again = missing(jobs, records, {"error"})
    assert {job.arm for job in again} == {"b"}
    assert len(again) == 4
    assert missing(jobs, [*records, *(record(job, 1.0) for job in again)], {"error"}) == []


def test_the_sentinel_runs_first_last_and_after_every_ten_processes() -> None:
    """36 jobs in groups of three: sentinels before the 1st, 13th and 25th and after the last; its numbers go on."""
    jobs = list(expand(PLAN, 0, range(3)))
    arms = [[job.arm for job in group] for group in groups(PLAN, jobs, [], lambda: False)]
    assert [i for i, group in enumerate(arms) if group == [SENTINEL]] == [0, 5, 10, 15]
    known = [record(group[0], 1.0) for group in groups(PLAN, jobs, [], lambda: False) if group[0].arm == SENTINEL]
    again = [group[0].replicate for group in groups(PLAN, jobs[:3], known, lambda: False) if group[0].arm == SENTINEL]
    assert again == [4, 5]
    assert list(groups(PLAN, [], known, lambda: False)) == []


def test_a_stop_ends_between_two_cases_with_a_last_sentinel() -> None:
    """Once the budget is spent no group begins; the sentinel closes the sitting."""
    calls = iter([False, False, True])
    found = list(groups(PLAN, list(expand(PLAN, 0, range(3))), [], lambda: next(calls)))
    assert [len(group) for group in found] == [1, 3, 3, 1]
    assert [group[0].arm == SENTINEL for group in found] == [True, False, False, True]
    assert list(groups(PLAN, list(expand(PLAN, 0, range(3))), [], lambda: True)) == []


@pytest.mark.parametrize("name", ["losses-cpu", "losses-page"])
def test_planned_counts_the_first_rounds(name: str) -> None:
    """A campaign's planned processes are those of its first rounds, the sentinel's not counted."""
    plan = campaign(name)
    assert plan.planned == len(list(expand(plan, 0, range(plan.protocol.processes))))
