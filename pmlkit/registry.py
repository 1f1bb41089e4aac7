"""What can be measured, compared and read. Torch-free: code is named by dotted path and resolved in the worker only."""

import importlib
from dataclasses import dataclass
from typing import Any

import msgspec

from pmlkit import __version__
from pmlkit.case import Case
from pmlkit.errors import PmlkitError, nearest
from pmlkit.record import Math
from pmlkit.work import Work


@dataclass(frozen=True)
class Op:
    """An operation. module: its file. work: dotted path of its work model. phases: what is timed, headline first.

    inputs, check: dotted paths of what makes a case's inputs, and of the gate before timing.
    """

    key: str
    title: str
    module: str
    work: str
    phases: tuple[str, ...]
    inputs: str = "pmlkit.losses.bind:make_inputs"
    check: str = "pmlkit.bench.check:check_answer"


class Subject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that computes an op. The version is a field, never part of the name.

    bind: dotted path `module:function` called with (case, inputs) in the worker.
    package: distribution whose installed version must equal `version`, or None for pmlkit's own code. imports: modules
    that its binder needs, imported before the measurement begins.
    process: subjects of one such name are measured after one another in one process, "" = each in its own.
    pipeline: of an expert layer, how its launches are cut.
    interpreter, path: another Python, or a folder put first on its module path, for another release of the package.
    """

    key: str
    name: str
    version: str
    bind: str
    ops: tuple[str, ...]
    precisions: tuple[str, ...]
    package: str | None = None
    imports: tuple[str, ...] = ()
    process: str = ""
    interpreter: str | None = None
    path: str | None = None
    math: Math = "plain"
    pipeline: str | None = None


@dataclass(frozen=True)
class Source:
    """A published source. key: stem of its files in data/published. importer: dotted path. method, limits: in our words."""

    key: str
    title: str
    importer: str
    method: str
    limits: str


LOSS_PHASES = ("pair", "forward", "backward")

OPS = {
    op.key: op
    for op in (
        Op("contrastive", "Contrastive", "pmlkit.losses.contrastive", "pmlkit.losses.work:work_of", LOSS_PHASES),
        Op(
            "batch_hard_triplet", "Batch-hard + Triplet", "pmlkit.losses.batch_hard_triplet",
            "pmlkit.losses.work:work_of", LOSS_PHASES,
        ),
        Op("ntxent", "NT-Xent", "pmlkit.losses.ntxent", "pmlkit.losses.work:work_of", LOSS_PHASES),
        Op("proxy_anchor", "ProxyAnchor", "pmlkit.losses.proxy_anchor", "pmlkit.losses.work:work_of", LOSS_PHASES),
        Op(
            "moe_layer", "Mixture-of-experts layer", "pmlkit.moe", "pmlkit.moe.work:work_of", ("pair",),
            inputs="pmlkit.bench.layer:make_layer_inputs", check="pmlkit.bench.check_layer:check_layer",
        ),
    )
}  # fmt: skip

LOSSES = tuple(key for key, op in OPS.items() if op.module.startswith("pmlkit.losses."))


def _layer(key: str, name: str, bind: str, precision: str, math: Math = "plain", pipeline: str | None = None) -> Subject:
    """Return a subject that computes the expert layer in one format."""
    return Subject(
        key=key, name=name, version=__version__, bind=bind, ops=("moe_layer",), precisions=(precision,), math=math,
        pipeline=pipeline,
    )  # fmt: skip


def _attempt(name: str) -> Subject:
    """Return a subject of another way that was tried with the fused losses; each in a process of its own."""
    return Subject(
        key=f"attempt-{name}", name=f"pmlkit-attempt-{name}", version=__version__, ops=LOSSES, precisions=("fp32", "bf16"),
        bind=f"pmlkit.losses.attempts:bind_{name.replace('-', '_')}",
    )  # fmt: skip


ATTEMPTS = ("operator", "compiled", "taller", "fewer-programs", "more-warps")

SUBJECTS = {
    subject.key: subject
    for subject in (
        Subject(
            key="pml-2.9.0",
            name="pytorch-metric-learning",
            version="2.9.0",
            bind="pmlkit.bench.peers:bind_pml",
            ops=LOSSES,
            precisions=("fp64", "fp32", "bf16", "fp16"),
            package="pytorch-metric-learning",
            imports=("pytorch_metric_learning.losses", "pytorch_metric_learning.miners"),
        ),
        Subject(
            key="reference",
            name="pmlkit-reference",
            version=__version__,
            bind="pmlkit.losses.bind:bind_reference",
            ops=LOSSES,
            precisions=("fp64", "fp32", "bf16", "fp16"),
        ),
        Subject(
            key="pmlkit",
            name="pmlkit-fused",
            version=__version__,
            bind="pmlkit.losses.bind_fused:bind_fused",
            ops=LOSSES,
            precisions=("fp32", "bf16", "fp16"),
            process="fused",
        ),
        Subject(
            key="pmlkit-graph",
            name="pmlkit-fused-graph",
            version=__version__,
            bind="pmlkit.losses.bind_fused:bind_fused_graph",
            ops=LOSSES,
            precisions=("fp32", "bf16", "fp16"),
            process="fused",
        ),
        Subject(
            key="floor",
            name="autograd-floor",
            version=__version__,
            bind="pmlkit.losses.floor:bind_floor",
            ops=LOSSES,
            precisions=("fp32", "bf16", "fp16"),
            process="fused",
        ),
        Subject(
            key="dense",
            name="dense-form",
            version=__version__,
            bind="pmlkit.losses.dense:bind_dense",
            ops=LOSSES,
            precisions=("fp32", "bf16"),
        ),
        Subject(
            key="dense-compiled",
            name="dense-form-compiled",
            version=__version__,
            bind="pmlkit.losses.dense:bind_compiled",
            ops=LOSSES,
            precisions=("fp32", "bf16"),
            imports=("torch._inductor.compile_fx",),
            process="compiled",
        ),
        Subject(
            key="dense-graph",
            name="dense-form-graph",
            version=__version__,
            bind="pmlkit.losses.dense:bind_graph",
            ops=LOSSES,
            precisions=("fp32", "bf16"),
            imports=("torch._inductor.compile_fx",),
            process="compiled",
        ),
        *map(_attempt, ATTEMPTS),
        _layer("moe-bf16", "pmlkit-layer", "pmlkit.bench.layer:bind_standard", "bf16", pipeline="standard"),
        _layer("moe-mxfp8", "pmlkit-layer", "pmlkit.bench.layer:bind_staged", "mxfp8", pipeline="staged", math="folded-fp8"),
        _layer(
            "moe-mxfp8-kept",
            "pmlkit-layer-kept-weights",
            "pmlkit.bench.layer:bind_kept",
            "mxfp8",
            pipeline="staged",
            math="folded-fp8",
        ),
        _layer("moe-mxfp8-mega", "pmlkit-layer", "pmlkit.bench.layer:bind_mega", "mxfp8", pipeline="mega", math="folded-fp8"),
        _layer("moe-nvfp4", "pmlkit-layer", "pmlkit.bench.layer:bind_staged", "nvfp4", pipeline="staged", math="decode-bf16"),
        _layer("torch-bf16", "torch-grouped-mm", "pmlkit.bench.peers_layer:bind_grouped", "bf16"),
        _layer("torch-fp8", "torch-scaled-grouped-mm", "pmlkit.bench.peers_layer:bind_scaled", "mxfp8"),
        _layer("torch-fp8-slow", "torch-scaled-grouped-mm-fp32-sums", "pmlkit.bench.peers_layer:bind_scaled_slow", "mxfp8"),
    )
}

SOURCES = {
    source.key: source
    for source in (
        Source(
            "pml-3.0.1",
            "PML 3.0.1 timings and memory",
            "pmlkit.published.pml_page:import_page",
            "3 fresh processes per configuration; each averages 3 blocks of 100 forward and backward pairs",
            "no encoder, optimizer or data loading; random data; peak memory includes the matrix-product workspace",
        ),
        Source(
            "gb300-moe",
            "GB300 mixture-of-experts report",
            "pmlkit.published.moe_report:import_report",
            "CUDA graphs; maximum rank of each window of 30 replays, then the median of 5 windows",
            "four allocations, some sharing a fabric; EP64 training at another site; NVLink counters from separate runs; "
            "memory traffic is a useful-byte model, not a counter",
        ),
    )
}


def subject(key: str) -> Subject:
    """Return a subject. Raises PmlkitError for an unknown key."""
    if key not in SUBJECTS:
        raise PmlkitError(f"unknown subject {key!r} in registry.py: {nearest(key, list(SUBJECTS))}")
    return SUBJECTS[key]


def op(key: str) -> Op:
    """Return an op. Raises PmlkitError for an unknown key."""
    if key not in OPS:
        raise PmlkitError(f"unknown op {key!r} in registry.py: {nearest(key, list(OPS))}")
    return OPS[key]


def resolve(path: str) -> Any:
    """Import `module:name`. The import error of a missing module passes through."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def work_of(case: Case) -> Work:
    """Return the declared work of a case."""
    return resolve(op(case.op).work)(case)
