"""Registries are complete, and files and entries agree both ways."""

from pathlib import Path

import pytest

from pmlkit import campaign, registry
from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.precision import PRECISIONS
from pmlkit.release import read_published

PACKAGE = Path(__file__).parent.parent / "pmlkit"


def test_every_loss_file_has_an_entry_and_back() -> None:
    """A file in losses/ that has a reference is a registered op, and a registered loss has a file."""
    files = {path.stem for path in (PACKAGE / "losses").glob("*.py") if "\ndef reference(" in path.read_text()}
    assert files == set(registry.LOSSES)


@pytest.mark.parametrize("op", registry.LOSSES)
def test_every_loss_has_a_work_model(op: str) -> None:
    """A loss declares positive work in every plain precision, and its operations are in that precision."""
    shape = campaign.loss_case(op, 64, "fp32").shape
    for precision in ("fp32", "bf16"):
        work = registry.work_of(Case(op=op, precision=precision, shape=shape))
        assert list(work.flops) == [precision]
        assert work.useful_flops > 0
        assert work.hbm_bytes > 0


@pytest.mark.parametrize("subject", registry.SUBJECTS.values(), ids=lambda s: s.key)
def test_subjects_resolve(subject: registry.Subject) -> None:
    """A subject's binder exists, its ops and precisions are registered, and its version is a field."""
    assert callable(registry.resolve(subject.bind))
    assert set(subject.ops) <= set(registry.OPS)
    assert set(subject.precisions) <= set(PRECISIONS)
    assert subject.version not in subject.name


@pytest.mark.parametrize("source", registry.SOURCES.values(), ids=lambda s: s.key)
def test_sources_have_importer_and_records(source: registry.Source) -> None:
    """A published source has an importer module and committed records without problems."""
    assert callable(registry.resolve(source.importer))
    lines = read_published(source.key)
    assert lines.records
    assert not lines.problems
    assert {record.source for record in lines.records} == {source.key}


@pytest.mark.parametrize("plan", campaign.CAMPAIGNS.values(), ids=lambda p: p.name)
def test_campaigns_are_consistent(plan: campaign.Campaign) -> None:
    """Case ids are unique, subjects support the cases, and every campaign that times has an A/A control and a sentinel."""
    assert len({case.case_id for case in plan.cases}) == len(plan.cases)
    assert all(case.op in s.ops and case.precision in s.precisions for case in plan.cases for s in plan.arms.values())
    assert campaign.SENTINEL not in plan.arms
    if plan.name in ("loss-gradients", "loss-capacity"):  # the same every time
        assert plan.protocol.processes == plan.protocol.most == 1
        return
    twins = [one for one in plan.arms.values() if one == plan.arms[plan.baseline]]
    assert len(twins) >= 2
    assert not any(one.process for one in twins)
    assert plan.sentinel is not None
    assert 5 <= plan.protocol.processes <= plan.protocol.most <= 15


def test_default_campaign_is_the_promised_one() -> None:
    """losses-cpu: batch 128 fp32 for all four, 512 fp32 and bf16 for all but NT-Xent, five processes, A/A on PML."""
    plan = campaign.campaign("losses-cpu")
    cells = {(case.op, case.precision, case.shape["N"]) for case in plan.cases}
    three = {"contrastive", "batch_hard_triplet", "proxy_anchor"}
    assert cells == {(op, "fp32", 128) for op in registry.LOSSES} | {(op, p, 512) for op in three for p in ("fp32", "bf16")}
    assert plan.protocol.processes == 5
    assert sorted(one.key for one in plan.arms.values()) == ["pml-2.9.0", "pml-2.9.0", "reference"]
    assert {("ntxent", "fp32"), ("ntxent", "bf16")} <= {
        (case.op, case.precision) for case in campaign.campaign("losses-cpu-full").cases if case.shape["N"] == 512
    }


def test_rounds_interleave_and_are_seeded() -> None:
    """Each round runs every case with its arms adjacent; the order depends on the seed and on nothing else."""
    plan = campaign.campaign("losses-cpu")
    jobs = list(campaign.expand(plan, 1, range(3)))
    assert jobs == list(campaign.expand(plan, 1, range(3)))
    assert jobs != list(campaign.expand(plan, 2, range(3)))
    assert [job.order for job in jobs] == list(range(90))
    some = [job for job in jobs if job.replicate == 2 and job.case == plan.cases[3]]
    assert list(campaign.expand(plan, 1, range(2, 3), {plan.cases[3].case_id})) == some
    for start in range(0, 90, 3):
        group = jobs[start : start + 3]
        assert len({(job.case.case_id, job.replicate) for job in group}) == 1
        assert {job.arm for job in group} == set(plan.arms)
    assert [job.replicate for job in jobs] == sorted(job.replicate for job in jobs)
    assert len({tuple(job.case.case_id for job in jobs if job.replicate == r) for r in range(3)}) == 3


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: registry.subject("pml-2.9"), "pml-2.9.0"),
        (lambda: registry.op("contrastiv"), "contrastive"),
        (lambda: campaign.campaign("loses-cpu"), "losses-cpu"),
    ],
)
def test_unknown_names_name_the_nearest(call, word: str) -> None:
    """An unknown key is one clear error with the nearest known one."""
    with pytest.raises(PmlkitError, match=word):
        call()
