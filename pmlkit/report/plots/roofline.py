"""Roofline figures: memory and link panels under the compute roofs, the share of each roof, and the balanced ceiling."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from pmlkit.errors import PmlkitError
from pmlkit.hardware import Gpu, match_gpu
from pmlkit.report.figure import PALETTE, ReportFigure, pipeline_marker, precision_colour, style
from pmlkit.report.roofline import RESOURCES, ridge

_ROOF_STYLES = {"bf16": "-", "fp8": "--", "mxfp8": "--", "nvfp4": ":", "fp32": "-.", "tf32": "-."}
_UNKNOWN = "the peaks ledger does not know this board, so there are no roofs and no percentages"


def plot_roofline(frame: pd.DataFrame, precisions: list[str]) -> ReportFigure:
    """Draw every case under the theoretical roofs of its board: left against memory bytes, right against link bytes.

    frame: a `roofline_moe` frame of one board. Memory bytes are a model, so those points are hollow. Cases that send
    nothing have no place on the link panel. Small grey ticks: the ceiling that imbalance leaves to a case. A board that
    the ledger does not know gets its points and no roof. Raises PmlkitError if no case has one of the precisions.
    """
    frame = frame[frame["precision"].isin(precisions)]
    if frame.empty:
        raise PmlkitError(f"precisions {precisions}: no case has one of them; use bf16, mxfp8 or nvfp4")
    name, gpu = frame["gpu"].iloc[0], match_gpu(frame["gpu"].iloc[0])
    with style():
        figure = ReportFigure(figsize=(10, 5))
        left, right = figure.subplots(1, 2, sharey=True)
        for axis, column, resource in ((left, "intensity", "hbm"), (right, "wire_intensity", "nvlink")):
            if gpu is not None:
                _draw_roofs(axis, gpu, precisions, resource, frame[column].dropna())
            _draw_points(axis, frame, column, hollow=resource == "hbm")
            axis.set(xscale="log", yscale="log")
        left.set(xlabel="useful FLOP per byte of memory (useful-byte model)", ylabel="useful TFLOP/s per GPU", title="HBM")
        right.set(xlabel="useful FLOP per payload byte of rank 0 (bf16, out and back)", title="NVLink, per direction")
        used = dict.fromkeys(zip(frame["precision"], frame["pipeline"], strict=True))
        handles = [left.plot([], [], pipeline_marker(p), color=precision_colour(k), mfc="none")[0] for k, p in used]
        figure.legend(handles, [f"{k} {p}" for k, p in used], loc="outside lower center", ncols=max(1, len(used)))
        dated = f"theoretical dense peaks, sources of {gpu.peak('hbm').retrieved}" if gpu else _UNKNOWN
        figure.suptitle(f"{gpu.title if gpu else name}: {dated}", fontsize=10)
    best = [group.nlargest(1, "useful_tflops").iloc[0] for _, group in frame.groupby("precision", sort=False)]
    figure.alt = (
        f"Roofline of {len(frame)} cases on {gpu.title if gpu else name}. {_roof_words(gpu, precisions)} "
        + "Fastest per precision: "
        + "; ".join(f"{r.precision} {r.useful_tflops:,.0f} TFLOP/s at {r.intensity:,.0f} FLOP/byte ({r.row})" for r in best)
        + "."
    )
    return figure


def plot_shares(frame: pd.DataFrame, title: str) -> ReportFigure:
    """Draw, for every case, the share of each roof as bars; with three resources the nearest roof is what matters."""
    frame = frame.sort_values(["mode", "precision", "pipeline", "ep", "width"]).reset_index(drop=True)
    known = frame.dropna(subset=["best_share"])
    with style():
        figure = ReportFigure(figsize=(9, 1.4 + 0.24 * len(frame)))
        axis = figure.subplots()
        for offset, (resource, colour) in enumerate(zip(RESOURCES, PALETTE, strict=False)):
            places = np.arange(len(frame)) + (offset - 1) * 0.26
            axis.barh(places, 100 * frame[f"{resource}_share"], height=0.24, color=colour, label=resource)
        _row_axis(axis, frame)
        axis.set(xlim=(0, 100), xlabel="share of the theoretical roof, %", title=title)
        figure.legend(loc="outside lower center", ncols=3)
    nearest = ", ".join(f"{resource} in {n}" for resource, n in known["nearest"].value_counts().items())
    lines = (
        f"{r['row']} {100 * r['compute_share']:.0f}/{100 * r['hbm_share']:.0f}/{100 * r['nvlink_share']:.0f} %"
        for r in known.to_dict("records")
    )
    figure.alt = f"{title}: {len(frame)} cases. " + (
        f"Nearest roof: {nearest}. Best share: median {100 * known['best_share'].median():.1f} %, maximum "
        f"{100 * known['best_share'].max():.1f} %. Compute, HBM and NVLink shares: {'; '.join(lines)}."
        if len(known)
        else f"No share is drawn: {_UNKNOWN}."
    )
    return figure


def plot_ceilings(frame: pd.DataFrame) -> ReportFigure:
    """Draw the rate of every case beside the ceiling its imbalance leaves: peak times mean over maximum rows."""
    frame = frame[frame["category"] == "single_layer"].sort_values(["precision", "pipeline", "mode", "ep", "imbalance"])
    frame = frame.reset_index(drop=True)
    with style():
        figure = ReportFigure(figsize=(9, 1.4 + 0.2 * len(frame)))
        axis = figure.subplots()
        for place, row in enumerate(frame.to_dict("records")):
            colour = precision_colour(row["precision"])
            axis.plot([row["useful_tflops"], row["ceiling_tflops"]], [place, place], color="#cccccc", linewidth=1)
            axis.plot(row["ceiling_tflops"], place, "|", color=colour, markersize=9, markeredgewidth=2)
            axis.plot(row["useful_tflops"], place, pipeline_marker(row["pipeline"]), color=colour, markersize=4)
        _row_axis(axis, frame)
        axis.set(xscale="log", xlabel="useful TFLOP/s per GPU: measured (marker) and balance-adjusted ceiling (bar)")
    lines = (
        f"{r['row']} {r['useful_tflops']:,.0f} of {r['ceiling_tflops']:,.0f} TFLOP/s ({100 * r['ceiling_share']:.0f} %)"
        for r in frame.dropna(subset=["ceiling_tflops"]).to_dict("records")
    )
    figure.alt = (
        f"Measured rate of {len(frame)} cases against the ceiling that imbalance leaves (peak times mean over maximum rows): "
        f"{'; '.join(lines) or _UNKNOWN}."
    )
    return figure


def plot_loss_roofline(frame: pd.DataFrame) -> ReportFigure:
    """Draw published loss rows under the roofs of their boards, one panel a GPU, one colour a version.

    Memory bytes are what an O(N) kernel must move, a model: the points are hollow.
    """
    gpus, labels = list(dict.fromkeys(frame["gpu"])), list(dict.fromkeys(frame["label"]))
    precisions = list(dict.fromkeys(frame["precision"]))
    with style():
        figure = ReportFigure(figsize=(9.5, 4.2))
        axes = figure.subplots(1, len(gpus), squeeze=False, sharey=True)[0]
        for axis, name in zip(axes, gpus, strict=True):
            part, gpu = frame[frame["gpu"] == name], match_gpu(name)
            if gpu is not None:
                _draw_roofs(axis, gpu, precisions, "hbm", part["intensity"])
            for place, label in enumerate(labels):
                rows = part[part["label"] == label]
                axis.plot(rows["intensity"], rows["tflops"], "o", mfc="none", markersize=4, color=PALETTE[place])
            axis.set(xscale="log", yscale="log", title=name, xlabel="useful FLOP per byte (model)")
        axes[0].set_ylabel("useful TFLOP/s")
        handles = [axes[0].plot([], [], "o", mfc="none", color=PALETTE[i])[0] for i in range(len(labels))]
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    words = [
        f"{name} batch {n:,}: {100 * g['share'].min():.2g} to {100 * g['share'].max():.2g} %"
        for (name, n), g in frame.dropna(subset=["share"]).groupby(["gpu", "N"], sort=False)
    ]
    figure.alt = (
        f"{len(frame)} published loss rows under the roofs of their boards. Share of the nearest theoretical roof: "
        f"{'; '.join(words) or _UNKNOWN}."
    )
    return figure


def _draw_roofs(axis: Axes, gpu: Gpu, precisions: list[str], resource: str, intensities: pd.Series) -> None:
    """Draw the slanted roof of a resource and the flat roof of each precision, labelled at its right end."""
    if resource not in gpu.peaks:
        return
    known = [p for p in precisions if p in gpu.peaks]
    rate = gpu.peak(resource).value / 1e3  # TB/s: intensity x TB/s = TFLOP/s
    ridges = [ridge(gpu, precision, resource) for precision in known]
    x = np.geomspace(min([*ridges, *intensities]) / 4, max([*ridges, *intensities]) * 4, 200)
    top = max(gpu.peak(p).value for p in known)
    axis.plot(x, np.minimum(x * rate, top), color="#444444", linewidth=1)
    for precision in known:
        peak, colour = gpu.peak(precision).value, precision_colour(precision)
        flat = x[x * rate >= peak]
        axis.plot(flat, np.full_like(flat, peak), _ROOF_STYLES.get(precision, "-"), color=colour, linewidth=1)
        axis.annotate(f"{precision} {peak:,.6g}", (x[-1], peak), ha="right", va="bottom", fontsize=7, color=colour)


def _roof_words(gpu: Gpu | None, precisions: list[str]) -> str:
    if gpu is None:
        return f"No roofs: {_UNKNOWN}."
    roofs = [
        f"{p} {gpu.peak(p).value:,.0f} TFLOP/s (ridge {ridge(gpu, p):,.1f} FLOP/byte)" for p in precisions if p in gpu.peaks
    ]
    rates = [
        f"{resource} {gpu.peak(resource).value:,.0f} GB/s{' per direction' if resource == 'nvlink' else ''}"
        for resource in ("hbm", "nvlink")
        if resource in gpu.peaks
    ]
    return f"Roofs: {', '.join([*roofs, *rates])}."


def _row_axis(axis: Axes, frame: pd.DataFrame) -> None:
    axis.set_yticks(range(len(frame)), frame["row"].tolist(), fontsize=7)
    axis.set_ylim(len(frame) - 0.5, -0.5)


def _draw_points(axis: Axes, frame: pd.DataFrame, column: str, hollow: bool) -> None:
    for row in frame.dropna(subset=[column]).to_dict("records"):
        colour = precision_colour(row["precision"])
        axis.plot([row[column]] * 2, [row["low_tflops"], row["high_tflops"]], color=colour, linewidth=1)
        marker, fill = pipeline_marker(row["pipeline"]), "none" if hollow else colour
        axis.plot(row[column], row["useful_tflops"], marker, color=colour, mfc=fill, markersize=5, markeredgewidth=0.8)
        axis.plot(row[column], row["ceiling_tflops"], "_", color="#999999", markersize=5, markeredgewidth=0.6)
