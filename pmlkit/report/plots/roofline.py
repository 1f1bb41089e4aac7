"""Roofline figures: memory and link panels under the compute roofs, and the share of each roof."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from pmlkit.errors import PmlkitError
from pmlkit.hardware import Gpu
from pmlkit.report.figure import PALETTE, PIPELINE_MARKERS, PRECISION_COLOURS, ReportFigure, style
from pmlkit.report.roofline import RESOURCES, ridge

_ROOF_STYLES = {"bf16": "-", "fp8": "--", "mxfp8": "--", "nvfp4": ":", "fp32": "-.", "tf32": "-."}


def plot_roofline(frame: pd.DataFrame, gpu: Gpu, precisions: list[str]) -> ReportFigure:
    """Draw every case under the theoretical roofs of `gpu`: left against memory bytes, right against link bytes.

    frame: a `roofline_moe` frame, all of one board. Memory bytes are a model, so those points are hollow. Cases that
    send nothing have no place on the link panel. Small grey ticks: the ceiling that imbalance leaves to a case.
    Raises PmlkitError if no case has one of the precisions.
    """
    frame = frame[frame["precision"].isin(precisions)]
    if frame.empty:
        raise PmlkitError(f"precisions {precisions}: no case has one of them; use bf16, mxfp8 or nvfp4")
    with style():
        figure = ReportFigure(figsize=(10, 5))
        left, right = figure.subplots(1, 2, sharey=True)
        for axis, column, resource in ((left, "intensity", "hbm"), (right, "wire_intensity", "nvlink")):
            _draw_roofs(axis, gpu, precisions, resource, frame[column].dropna())
            _draw_points(axis, frame, column, hollow=resource == "hbm")
        left.set(xlabel="useful FLOP per byte of memory (useful-byte model)", ylabel="useful TFLOP/s per GPU", title="HBM")
        right.set(xlabel="useful FLOP per byte that rank 0 sends (bf16 payload)", title="NVLink, per direction")
        used = dict.fromkeys(zip(frame["precision"], frame["pipeline"], strict=True))
        handles = [left.plot([], [], PIPELINE_MARKERS[p], color=PRECISION_COLOURS[k], mfc="none")[0] for k, p in used]
        figure.legend(handles, [f"{k} {p}" for k, p in used], loc="outside lower center", ncols=max(1, len(used)))
        figure.suptitle(f"{gpu.title}: theoretical dense peaks, source dated {gpu.peak('hbm').retrieved}", fontsize=10)
    roofs = ", ".join(f"{p} {gpu.peak(p).value:,.0f} TFLOP/s (ridge {ridge(gpu, p):,.1f} FLOP/byte)" for p in precisions)
    best = [group.nlargest(1, "tflops").iloc[0] for _, group in frame.groupby("precision", sort=False)]
    figure.alt = (
        f"Roofline of {len(frame)} cases on {gpu.title}. Roofs: {roofs}; memory {gpu.peak('hbm').value:,.0f} GB/s; link "
        f"{gpu.peak('nvlink').value:,.0f} GB/s per direction. Fastest per precision: "
        + "; ".join(f"{r.precision} {r.tflops:,.0f} TFLOP/s at {r.intensity:,.0f} FLOP/byte ({r.row})" for r in best)
        + "."
    )
    return figure


def plot_shares(frame: pd.DataFrame, title: str) -> ReportFigure:
    """Draw, for every case, the share of each roof as bars; with three resources the nearest roof is what matters."""
    frame = frame.sort_values(["mode", "precision", "pipeline", "ep", "width"]).reset_index(drop=True)
    with style():
        figure = ReportFigure(figsize=(9, 1.4 + 0.24 * len(frame)))
        axis = figure.subplots()
        for offset, (resource, colour) in enumerate(zip(RESOURCES, PALETTE, strict=False)):
            places = np.arange(len(frame)) + (offset - 1) * 0.26
            axis.barh(places, 100 * frame[f"{resource}_share"], height=0.24, color=colour, label=resource)
        axis.set_yticks(range(len(frame)), frame["row"].tolist(), fontsize=7)
        axis.set_ylim(len(frame) - 0.5, -0.5)
        axis.set(xlim=(0, 100), xlabel="share of the theoretical roof, %", title=title)
        figure.legend(loc="outside lower center", ncols=3)
    nearest = frame["nearest"].value_counts()
    figure.alt = (
        f"{title}: {len(frame)} cases. Nearest roof: {', '.join(f'{name} in {n}' for name, n in nearest.items())}. "
        f"Best share: median {100 * frame['best_share'].median():.1f} %, maximum {100 * frame['best_share'].max():.1f} %. "
        + "Compute, HBM and NVLink shares: "
        + "; ".join(
            f"{r['row']} {100 * r['compute_share']:.0f}/{100 * r['hbm_share']:.0f}/{100 * r['nvlink_share']:.0f} %"
            for r in frame.to_dict("records")
        )
        + "."
    )
    return figure


def plot_ceilings(frame: pd.DataFrame) -> ReportFigure:
    """Draw the rate of every imbalanced or balanced case beside the ceiling its imbalance leaves: peak times mean/max rows."""
    frame = frame.sort_values(["precision", "pipeline", "mode", "ep", "imbalance"]).reset_index(drop=True)
    frame = frame[frame["category"] == "single_layer"].reset_index(drop=True)
    with style():
        figure = ReportFigure(figsize=(9, 1.4 + 0.2 * len(frame)))
        axis = figure.subplots()
        for place, row in enumerate(frame.to_dict("records")):
            colour = PRECISION_COLOURS[row["precision"]]
            axis.plot([row["tflops"], row["ceiling_tflops"]], [place, place], color="#cccccc", linewidth=1)
            axis.plot(row["ceiling_tflops"], place, "|", color=colour, markersize=9, markeredgewidth=2)
            axis.plot(row["tflops"], place, PIPELINE_MARKERS[row["pipeline"]], color=colour, markersize=4)
        axis.set_yticks(range(len(frame)), frame["row"].tolist(), fontsize=7)
        axis.set_ylim(len(frame) - 0.5, -0.5)
        axis.set(xscale="log", xlabel="useful TFLOP/s per GPU: measured (marker) and balance-adjusted ceiling (bar)")
    lines = (
        f"{r['row']} {r['tflops']:,.0f} of {r['ceiling_tflops']:,.0f} TFLOP/s ({100 * r['ceiling_share']:.0f} %)"
        for r in frame.to_dict("records")
    )
    figure.alt = (
        "Measured rate against the ceiling that imbalance leaves (peak times mean over maximum rows): " + "; ".join(lines) + "."
    )
    return figure


def plot_loss_rates(frame: pd.DataFrame) -> ReportFigure:
    """Draw the share of the nearest roof that published loss rows reach, on a logarithmic axis; one panel a GPU."""
    gpus, labels = list(dict.fromkeys(frame["gpu"])), list(dict.fromkeys(frame["label"]))
    sizes = sorted(frame["N"].unique())
    with style():
        figure = ReportFigure(figsize=(9, 3.6))
        axes = figure.subplots(1, len(gpus), squeeze=False, sharey=True)[0]
        for axis, gpu in zip(axes, gpus, strict=True):
            for place, label in enumerate(labels):
                rows = frame[(frame["gpu"] == gpu) & (frame["label"] == label)]
                spread = rows["N"].map(sizes.index) + (place - 1) * 0.2
                axis.plot(
                    spread, 100 * rows["share"], "o", mfc="none", color=PALETTE[place], label=label if gpu == gpus[0] else None
                )
            axis.set_xticks(range(len(sizes)), [f"{n:,}" for n in sizes])
            axis.set(yscale="log", title=gpu, xlabel="batch")
        axes[0].set_ylabel("share of the nearest roof, %")
        figure.legend(loc="outside lower center", ncols=len(labels))
    words = [
        f"{gpu} batch {n:,}: {100 * g['share'].min():.2g} to {100 * g['share'].max():.2g} %"
        for (gpu, n), g in frame.groupby(["gpu", "N"], sort=False)
    ]
    figure.alt = "Share of the nearest theoretical roof that each published loss row reaches. " + "; ".join(words) + "."
    return figure


def _draw_roofs(axis: Axes, gpu: Gpu, precisions: list[str], resource: str, intensities: pd.Series) -> None:
    """Draw the slanted roof of a resource and the flat roof of each precision, labelled at its right end."""
    rate = gpu.peak(resource).value / 1e3  # TB/s: intensity x TB/s = TFLOP/s
    lows = [ridge_at(gpu, p, rate) for p in precisions] + intensities.tolist()
    x = np.geomspace(min(lows) / 4, max(lows) * 4, 200)
    top = max(gpu.peak(p).value for p in precisions)
    axis.plot(x, np.minimum(x * rate, top), color="#444444", linewidth=1)
    for precision in precisions:
        peak = gpu.peak(precision).value
        flat = x[x * rate >= peak]
        axis.plot(
            flat, np.full_like(flat, peak), _ROOF_STYLES.get(precision, "-"), color=PRECISION_COLOURS[precision], linewidth=1
        )
        axis.annotate(
            f"{precision} {peak:,.0f}", (x[-1], peak), ha="right", va="bottom", fontsize=7, color=PRECISION_COLOURS[precision]
        )
    axis.set(xscale="log", yscale="log")


def ridge_at(gpu: Gpu, precision: str, terabytes_per_s: float) -> float:
    """Return the intensity where a slanted roof of this rate meets the flat roof of a precision, in FLOP per byte."""
    return gpu.peak(precision).value / terabytes_per_s


def _draw_points(axis: Axes, frame: pd.DataFrame, column: str, hollow: bool) -> None:
    for row in frame.dropna(subset=[column]).to_dict("records"):
        colour = PRECISION_COLOURS[row["precision"]]
        axis.plot([row[column]] * 2, [row["low_tflops"], row["high_tflops"]], color=colour, linewidth=1)
        axis.plot(
            row[column], row["tflops"], PIPELINE_MARKERS[row["pipeline"]], color=colour,
            mfc="none" if hollow else colour, markersize=5, markeredgewidth=0.8,
        )  # fmt: skip
        axis.plot(row[column], row["ceiling_tflops"], "_", color="#999999", markersize=5, markeredgewidth=0.6)
