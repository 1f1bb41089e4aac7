"""Campaigns as data: which cases, which arms, by which protocol."""

import random
from collections.abc import Collection, Iterator

import msgspec

from pmlkit.case import Case
from pmlkit.errors import PmlkitError, nearest
from pmlkit.protocol import PROTOCOLS, Protocol
from pmlkit.registry import ATTEMPTS, LOSSES, Subject, subject

SENTINEL = "sentinel"  # the arm of the processes that watch for drift; no campaign may use it


class Campaign(msgspec.Struct, frozen=True, kw_only=True):
    """A plan.

    arms: label -> subject; two labels of one subject are its A/A control. baseline: arm compared against.
    sentinel: a case and a subject that run first, last and after every ten processes, to see the machine drift.
    """

    name: str
    question: str
    cases: tuple[Case, ...]
    arms: dict[str, Subject]
    baseline: str
    protocol: Protocol
    sentinel: tuple[Case, Subject] | None = None

    @property
    def planned(self) -> int:
        """Processes of the first rounds; the sentinel's and those of added rounds come on top."""
        return len(self.cases) * len(self.arms) * self.protocol.processes


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One process to start."""

    case: Case
    subject: Subject
    arm: str
    replicate: int
    order: int
    protocol: Protocol


def expand(campaign: Campaign, seed: int, rounds: range, cases: Collection[str] | None = None) -> Iterator[Job]:
    """Yield the jobs of `rounds`: each runs every case once, in seeded random order, the arms of a case adjacent.

    Neighbours in time see the same machine, so slow drift falls on all arms of a case alike. cases: ids of those to run,
    or None for all; `order`, the place in the whole plan, does not depend on it.
    """
    for replicate in rounds:
        rng = random.Random(f"{seed}-{replicate}")
        order = replicate * len(campaign.cases) * len(campaign.arms)
        for case in rng.sample(campaign.cases, len(campaign.cases)):
            for arm in rng.sample(sorted(campaign.arms), len(campaign.arms)):
                if cases is None or case.case_id in cases:
                    yield Job(
                        case=case,
                        subject=campaign.arms[arm],
                        arm=arm,
                        replicate=replicate,
                        order=order,
                        protocol=campaign.protocol,
                    )
                order += 1


def loss_case(op: str, rows: int, precision: str, **layout: int) -> Case:
    """Return the page's standard case: D = 128, 4 rows a class, 1,024 proxy classes; layout: as `draw` takes it."""
    labels = {"C": 1024} if op == "proxy_anchor" else {"per_class": 4}
    return Case(op=op, precision=precision, shape={"N": rows, "D": 128, **labels, **layout})


def layer_case(precision: str, mode: str, experts: int, width: int, tokens: int = 2048) -> Case:
    """Return the work of one rank of the published layer: D = 7168, 6 experts a token, `experts` of its own, routes even."""
    shape = {"T": tokens, "D": 7168, "E": experts, "K": 6, "F": width}
    return Case(op="moe_layer", precision=precision, mode=mode, shape=shape)


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

_LARGE_CASES = tuple(
    loss_case(op, rows, precision)
    for op in LOSSES
    for precision, sizes in (("bf16", (8192, 32768, 131072)), ("fp32", (8192, 32768)))
    for rows in sizes
)
_ACTIVE_CASES = tuple(loss_case(op, 32768, precision, active=30) for op in LOSSES for precision in ("bf16", "fp32"))
# spread 500: clusters as in a trained network; 21: distances of about 0.03 within a class
_LAYOUTS: tuple[dict[str, int], ...] = ({}, {"spread": 500}, {"spread": 21}, {"copies": 2}, {"active": 30})
_ANSWER_CASES = tuple(
    loss_case(op, rows, precision, **layout)
    for op in LOSSES
    for precision in ("fp32", "bf16", "fp16")
    for rows, layouts in ((512, _LAYOUTS), (2048, _LAYOUTS[:1]))
    for layout in layouts
)

_WIDTHS = tuple((experts, width) for experts in (48, 24, 12, 6) for width in (1536, 3072, 6144))


