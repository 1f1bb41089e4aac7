"""Figures of the mixture-of-experts report: rates by imbalance, memory, and how the windows settle."""

import numpy as np
import pandas as pd

from pmlkit.report.figure import PALETTE, ReportFigure, nothing, pipeline_marker, precision_colour, style
from pmlkit.stats import kendall_tau


def plot_imbalance(frame: pd.DataFrame) -> ReportFigure:
    """Draw useful TFLOP/s against imbalance, one panel a mode and EP, one line a precision and pipeline."""
    frame = frame[frame["category"] == "single_layer"]
    panels = list(dict.fromkeys(zip(frame["mode"], frame["ep"], strict=True)))
    with style():
        figure = ReportFigure(figsize=(10, 3.8))
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (mode, ep) in zip(axes, panels, strict=True):
            part = frame[(frame["mode"] == mode) & (frame["ep"] == ep)]
            for (precision, pipeline), line in part.groupby(["precision", "pipeline"], sort=False):
                line = line.sort_values("imbalance")
                look = {"marker": pipeline_marker(pipeline), "color": precision_colour(precision), "markersize": 5}
                dash = "--" if pipeline == "staged" else "-"
                axis.plot(
                    line["imbalance"], line["useful_tflops"], dash, label=f"{precision} {pipeline}", linewidth=1.2, **look
                )
            axis.set(xscale="log", yscale="log", title=f"{mode}, EP {ep}", xlabel="imbalance (max / mean rows)")
            axis.set_xticks(sorted(part["imbalance"].unique()), [f"{i:g}" for i in sorted(part["imbalance"].unique())])
            axis.set_xticks([], minor=True)
        axes[0].set_ylabel("useful TFLOP/s per GPU")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    lines = (f"{r.row} {r.useful_tflops:,.0f}" for r in frame.itertuples())
    figure.alt = "Useful TFLOP/s per GPU against imbalance: " + "; ".join(lines) + "."
    return figure


def plot_pipelines(frame: pd.DataFrame) -> ReportFigure:
    """Draw the useful rate of every balanced case with the range of its windows; repeats show as two markers."""
    part = frame[frame["imbalance"] == 1]
    groups = list(dict.fromkeys(zip(part["mode"], part["ep"], part["width"], strict=True)))
    with style():
        figure = ReportFigure(figsize=(9, 1.4 + 0.42 * len(groups)))
        axis = figure.subplots()
        kinds = list(dict.fromkeys(zip(part["precision"], part["pipeline"], strict=True)))
        for row in part.to_dict("records"):
            place = kinds.index((row["precision"], row["pipeline"]))
            y = groups.index((row["mode"], row["ep"], row["width"])) + (place - 1.5) * 0.16
            colour, rate = precision_colour(row["precision"]), row["useful_tflops"] * row["layer_ms"]
            axis.plot([rate / row["high_ms"], rate / row["low_ms"]], [y, y], color=colour, linewidth=1)
            axis.plot(row["useful_tflops"], y, pipeline_marker(row["pipeline"]), color=colour, mfc="none", markersize=5)
        axis.set_yticks(range(len(groups)), [f"{mode} EP{ep} F={width:,}" for mode, ep, width in groups])
        axis.set_ylim(len(groups) - 0.5, -0.5)
        axis.set(xlim=(0, None), xlabel="useful TFLOP/s per GPU (line: range of windows)")
        handles = [axis.plot([], [], pipeline_marker(p), color=precision_colour(k), mfc="none")[0] for k, p in kinds]
        figure.legend(handles, [f"{k} {p}" for k, p in kinds], loc="outside lower center", ncols=len(kinds))
    lines = (f"{r.row} {r.useful_tflops:,.0f}" for r in part.itertuples())
    figure.alt = "Useful TFLOP/s per GPU of the balanced cases: " + "; ".join(lines) + "."
    return figure


