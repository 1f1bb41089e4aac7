"""Records as data frames: one row a record, then one row a cell (everything one version showed of one case on one GPU)."""

from collections.abc import Iterable
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
    """Return one row per measured process: identity, status, and milliseconds per iteration (median of its samples).

    Sorted by case, arm and replicate, in the order of the registries; `order` keeps the order in time.
    """
    rows = []
    for record in records:
        row = {
            "gpu": machine_name(run),
            "case": record.case_id,
            "op": record.op,
            "precision": record.precision,
            "N": record.shape.get("N"),
            "label": record.arm,
            "subject": record.subject,
            "version": record.version,
            "replicate": record.replicate,
            "order": record.order,
            "status": record.status,
            "reason": record.reason or "",
            "flags": ", ".join(record.flags),
            "wall_s": record.wall_s,
            "error": record.check.rms_rel if record.check else None,
            "limit": record.check.limit if record.check else None,
        }
        for phase in registry.op(record.op).phases:
            row[f"{phase}_ms"] = iteration_ms(record, phase)
        beyond = [memory.allocated_peak_bytes - memory.baseline_bytes for memory in record.memory or []]
        row["beyond_mib"] = max(beyond) / 2**20 if beyond else None
        rows.append(row)
    ranks = {"op": list(registry.OPS), "precision": list(PRECISIONS)}
    order = ["op", "precision", "N", "case", "label", "replicate"]
    return pd.DataFrame(rows).sort_values(
        order,
        ignore_index=True,
        key=lambda column: column.map(ranks[str(column.name)].index) if column.name in ranks else column,
    )


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


def cells_measured(frame: pd.DataFrame, phase: str = "pair") -> pd.DataFrame:
    """Return one row per (machine, case, arm): `ok` or the most frequent failure, and one value a process in milliseconds.

    Raises PmlkitError if an arm mixes two versions: they would be averaged into a release that does not exist.
    """
    for arm, group in frame.groupby("label", sort=False):
        versions = sorted(set(group["subject"] + " " + group["version"]))
        if len(versions) > 1:
            raise PmlkitError(f"arm {arm!r} of this run mixes {' and '.join(versions)}: give each version its own arm")
    rows = []
    for key, group in frame.groupby(CELL_KEYS, sort=False):
        failed = group.loc[group["status"] != "ok", "status"]
        status = "ok" if failed.empty else failed.mode()[0]
        values = group[f"{phase}_ms"].dropna().tolist() if status == "ok" else []
        rows.append({**dict(zip(CELL_KEYS, key, strict=True)), "status": status, "values": values, "rounding": 0.0})
    return unique_cells(pd.DataFrame(rows, columns=[*CELL_KEYS, "status", "values", "rounding"]))


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


def case_name(op: Any, precision: Any, rows: Any) -> str:
    """Return a case as a reader says it: `Contrastive bfloat16 2,048`."""
    return f"{registry.OPS[op].title} {PRECISIONS[precision].element} {rows:,}"