def _forward_cases(precision: str) -> tuple[Case, ...]:
    """Return the balanced rank at EP 8 to 64, the hottest at imbalance 4 and 8, every expert on one rank, and decoding."""
    shapes = [(*sizes, 2048) for sizes in _WIDTHS]
    shapes += [(experts, 3072, 2048 * hot) for experts in (48, 24) for hot in (4, 8)]
    shapes += [(384, 3072, 2048), *((48, 3072, tokens) for tokens in (1, 4, 16, 64, 256))]
    return tuple(layer_case(precision, "inference", *shape) for shape in shapes)


def _training_cases(precision: str) -> tuple[Case, ...]:
    """Return the balanced rank at EP 8 to 64, and the hottest at imbalance 4 and 8 where the published report has it."""
    hot = [(experts, 3072, 2048 * times) for experts in (12, 6) for times in (4, 8)]
    shapes = [*((*sizes, 2048) for sizes in _WIDTHS), *hot]
    return tuple(layer_case(precision, "training", *shape) for shape in shapes)


_CPU = Campaign(
    name="losses-cpu",
    question="How does pytorch-metric-learning 2.9.0 compare with plain closed forms on this machine's CPU?",
    cases=_CPU_CASES,
    arms={"pml": subject("pml-2.9.0"), "pml-again": subject("pml-2.9.0"), "reference": subject("reference")},
    baseline="pml",
    protocol=PROTOCOLS["pmlkit-cpu"],
    sentinel=(loss_case("contrastive", 512, "fp32"), subject("reference")),
)

_FUSED = Campaign(
    name="losses",
    question="The page's 20 configurations on one GPU: the fused losses against 2.9.0 and the compiled dense form.",
    cases=_PAGE_CASES,
    arms={
        "pml": subject("pml-2.9.0"),
        "pml-again": subject("pml-2.9.0"),
        "compiled": subject("dense-compiled"),
        "graph": subject("dense-graph"),
        "fused": subject("pmlkit"),
        "fused-graph": subject("pmlkit-graph"),
        "floor": subject("floor"),
    },
    baseline="pml",
    protocol=PROTOCOLS["pmlkit-five"],
    sentinel=(loss_case("ntxent", 2048, "fp32"), subject("dense-graph")),
)

_ALONE = msgspec.structs.replace(subject("pmlkit"), process="")  # a process of its own: else the A/A control shares one

_ONE_GPU = Campaign(
    name="moe-one-gpu",
    question="One rank's expert work in bf16, forward, without communication: pmlkit against torch's grouped product.",
    cases=_forward_cases("bf16"),
    arms={"standard": subject("moe-bf16"), "standard-again": subject("moe-bf16"), "torch": subject("torch-bf16")},
    baseline="standard",
    protocol=PROTOCOLS["moe-short"],
    sentinel=(layer_case("bf16", "inference", 6, 1536), subject("moe-bf16")),
)

