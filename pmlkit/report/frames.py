"""Records as data frames: one row a record, then one row a cell (everything one version showed of one case on one GPU)."""

from collections.abc import Iterable
from statistics import mode
from typing import Any

import numpy as np
import pandas as pd

from pmlkit import registry
from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.hardware import Gpu, match_gpu
from pmlkit.precision import PRECISIONS
from pmlkit.record import Record
from pmlkit.release import LossValues, Printed, PublishedRecord
from pmlkit.run import Run

# What a comparison holds equal; `case` is the case id, so that two widths or seeds of one op never share a cell.
KEYS = ["gpu", "case", "op", "precision", "N"]
CELL_KEYS = [*KEYS, "label"]


def machine_name(run: Run) -> str:
    """Return what a run measured: its GPU, or the processor for a CPU campaign, whatever else the host has."""
    gpus = run.environment.get("gpus") or []
    if run.device == "cuda" and gpus:
        return gpus[0]["name"]
    return f"CPU: {run.environment.get('cpu', 'unknown')}"


def board_of(run: Run) -> Gpu | None:
    """Return the ledger's board of a run, or None: for a CPU, an unknown board, or one with another power limit."""
    gpus = run.environment.get("gpus") or [{}]
    return match_gpu(machine_name(run), power_w=gpus[0].get("power_limit_w")) if run.device == "cuda" else None


def frame_records(run: Run, records: Iterable[Record]) -> pd.DataFrame:
    """Return one row per measured process: identity, status, milliseconds per iteration, memory, pace and clock.

    Sorted by case, arm and replicate, in the order of the registries; `order` keeps the order in time.
    """
    machine = machine_name(run)
    rows = []
    for record in in_order(records):
        check = record.check
        row = {
            "gpu": machine,
            "case": record.case_id,
            "op": record.op,
            "precision": record.precision,
            "N": rows_of(record.shape),
            "layout": layout_name(record.shape),
            "label": record.arm,
            "subject": record.subject,
            "version": record.version,
            "replicate": record.replicate,
            "order": record.order,
            "status": record.status,
            "reason": record.reason or "",
            "flags": ", ".join(record.flags),
            "wall_s": record.wall_s,
            "error": check.rms_rel if check else None,
            "limit": check.limit if check else None,
            "largest": record.capacity.largest if record.capacity else None,
            "refused": record.capacity.refused if record.capacity else None,
            "refusal": (record.capacity.reason or "") if record.capacity else "",
        }
        for phase in registry.op(record.op).phases:
            row[f"{phase}_ms"] = iteration_ms(record, phase)
        rows.append(row | _memory(record) | _pace(record))
    return pd.DataFrame(rows)


def in_order(records: Iterable[Record]) -> list[Record]:
    """Return the records by case, arm and replicate, ops and precisions in the order of the registries."""
    ops, precisions = ({key: place for place, key in enumerate(keys)} for keys in (registry.OPS, PRECISIONS))
    return sorted(records, key=lambda r: (ops[r.op], precisions[r.precision], rows_of(r.shape), r.case_id, r.arm, r.replicate))


def _memory(record: Record) -> dict[str, float | None]:
    """Return the peak of the fullest rank in MiB: all of it, beyond the inputs, and beyond workspaces of the library too."""
    if not record.memory:
        return {"peak_mib": None, "beyond_mib": None, "workspace_mib": None}
    fullest = max(record.memory, key=lambda memory: memory.allocated_peak_bytes)
    workspace = fullest.workspace_bytes or 0
    own = fullest.allocated_peak_bytes - fullest.baseline_bytes - workspace
    return {
        "peak_mib": fullest.allocated_peak_bytes / 2**20,
        "beyond_mib": own / 2**20,
        "workspace_mib": workspace / 2**20,
    }


def _pace(record: Record) -> dict[str, float | None]:
    """Return the mean SM clock while timing, and of a profiled pair launches, busy time, and its share of the wall time."""
    clocks = record.conditions[0].sm_mhz if record.conditions else []
    row: dict[str, float | None] = {"sm_mhz": sum(clocks) / len(clocks) if clocks else None}
    if not record.kernels:
        return row | dict.fromkeys(("launches", "busy_ms", "busy_share", "queued_ms"))
    seen = record.kernels[0]
    busy, wall = seen.busy_ns / seen.pairs / 1e6, iteration_ms(record, "pair_wall")
    queued = None if seen.queued_ns is None else seen.queued_ns / seen.pairs / 1e6
    share = busy / wall if wall else None
    return row | {"launches": seen.launches / seen.pairs, "busy_ms": busy, "busy_share": share, "queued_ms": queued}


def iteration_ms(record: Record, phase: str) -> float | None:
    """Return a process's one number in milliseconds, or None."""
    nanoseconds = record.iteration_ns(phase)
    return None if nanoseconds is None else nanoseconds / 1e6