def plot_arena(frame: pd.DataFrame) -> ReportFigure:
    """Draw the planned arena (slot and scratch, stacked) and the allocator's peak of every balanced case, in GiB."""
    part = frame[(frame["imbalance"] == 1) & (frame["category"] == "single_layer")].reset_index(drop=True)
    places = np.arange(len(part))
    with style():
        figure = ReportFigure(figsize=(9, 1.4 + 0.3 * len(part)))
        axis = figure.subplots()
        axis.barh(places, part["scratch_gib"], color=PALETTE[0], label="scratch")
        axis.barh(places, part["slot_gib"], left=part["scratch_gib"], color=PALETTE[4], label="activation slot")
        axis.plot(part["allocated_gib"], places, "k|", markersize=10, label="allocator peak (other tensors included)")
        axis.set_yticks(places, [f"{r.mode} EP{r.ep} {r.precision} {r.pipeline}" for r in part.itertuples()], fontsize=7)
        axis.set_ylim(len(part) - 0.5, -0.5)
        axis.set(xlabel="GiB per rank", title="Memory arena of the balanced cases")
        figure.legend(loc="outside lower center", ncols=3)
    lines = (
        f"{r.row} slot {r.slot_gib:.2f}, scratch {r.scratch_gib:.2f}, peak {r.allocated_gib:.2f}" for r in part.itertuples()
    )
    figure.alt = "Memory per rank in GiB: " + "; ".join(lines) + "."
    return figure


def plot_settling(frame: pd.DataFrame) -> ReportFigure:
    """Draw every case's windows in time order relative to its first: a settled system is a flat bundle around 0."""
    with style():
        figure = ReportFigure(figsize=(9, 3.6))
        precisions = list(dict.fromkeys(frame["precision"]))
        axes = figure.subplots(1, len(precisions), squeeze=False, sharey=True)[0]
        for axis, precision in zip(axes, precisions, strict=True):
            for windows in frame.loc[frame["precision"] == precision, "windows"]:
                change = [100 * (value / windows[0] - 1) for value in windows]
                axis.plot(range(1, len(windows) + 1), change, color=precision_colour(precision), linewidth=0.8, alpha=0.6)
            axis.axhline(0, color="#444444", linewidth=0.8)
            axis.set(title=f"{precision}", xlabel="window")
        axes[0].set_ylabel("layer time against first window, %")
    figure.alt = "Layer time of each window relative to the first. " + "; ".join(settling_words(frame)) + "."
    return figure


def settling_words(frame: pd.DataFrame) -> list[str]:
    """Return, per precision and in all, how far the last window is from the first and how often the first was fastest."""
    words = []
    for name, group in [*frame.groupby("precision", sort=False), ("all", frame)]:
        windows = group["windows"].tolist()
        drift = [100 * (w[-1] / w[0] - 1) for w in windows]
        words.append(
            f"{name}: last against first window median {np.median(drift):+.1f} %, worst {max(drift):+.1f} %; "
            f"first window fastest in {sum(w[0] == min(w) for w in windows)} of {len(windows)}; "
            f"mean Kendall tau {np.mean([kendall_tau(w) for w in windows]):+.2f}"
        )
    return words


def plot_layers(table: pd.DataFrame) -> ReportFigure:
    """Draw the share of its own roof that every measured layer reaches, the best rival's, and the published one's."""
    part = table.dropna(subset=["share"]).reset_index(drop=True)
    if part.empty:
        return nothing(f"Of {len(table)} measured layers none ran on a board that the peaks ledger knows: no share to draw.")
    names = [
        f"{r['precision']} {r['mode']}, {r['experts']} experts, F={r['width']:,}, {r['rows']:,} rows"
        for r in part.to_dict("records")
    ]
    rival = part["share"] / part["lead"]
    with style():
        figure = ReportFigure(figsize=(9, 1.4 + 0.24 * len(part)))
        axis = figure.subplots()
        for y, row in enumerate(part.to_dict("records")):
            marker, colour = pipeline_marker(row["pipeline"]), precision_colour(row["precision"])
            axis.plot(100 * row["share"], y, marker, color=colour, markersize=5)
            axis.plot(100 * row["published_share"], y, marker, color=colour, markersize=5, mfc="none")
            axis.plot(100 * rival[y], y, "|", color="#000000", markersize=8)
        axis.set_yticks(range(len(part)), names)
        axis.set_ylim(len(part) - 0.5, -0.5)
        axis.set(xlim=(0, None), xlabel="% of the roof (filled: pmlkit; tick: best rival; hollow: published, of GB300's peak)")
    shares = zip(names, part["share"], part["published_share"], strict=True)
    words = (
        f"{name}: {100 * own:.1f} %" + ("" if pd.isna(other) else f", published {100 * other:.1f} %")
        for name, own, other in shares
    )
    figure.alt = "Share of its own roof that each measured expert layer reaches: " + "; ".join(words) + "."
    return figure
