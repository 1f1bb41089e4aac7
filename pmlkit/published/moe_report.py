"""Importer of the JSON report on an expert-parallel MoE layer on GB300 (source `gb300-moe`).

Measured: one layer, replayed as CUDA graphs. Each window of 30 iterations counts the slowest rank; a published time is
the median of five windows, reduced alone for each phase, so forward and backward do not add up to the layer. NVLink
rates come from a separate collection.
Limits: ranks are gone (only their maximum is there), five windows of one process and no repetition; the HBM rate is a
byte model over time, not a counter; allocations shared a fabric and the training of EP64 ran at another site than
EP32; the source names no software version; correctness is a flag without an error figure. Seven configurations stand
twice, under different categories, and are two measurements.
"""

import json
import re
import statistics
from math import isclose, isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from pmlkit.errors import PmlkitError, nearest
from pmlkit.moe.work import layer_work
from pmlkit.record import Status, Strict
from pmlkit.release import MoeValues, PublishedRecord

SOURCE = "gb300-moe"
PHASES = {"forward": "forward", "backward": "backward", "combined": "layer"}
REMEDY = "correct the file, or teach pmlkit/published/moe_report.py the new format"
T = TypeVar("T")


class _Shape(Strict, kw_only=True):
    """Sizes of the report. layer_work models one layer without shared experts, so nothing else may pass."""

    T: int
    D: int
    E: int
    K: int
    defaultF: int
    layers: Literal[1]
    sharedExperts: Literal[0]


class _Meta(msgspec.Struct):
    """What records need of the report's head; its notes and peaks are for people."""

    date: str
    gpu: str
    shape: _Shape
    source: str


class _Case(MoeValues, kw_only=True):
    """A case: what it is, and its values."""

    id: str
    mode: Literal["training", "inference"]
    ep: int
    category: str
    width: int
    imbalance: float
    precision: str
    pipeline: str


KEYS = {
    "id": "id", "mode": "mode", "ep": "ep", "category": "category", "F": "width", "imbalance": "imbalance",
    "precision": "precision", "pipeline": "pipeline", "forwardMS": "forward_ms", "backwardMS": "backward_ms",
    "layerMS": "layer_ms", "windows": "windows_ms", "usefulTFPerGPU": "useful_tflops",
    "nvlinkTXGBps": "nvlink_tx_gbps", "nvlinkRXGBps": "nvlink_rx_gbps", "nvlinkMaxTXGBps": "nvlink_max_tx_gbps",
    "nvlinkMaxRXGBps": "nvlink_max_rx_gbps", "analyticalHBMGBps": "analytical_hbm_gbps",
    "receiveRows": "receive_rows", "slotBytes": "slot_bytes", "scratchBytes": "scratch_bytes",
    "arenaBytes": "arena_bytes", "savedBytes": "saved_bytes", "inputBytes": "input_bytes",
    "hostScratchBytes": "host_scratch_bytes", "recompute": "recompute", "allocatedPeakGiB": "allocated_peak_gib",
    "reservedPeakGiB": "reserved_peak_gib", "numericalAccepted": "numerical_accepted",
    "graphAccepted": "graph_accepted", "allocationRetries": "allocation_retries", "ooms": "ooms",
    "logicalForwardPayloadBytesRank0": "payload_bytes_rank0",
    "forwardFlopsPerLogicalPayloadByteRank0": "flops_per_payload_byte_rank0", "capacityRows": "capacity_rows",
}  # fmt: skip


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as it stands, so that a key that stands twice is still seen twice."""


def import_report(text: str, file: str) -> list[PublishedRecord]:
    """Return one record a case, in file order. Raises PmlkitError with file, case id and remedy."""
    try:
        document = _plain(json.loads(text, object_pairs_hook=_Pairs), file)
        literals = json.loads(text, parse_float=str, parse_int=str)  # as printed: no digit passes through a float
    except json.JSONDecodeError as error:
        raise PmlkitError(f"{file}:{error.lineno}: {error}: {REMEDY}") from None
    if not isinstance(document, dict) or set(document) != {"meta", "cases"} or not isinstance(document["cases"], list):
        raise PmlkitError(f"{file}: expected an object of 'meta' and a list 'cases': {REMEDY}")
    meta = _convert(document["meta"], _Meta, f"{file}: meta")
    records: dict[str, PublishedRecord] = {}
    for number, values in enumerate(document["cases"]):
        name = values.get("id") if isinstance(values, dict) else None
        where = f"{file}: case {name!r}" if name else f"{file}: cases[{number}]"
        case = _case(values, where)
        if case.id in records:
            raise PmlkitError(f"{where}: this id stands twice: {REMEDY}")
        records[case.id] = _record(case, meta, literals["cases"][number], where, Path(file).name)
    return list(records.values())


def _plain(value: Any, where: str, path: str = "") -> Any:
    """Turn pairs into dicts. Raises PmlkitError for a key that stands twice and for NaN or infinity."""
    if isinstance(value, _Pairs):
        keys = [key for key, _ in value]
        if "id" in keys:
            where, path = f"{where}: case {dict(value)['id']!r}", ""
        for key in keys:
            if keys.count(key) > 1:
                raise PmlkitError(f"{where}: the key {f'{path}.{key}'.lstrip('.')!r} stands twice: {REMEDY}")
        return {key: _plain(child, where, f"{path}.{key}".lstrip(".")) for key, child in value}
    if isinstance(value, list):
        return [_plain(child, where, f"{path}[{index}]") for index, child in enumerate(value)]
    if isinstance(value, float) and not isfinite(value):
        raise PmlkitError(f"{where}: {path} is {value}, which no measurement gives: {REMEDY}")
    return value


def _convert(values: Any, kind: type[T], where: str) -> T:
    """Return typed values; messages name the keys of the report."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        names = {field: key for key, field in KEYS.items()}
        message = re.sub(r"(?<=\$\.)\w+", lambda match: names.get(match[0], match[0]), str(error))
        raise PmlkitError(f"{where}: {message}: {REMEDY}") from None