CAMPAIGNS = {
    campaign.name: campaign
    for campaign in (
        _CPU,
        msgspec.structs.replace(
            _CPU,
            name="losses-cpu-full",
            question="The same with NT-Xent at 512 rows, where 2.9.0 builds a matrix of positive by negative pairs.",
            cases=(*_CPU_CASES, loss_case("ntxent", 512, "fp32"), loss_case("ntxent", 512, "bf16")),
            protocol=msgspec.structs.replace(_CPU.protocol, warmup=1, timeout_s=1200.0),
        ),
        msgspec.structs.replace(
            _FUSED,
            name="losses-page",
            question="The page's 20 configurations on one GPU: 2.9.0 against the dense form, eager, compiled and as a graph.",
            arms={
                "pml": subject("pml-2.9.0"),
                "pml-again": subject("pml-2.9.0"),
                "dense": subject("dense"),
                "compiled": subject("dense-compiled"),
                "graph": subject("dense-graph"),
            },
            protocol=PROTOCOLS["pmlkit-short"],
        ),
        _FUSED,
        msgspec.structs.replace(
            _FUSED,
            name="losses-large",
            question="Large batches, random rows: the fused losses against 2.9.0 and the compiled dense form.",
            cases=_LARGE_CASES,
            arms={"fused": _ALONE, "fused-again": _ALONE, "compiled": subject("dense-compiled"), "pml": subject("pml-2.9.0")},
            baseline="fused",
            protocol=PROTOCOLS["pmlkit-large"],
        ),
        msgspec.structs.replace(
            _FUSED,
            name="losses-active",
            question="The same at 32,768 rows of which 30 % of all pairs are within reach of the contrastive margin.",
            cases=_ACTIVE_CASES,
            arms={"fused": _ALONE, "fused-again": _ALONE, "compiled": subject("dense-compiled")},
            baseline="fused",
            protocol=PROTOCOLS["pmlkit-large"],
        ),
        msgspec.structs.replace(
            _FUSED,
            name="loss-gradients",
            question="How far are value and gradient from float64, on random, clustered, copied and crowded rows?",
            cases=_ANSWER_CASES,
            arms={"fused": subject("pmlkit"), "pml": subject("pml-2.9.0")},
            baseline="pml",
            protocol=PROTOCOLS["pmlkit-answer"],
            sentinel=None,
        ),
        msgspec.structs.replace(
            _FUSED,
            name="loss-capacity",
            question="How many rows may a batch have on this GPU, up to 2^20?",
            cases=tuple(loss_case(op, 2**20, precision) for op in LOSSES for precision in ("bf16", "fp32")),
            arms={"fused": subject("pmlkit"), "pml": subject("pml-2.9.0"), "dense": subject("dense")},
            baseline="pml",
            protocol=PROTOCOLS["pmlkit-capacity"],
            sentinel=None,
        ),
        msgspec.structs.replace(
            _FUSED,
            name="loss-attempts",
            question="What other ways to launch and to tile reach, where a target of the losses is missed.",
            cases=(*(case for case in _PAGE_CASES if case.shape["N"] <= 512), loss_case("proxy_anchor", 32768, "bf16")),
            arms={
                "fused": _ALONE,
                "fused-again": _ALONE,
                "floor": msgspec.structs.replace(subject("floor"), process=""),
                "fused-graph": msgspec.structs.replace(subject("pmlkit-graph"), process=""),
                **{name: subject(f"attempt-{name}") for name in ATTEMPTS},
            },
            baseline="fused",
            protocol=msgspec.structs.replace(PROTOCOLS["pmlkit-five"], name="pmlkit-lasting", lasting=True),
        ),
        _ONE_GPU,
        msgspec.structs.replace(
            _ONE_GPU,
            name="moe-one-gpu-training",
            question="One rank's expert work in bf16, forward and backward, without communication.",
            cases=_training_cases("bf16"),
        ),
        msgspec.structs.replace(
            _ONE_GPU,
            name="moe-one-gpu-mxfp8",
            question="The same forward in mxfp8, beside torch's fp8 product with one scale a row, fast and full sums.",
            cases=_forward_cases("mxfp8"),
            arms={
                "staged": subject("moe-mxfp8"),
                "staged-again": subject("moe-mxfp8"),
                "mega": subject("moe-mxfp8-mega"),
                "torch": subject("torch-fp8"),
                "torch-slow": subject("torch-fp8-slow"),
            },
            baseline="staged",
        ),
        msgspec.structs.replace(
            _ONE_GPU,
            name="moe-one-gpu-mxfp8-training",
            question="Forward and backward in mxfp8: with weights quantised in every step, and with those of the step before.",
            cases=_training_cases("mxfp8"),
            arms={
                "staged": subject("moe-mxfp8"),
                "staged-again": subject("moe-mxfp8"),
                "kept": subject("moe-mxfp8-kept"),
            },
            baseline="staged",
        ),
        msgspec.structs.replace(
            _ONE_GPU,
            name="moe-one-gpu-nvfp4",
            question="The same forward in nvfp4, decoded to bf16 in registers; torch has no product to set beside it.",
            cases=_forward_cases("nvfp4"),
            arms={"staged": subject("moe-nvfp4"), "staged-again": subject("moe-nvfp4")},
            baseline="staged",
        ),
    )
}


def campaign(name: str) -> Campaign:
    """Return a campaign. Raises PmlkitError for an unknown name."""
    if name not in CAMPAIGNS:
        raise PmlkitError(f"unknown campaign {name!r} in campaign.py: {nearest(name, list(CAMPAIGNS))}")
    return CAMPAIGNS[name]
