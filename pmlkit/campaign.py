"""Campaigns and protocols as data: which cases, which arms, how often, timed how."""

import random
from collections.abc import Iterator

import msgspec

from pmlkit.case import Case
from pmlkit.errors import PmlkitError, nearest
from pmlkit.registry import LOSSES, Subject, subject


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """How one process times one case.

    blocks: samples per phase. block_s: least length of a sample, in seconds; it sets the inner iterations.
    warmup, warmup_s: at least this many pairs and this many seconds before anything is kept.
    threads: CPU threads of the worker (CPU lane). timeout_s: after this the worker is killed.
    """

    name: str
    blocks: int
    block_s: float
    warmup: int
    warmup_s: float
    threads: int = 1
    timeout_s: float = 120.0


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """A plan. arms: label -> subject key; two labels of one subject are its A/A control. baseline: arm compared against."""

    name: str
    question: str
    cases: tuple[Case, ...]
    arms: dict[str, str]
    baseline: str
    replicates: int
    protocol: Protocol


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start."""

    case: Case
    subject: Subject
    arm: str
    replicate: int
    order: int
    protocol: Protocol


def expand(campaign: Campaign, seed: int) -> Iterator[Job]:
    """Yield the jobs in rounds: each round runs every case once, in seeded random order, the arms of a case adjacent.

    Neighbours in time see the same machine, so slow drift falls on all arms of a case alike.
    """
    order = 0
    for replicate in range(campaign.replicates):
        rng = random.Random(f"{seed}-{replicate}")
        for case in rng.sample(campaign.cases, len(campaign.cases)):
            for arm in rng.sample(sorted(campaign.arms), len(campaign.arms)):
                yield Job(
                    case=case,
                    subject=subject(campaign.arms[arm]),
                    arm=arm,
                    replicate=replicate,
                    order=order,
                    protocol=campaign.protocol,
                )
                order += 1


def loss_case(op: str, rows: int, precision: str) -> Case:
    """Return the page's standard case: D = 128, 4 rows a class, 1,024 proxy classes."""
    labels = {"C": 1024} if op == "proxy_anchor" else {"per_class": 4}
    return Case(op=op, precision=precision, shape={"N": rows, "D": 128, **labels})


_CPU_CASES = (
    *(loss_case(op, 128, "fp32") for op in LOSSES),
    *(loss_case(op, 512, precision) for precision in ("fp32", "bf16") for op in LOSSES if op != "ntxent"),
)
_CPU_ARMS = {"pml": "pml-2.9.0", "pml-again": "pml-2.9.0", "reference": "reference"}
_CPU_PROTOCOL = Protocol(name="pmlkit-cpu", blocks=3, block_s=0.03, warmup=3, warmup_s=0.05)

CAMPAIGNS = {
    campaign.name: campaign
    for campaign in (
        Campaign(
            name="losses-cpu",
            question="How does pytorch-metric-learning 2.9.0 compare with plain closed forms on this machine's CPU?",
            cases=_CPU_CASES,
            arms=_CPU_ARMS,
            baseline="pml",
            replicates=3,
            protocol=_CPU_PROTOCOL,
        ),
        Campaign(
            name="losses-cpu-full",
            question="The same with NT-Xent at 512 rows, where 2.9.0 builds a matrix of positive by negative pairs.",
            cases=(*_CPU_CASES, loss_case("ntxent", 512, "fp32"), loss_case("ntxent", 512, "bf16")),
            arms=_CPU_ARMS,
            baseline="pml",
            replicates=3,
            protocol=msgspec.structs.replace(_CPU_PROTOCOL, warmup=1, timeout_s=600.0),
        ),
    )
}


def campaign(name: str) -> Campaign:
    """Return a campaign. Raises PmlkitError for an unknown name."""
    if name not in CAMPAIGNS:
        raise PmlkitError(f"unknown campaign {name!r} in campaign.py: {nearest(name, list(CAMPAIGNS))}")
    return CAMPAIGNS[name]
