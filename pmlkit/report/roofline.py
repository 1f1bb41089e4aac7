"""Roofline numbers: least times per resource, shares of each roof, and the ceiling that imbalance leaves."""

from collections.abc import Iterable

import pandas as pd

from pmlkit.hardware import Gpu, match_gpu
from pmlkit.release import PublishedRecord
from pmlkit.work import Work

RESOURCES = ("compute", "hbm", "nvlink")


def least_seconds(work: Work, gpu: Gpu) -> dict[str, float]:
    """Return the least time each resource needs, in seconds: no case can be faster than the largest of them.

    compute: each precision's operations at that precision's own peak, added. hbm: bytes at the memory rate.
    Raises PmlkitError for a missing peak.
    """
    return {
        "compute": sum(flops / (gpu.peak(key).value * 1e12) for key, flops in work.flops.items()),
        "hbm": work.hbm_bytes / (gpu.peak("hbm").value * 1e9),
    }


def ridge(gpu: Gpu, precision: str, resource: str = "hbm") -> float:
    """Return the intensity, in FLOP per byte, from which this precision's peak rather than the resource is the limit."""
    return gpu.peak(precision).value * 1e12 / (gpu.peak(resource).value * 1e9)


def roofline_moe(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a mixture-of-experts frame with intensities, shares of the three roofs and the balance-adjusted ceiling.

    Shares are of theoretical peaks: compute from the published useful rate, hbm from the published useful-byte estimate,
    nvlink from the counter rate of the busiest rank and direction. overlap is their sum with the mean counter rate: 1
    reads as if nothing overlapped at nominal rates. On an unknown board every share is missing.
    """
    flops = pd.Series([work.useful_flops for work in frame["work"]], index=frame.index)
    traffic = pd.Series([work.hbm_bytes for work in frame["work"]], index=frame.index)
    passes = frame["mode"].map({"training": 2, "inference": 1})
    payload = frame["payload_bytes_rank0"].where(frame["payload_bytes_rank0"] > 0)
    peaks = [_peaks(gpu, precision) for gpu, precision in zip(frame["gpu"], frame["precision"], strict=True)]
    compute, hbm, nvlink = (pd.Series([p[i] for p in peaks], index=frame.index, dtype=float) for i in range(3))
    table = frame.assign(
        low_tflops=frame["useful_tflops"] * frame["layer_ms"] / frame["high_ms"],
        high_tflops=frame["useful_tflops"] * frame["layer_ms"] / frame["low_ms"],
        intensity=flops / traffic,
        wire_intensity=flops / (payload * passes),
        balance=frame["mean_rows"] / frame["max_rows"],
        compute_share=frame["useful_tflops"] / compute,
        hbm_share=frame["hbm_gbps"] / hbm,
        nvlink_share=frame["nvlink_max_gbps"] / nvlink,
        overlap=frame["useful_tflops"] / compute + frame["hbm_gbps"] / hbm + frame["nvlink_gbps"] / nvlink,
    )
    shares = table[[f"{resource}_share" for resource in RESOURCES]]
    ceiling = compute * table["balance"]
    return table.assign(
        best_share=shares.max(axis=1),
        nearest=shares.dropna().idxmax(axis=1).map(lambda name: str(name).removesuffix("_share")),
        ceiling_tflops=ceiling,
        ceiling_share=table["useful_tflops"] / ceiling,
    )


def _peaks(name: str, precision: str) -> tuple[float | None, float | None, float | None]:
    """Return the compute, memory and link peaks of a board, None each where the ledger has none."""
    gpu = match_gpu(name)
    values = [gpu.peaks[key].value if gpu and key in gpu.peaks else None for key in (precision, "hbm", "nvlink")]
    return values[0], values[1], values[2]


def roofline_losses(records: Iterable[PublishedRecord]) -> pd.DataFrame:
    """Return one row per published loss row that ran: achieved rate and share of the compute and memory roofs.

    float32 products run on CUDA cores here (no TF32 unless asked for), so they are held against that peak. On an unknown
    board the share is missing.
    """
    rows = []
    for record in records:
        gpu = match_gpu(record.gpu)
        if record.loss is None or record.loss.total_ms is None:
            continue
        seconds = record.loss.total_ms.value / 1e3
        bounds = least_seconds(record.work, gpu) if gpu else {}
        least = max(bounds.values(), default=None)
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
                "bound_us": least * 1e6 if least else None,
                "share": least / seconds if least else None,
                "nearest": max(bounds, key=lambda resource: bounds[resource]) if bounds else None,
            }
        )
    return pd.DataFrame(rows)