def _case(values: Any, where: str) -> _Case:
    """Return a case whose keys, types and redundant figures are in order."""
    if not isinstance(values, dict):
        raise PmlkitError(f"{where}: expected an object, found {values!r}: {REMEDY}")
    if unknown := [key for key in values if key not in KEYS]:
        raise PmlkitError(f"{where}: unknown key {unknown[0]!r}; {nearest(unknown[0], list(KEYS))} {REMEDY}")
    if missing := [key for key in KEYS if key not in values]:
        raise PmlkitError(f"{where}: the key {missing[0]!r} is missing: {REMEDY}")
    case = _convert({KEYS[key]: value for key, value in values.items()}, _Case, where)
    if fault := _fault(case):
        raise PmlkitError(f"{where}: {fault}: {REMEDY}")
    return case


def _fault(case: _Case) -> str | None:
    """Return the first contradiction between figures that say the same, or None."""
    training = case.mode == "training"
    expected = f"{case.mode}-ep{case.ep}-{case.precision}-{case.pipeline}-{case.category}-F{case.width}"
    if case.id != f"{expected}-i{case.imbalance:g}":
        return f"its fields say the id is '{expected}-i{case.imbalance:g}'"
    if set(case.windows_ms) != set(PHASES) - (set() if training else {"backward"}):
        return f"windows are {', '.join(case.windows_ms)}, which {case.mode} does not have exactly"
    published = {"forward": case.forward_ms, "backward": case.backward_ms, "combined": case.layer_ms}
    for phase, windows in case.windows_ms.items():
        value = published[phase]
        if not windows or min(windows) <= 0:
            return f"windows.{phase} {windows} should be positive times"
        if value is None or not isclose(value, statistics.median(windows), rel_tol=1e-12):
            return f"the {phase} time {value} is not the median of its windows {windows}"
    if not training and case.backward_ms is not None:
        return f"backwardMS is {case.backward_ms}, but inference has no backward"
    if case.arena_bytes != case.slot_bytes + case.scratch_bytes:
        return f"arenaBytes {case.arena_bytes} is not slotBytes {case.slot_bytes} + scratchBytes {case.scratch_bytes}"
    if len(case.receive_rows) != case.ep or len(case.saved_bytes) != (case.ep if training else 0):
        return f"{len(case.receive_rows)} receiveRows and {len(case.saved_bytes)} savedBytes do not fit ep {case.ep}"
    return None


def _status(case: _Case) -> Status:
    """Return what the flags of a case come to."""
    if not (case.numerical_accepted and case.graph_accepted):
        return "wrong_result"
    return "oom" if case.ooms else "ok"


def _record(case: _Case, meta: _Meta, literal: dict[str, Any], where: str, file: str) -> PublishedRecord:
    sizes = meta.shape
    try:
        work = layer_work(
            tokens=sizes.T, hidden=sizes.D, width=case.width, experts=sizes.E, top_k=sizes.K, ep=case.ep,
            precision=case.precision, mode=case.mode, imbalance=case.imbalance,
        )  # fmt: skip
    except PmlkitError as error:
        raise PmlkitError(f"{where}: {error}: {REMEDY}") from None
    values = {field: getattr(case, field) for field in MoeValues.__struct_fields__}
    values["windows_ms"] = {name: case.windows_ms[phase] for phase, name in PHASES.items() if phase in case.windows_ms}
    texts = ("id", "mode", "category", "precision", "pipeline")
    return PublishedRecord(
        source=SOURCE, file=file, row=case.id, url=None, retrieved=None, gpu=meta.gpu, op="moe_layer", subject=None,
        version=None, display_name=None, mode=case.mode, precision=case.precision, pipeline=case.pipeline, ep=case.ep,
        imbalance=case.imbalance, category=case.category,
        shape={"T": sizes.T, "D": sizes.D, "E": sizes.E, "K": sizes.K, "F": case.width},
        environment={"date": meta.date, "source": meta.source}, status=_status(case),
        printed={key: literal[key] for key in KEYS if key not in texts and isinstance(literal[key], str)},
        loss=None, moe=MoeValues(**values), work=work,
    )  # fmt: skip
