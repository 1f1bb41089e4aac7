"""Roofline numbers: least times per resource, shares of each roof, and the ceiling that imbalance leaves."""

from collections.abc import Iterable

import pandas as pd

from pmlkit.hardware import Gpu, match_gpu
from pmlkit.release import PublishedRecord
from pmlkit.work import Work

RESOURCES = ("compute", "hbm", "nvlink")


def least_seconds(work: Work, gpu: Gpu, wire_bytes: float | None = None) -> dict[str, float]:
    """Return the least time each resource needs, in seconds: no case can be faster than the largest of them.

    compute: each precision's operations at that precision's own peak, added. hbm: bytes at the memory rate. nvlink:
    `wire_bytes` per direction at the link rate, absent where nothing is sent. Raises PmlkitError for a missing peak.
    """
    bounds = {
        "compute": sum(flops / (gpu.peak(key).value * 1e12) for key, flops in work.flops.items()),
        "hbm": work.hbm_bytes / (gpu.peak("hbm").value * 1e9),
    }
    if wire_bytes:
        bounds["nvlink"] = wire_bytes / (gpu.peak("nvlink").value * 1e9)
    return bounds


def balance(rows: Iterable[int]) -> float:
    """Return mean over maximum of the rows per rank: the share of a peak that the busiest rank leaves to the mean."""
    received = list(rows)
    return sum(received) / len(received) / max(received)


def ridge(gpu: Gpu, precision: str) -> float:
    """Return the intensity, in FLOP per byte, from which this precision's peak rather than memory is the limit."""
    return gpu.peak(precision).value * 1e12 / (gpu.peak("hbm").value * 1e9)


def roofline_moe(records: Iterable[PublishedRecord]) -> pd.DataFrame:
    """Return one row per published case: rates, intensities, shares of the three roofs and of the balanced ceiling.

    Shares are of theoretical peaks: compute from useful operations, hbm from the published useful-byte estimate, nvlink
    from the counter rate of the busiest rank and direction. overlap is their sum with the mean counter rate: 1 reads as
    if nothing overlapped at nominal rates. On an unknown board every share is missing.
    """
    rows = []
    for record in records:
        assert record.moe is not None
        moe, gpu = record.moe, match_gpu(record.gpu)
        seconds = moe.layer_ms / 1e3
        passes = 2 if record.mode == "training" else 1
        busiest = max(moe.nvlink_max_tx_gbps, moe.nvlink_max_rx_gbps)
        row = {
            "row": record.row,
            "gpu": record.gpu,
            "mode": record.mode,
            "ep": record.ep,
            "imbalance": record.imbalance,
            "width": record.shape["F"],
            "precision": record.precision,
            "pipeline": record.pipeline,
            "category": record.category,
            "tflops": record.work.useful_flops / seconds / 1e12,
            "low_tflops": record.work.useful_flops / max(moe.windows_ms["layer"]) / 1e9,
            "high_tflops": record.work.useful_flops / min(moe.windows_ms["layer"]) / 1e9,
            "intensity": record.work.useful_flops / record.work.hbm_bytes,
            "wire_intensity": record.work.useful_flops / (moe.payload_bytes_rank0 * passes)
            if moe.payload_bytes_rank0
            else None,
            "balance": balance(moe.receive_rows),
        }
        if gpu is not None:
            bounds = least_seconds(record.work, gpu, busiest * 1e9 * seconds)
            row |= {f"{resource}_share": bounds[resource] / seconds for resource in RESOURCES}
            row["overlap"] = row["compute_share"] + row["hbm_share"] + moe.nvlink_tx_gbps / gpu.peak("nvlink").value
            row["nearest"] = max(bounds, key=lambda resource: bounds[resource])
            row["best_share"] = max(bounds.values()) / seconds
            row["ceiling_tflops"] = gpu.peak(record.precision).value * row["balance"]
            row["ceiling_share"] = row["tflops"] / row["ceiling_tflops"]
        rows.append(row)
    return pd.DataFrame(rows)


def roofline_losses(records: Iterable[PublishedRecord]) -> pd.DataFrame:
    """Return one row per published loss row that ran: achieved rate and share of the compute and memory roofs.

    float32 products run on CUDA cores here (no TF32 unless asked for), so they are held against that peak.
    """
    rows = []
    for record in records:
        gpu = match_gpu(record.gpu)
        if record.loss is None or record.loss.total_ms is None or gpu is None:
            continue
        seconds = record.loss.total_ms.value / 1e3
        bounds = least_seconds(record.work, gpu)
        rows.append(
            {
                "gpu": record.gpu,
                "op": record.op,
                "precision": record.precision,
                "N": record.shape["N"],
                "label": record.display_name,
                "total_ms": record.loss.total_ms.value,
                "tflops": record.work.useful_flops / seconds / 1e12,
                "intensity": record.work.useful_flops / record.work.hbm_bytes,
                "bound_us": max(bounds.values()) * 1e6,
                "share": max(bounds.values()) / seconds,
                "nearest": max(bounds, key=lambda resource: bounds[resource]),
            }
        )
    return pd.DataFrame(rows)