def frame_published_losses(records: Iterable[PublishedRecord]) -> pd.DataFrame:
    """Return one row per published loss row; a column and its `_hw` (half-width of rounding) per printed value."""
    rows = []
    for record in records:
        assert record.loss is not None
        row = {
            "gpu": record.gpu,
            "case": Case(op=record.op, precision=record.precision, shape=record.shape).case_id,
            "op": record.op,
            "precision": record.precision,
            "N": record.shape["N"],
            "label": record.display_name,
            "version": record.version,
            "status": record.status,
        }
        for name in LossValues.__struct_fields__:
            printed: Printed | None = getattr(record.loss, name)
            row[name] = printed.value if printed else None
            row[f"{name}_hw"] = printed.half_width if printed else None
        row |= {f"printed_{column}": text for column, text in record.printed.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def rebuild_processes(mean: float, low: float, high: float) -> list[float]:
    """Return the three process values behind a printed mean and range: the middle one follows from the mean."""
    return [low, float(np.clip(3 * mean - low - high, low, high)), high]


def cells_published(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per (GPU, case, version): status, the three rebuilt process values, relative rounding of the mean."""
    cells = frame[[*CELL_KEYS, "status"]].copy()
    columns = zip(frame["status"], frame["total_ms"], frame["low_ms"], frame["high_ms"], strict=True)
    values = [rebuild_processes(mean, low, high) if status == "ok" else [] for status, mean, low, high in columns]
    cells["values"] = pd.Series(values, index=frame.index)
    cells["rounding"] = (frame["total_ms_hw"] / frame["total_ms"]).fillna(0.0)
    return unique_cells(cells)


def cells_measured(run: Run, records: Iterable[Record], phase: str = "pair") -> pd.DataFrame:
    """Return one row per case and arm: `ok` or the most frequent failure; one value a process in milliseconds (`values`)
    and, where the clock was read, in millions of clock cycles (`cycles`).

    Raises PmlkitError if an arm mixes two versions: they would be averaged into a release that does not exist.
    """
    machine = machine_name(run)
    cells: dict[tuple[Any, ...], tuple[list[str], list[float], list[float]]] = {}
    versions: dict[str, set[str]] = {}
    for record in in_order(records):
        versions.setdefault(record.arm, set()).add(f"{record.subject} {record.version}")
        key = (machine, record.case_id, record.op, record.precision, rows_of(record.shape), record.arm)
        failed, values, cycles = cells.setdefault(key, ([], [], []))
        value = iteration_ms(record, phase)
        if record.status != "ok":
            failed.append(record.status)
        elif value is not None:
            values.append(value)
            clocks = record.conditions[0].sm_mhz if record.conditions else []
            cycles += [value * sum(clocks) / len(clocks) / 1e3] if clocks else []
    for arm, found in versions.items():
        if len(found) > 1:
            raise PmlkitError(f"arm {arm!r} of this run mixes {' and '.join(sorted(found))}: give each version its own arm")
    rows = [
        {
            **dict(zip(CELL_KEYS, key, strict=True)),
            "status": mode(failed) if failed else "ok",
            "values": [] if failed else values,
            "cycles": cycles if len(cycles) == len(values) and not failed else [],
            "rounding": 0.0,
        }
        for key, (failed, values, cycles) in cells.items()
    ]
    return unique_cells(pd.DataFrame(rows, columns=[*CELL_KEYS, "status", "values", "cycles", "rounding"]))


def unique_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells, refusing two rows with one key: a pivot must never merge repeats silently."""
    repeated = cells[cells.duplicated(CELL_KEYS, keep=False)]
    assert repeated.empty, f"cells repeat: {repeated[CELL_KEYS].to_dict('records')[:2]}"
    return cells.reset_index(drop=True)


def frame_moe(records: Iterable[PublishedRecord]) -> pd.DataFrame:
    """Return one row per published mixture-of-experts case; the repeated configurations stay separate rows."""
    rows = []
    for record in records:
        assert record.moe is not None
        moe = record.moe
        rows.append(
            {
                "row": record.row,
                "gpu": record.gpu,
                "mode": record.mode,
                "ep": record.ep,
                "imbalance": record.imbalance,
                "width": record.shape["F"],
                "precision": record.precision,
                "pipeline": record.pipeline,
                "category": record.category,
                "status": record.status,
                "forward_ms": moe.forward_ms,
                "backward_ms": moe.backward_ms,
                "layer_ms": moe.layer_ms,
                "low_ms": min(moe.windows_ms["layer"]),
                "high_ms": max(moe.windows_ms["layer"]),
                "useful_tflops": moe.useful_tflops,
                "nvlink_gbps": moe.nvlink_tx_gbps,
                "nvlink_max_gbps": max(moe.nvlink_max_tx_gbps, moe.nvlink_max_rx_gbps),
                "hbm_gbps": moe.analytical_hbm_gbps,
                "payload_bytes_rank0": moe.payload_bytes_rank0,
                "mean_rows": float(np.mean(moe.receive_rows)),
                "max_rows": max(moe.receive_rows),
                "slot_gib": moe.slot_bytes / 2**30,
                "scratch_gib": moe.scratch_bytes / 2**30,
                "arena_gib": moe.arena_bytes / 2**30,
                "saved_max_gib": max(moe.saved_bytes, default=0) / 2**30,
                "allocated_gib": moe.allocated_peak_gib,
                "reserved_gib": moe.reserved_peak_gib,
                "windows": moe.windows_ms["layer"],
                "work": record.work,
            }
        )
    return pd.DataFrame(rows)


def rows_of(shape: dict[str, int]) -> int:
    """Return the rows of a batch, of a layer its tokens."""
    return shape.get("N", shape.get("T", 0))


def layout_name(shape: dict[str, int]) -> str:
    """Return how a case's rows are laid out: `random`, or what `draw` was asked for."""
    words = {"spread": "clusters {:g} wide", "copies": "{:g} copies each", "active": "{:g} % of pairs near"}
    amounts = {key: shape[key] / 1000 if key == "spread" else shape[key] for key in words if key in shape}
    return ", ".join(words[key].format(amount) for key, amount in amounts.items()) or "random"


def case_name(op: Any, precision: Any, rows: Any) -> str:
    """Return a case as a reader says it: `Contrastive bfloat16 2,048`."""
    return f"{registry.OPS[op].title} {PRECISIONS[precision].element} {rows:,}"
