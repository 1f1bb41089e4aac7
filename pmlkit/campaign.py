"""Campaigns and protocols as data: which cases, which arms, how often, timed how."""

import random
from collections.abc import Iterator
from typing import Literal

import msgspec

from pmlkit.case import Case
from pmlkit.errors import PmlkitError, nearest
from pmlkit.registry import LOSSES, Subject, subject


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """How one process times one case.

    device: `cpu` (wall clock) or `cuda` (events, graph replay). blocks: samples per phase. inner: iterations of a
    sample, or None: as many as last `block_s` seconds. warmup, warmup_s: at least this many pairs and this many seconds
    before anything is kept. threads: CPU threads of the worker. timeout_s: after this the worker is killed.
    """

    name: str
    blocks: int
    warmup: int
    warmup_s: float
    device: Literal["cpu", "cuda"] = "cpu"
    inner: int | None = None
    block_s: float = 0.03
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
# The published page's 20: three sizes in fp32, two in bf16, where 2.9.0 cannot compute distances of 25 rows or fewer.
_PAGE_CASES = tuple(
    loss_case(op, rows, precision)
    for op in LOSSES
    for precision, sizes in (("fp32", (128, 512, 2048)), ("bf16", (512, 2048)))
    for rows in sizes
)
_CPU_ARMS = {"pml": "pml-2.9.0", "pml-again": "pml-2.9.0", "reference": "reference"}

PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(name="pmlkit-cpu", blocks=3, warmup=3, warmup_s=0.05),
        # As the published page: 3 processes, each 3 blocks of 100 pairs.
        Protocol(name="pml-page", device="cuda", blocks=3, inner=100, warmup=20, warmup_s=1.0),
        Protocol(name="pmlkit", device="cuda", blocks=5, warmup=20, warmup_s=0.5),
    )
}
_CPU_PROTOCOL = PROTOCOLS["pmlkit-cpu"]

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
            protocol=msgspec.structs.replace(_CPU_PROTOCOL, warmup=1, timeout_s=1200.0),
        ),
        Campaign(
            name="losses-page",
            question="The page's 20 configurations on one GPU: 2.9.0 against the dense form, eager, compiled and as a graph.",
            cases=_PAGE_CASES,
            arms={
                "pml": "pml-2.9.0",
                "pml-again": "pml-2.9.0",
                "dense": "dense",
                "compiled": "dense-compiled",
                "graph": "dense-graph",
            },
            baseline="pml",
            replicates=5,
            protocol=PROTOCOLS["pmlkit"],
        ),
    )
}


def campaign(name: str) -> Campaign:
    """Return a campaign. Raises PmlkitError for an unknown name."""
    if name not in CAMPAIGNS:
        raise PmlkitError(f"unknown campaign {name!r} in campaign.py: {nearest(name, list(CAMPAIGNS))}")
    return CAMPAIGNS[name]
