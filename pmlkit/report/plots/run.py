"""Figures of run health: every process in time order, so that drift and outliers cannot hide in a median."""

import numpy as np
import pandas as pd

from pmlkit.report.figure import PALETTE, ReportFigure, nothing, style
from pmlkit.report.frames import case_name


def plot_order(frame: pd.DataFrame) -> ReportFigure:
    """Draw each process's pair time relative to the median of its case and arm, in the order in which they ran."""
    ok = frame[frame["status"] == "ok"].copy()
    centre = ok.groupby(["case", "label"])["pair_ms"].transform("median")
    ok["change"] = 100 * (ok["pair_ms"] / centre - 1)
    failed = frame[frame["status"] != "ok"]
    with style():
        figure = ReportFigure(figsize=(9, 3.4))
        axis = figure.subplots()
        for place, (label, group) in enumerate(ok.groupby("label", sort=False)):
            axis.plot(group["order"], group["change"], "o", markersize=4, color=PALETTE[place], label=str(label))
        for order in failed["order"]:
            axis.axvline(order, color="#d55e00", linewidth=0.8, alpha=0.6)
        axis.axhline(0, color="#444444", linewidth=0.8)
        axis.set(xlabel="order in the campaign (vertical lines: not ok)", ylabel="pair time against median, %")
        if len(ok):
            figure.legend(loc="outside lower center", ncols=8)
    spread = ok["change"].abs()
    summary = f"median deviation {spread.median():.1f} %, largest {spread.max():.1f} %" if len(ok) else "nothing ran"
    figure.alt = (
        f"Pair time of {len(ok)} ok processes relative to the median of their case, in order: {summary}; {len(failed)} not ok."
    )
    return figure


def plot_phases(frame: pd.DataFrame) -> ReportFigure:
    """Draw forward and backward, each timed on its own, as stacked bars in percent of the pair, per case and arm."""
    columns = ["forward_ms", "backward_ms", "pair_ms"]
    keys = ["case", "op", "precision", "N", "label"]
    table = frame[frame["status"] == "ok"].groupby(keys, sort=False)[columns].median().dropna().reset_index()
    if table.empty:
        return nothing("No process has a forward and a backward of its own, so there is no time to divide: 0 cases.")
    forward, backward = (100 * table[name] / table["pair_ms"] for name in columns[:2])
    places = np.arange(len(table))
    names = [f"{case_name(r['op'], r['precision'], r['N'])}, {r['label']}" for r in table.to_dict("records")]
    with style():
        figure = ReportFigure(figsize=(9, 1.4 + 0.2 * len(table)))
        axis = figure.subplots()
        axis.barh(places, forward, color=PALETTE[0], label="forward")
        axis.barh(places, backward, left=forward, color=PALETTE[4], label="backward")
        axis.axvline(100, color="#444444", linewidth=0.8)
        axis.set_yticks(places, names, fontsize=7)
        axis.set_ylim(len(table) - 0.5, -0.5)
        axis.set(xlabel="% of the pair's own time (100 = forward and backward add up to the pair)")
        figure.legend(loc="outside lower center", ncols=2)
    lines = (f"{name} {f:.0f} + {b:.0f} %" for name, f, b in zip(names, forward, backward, strict=True))
    figure.alt = "Forward and backward in percent of the separately timed pair: " + "; ".join(lines) + "."
    return figure


def plot_pace(table: pd.DataFrame) -> ReportFigure:
    """Draw, per case, how long a pair takes and how much of that the device is busy, a panel an arm."""
    if table.empty:
        return nothing("No device was profiled, so its busy time is unknown: 0 cases.")
    cases = list(dict.fromkeys(table["case"]))
    names = {r["case"]: case_name(r["op"], r["precision"], r["N"]) for r in table.to_dict("records")}
    arms = list(table.groupby("label", sort=False))
    with style():
        figure = ReportFigure(figsize=(10.5, 1.3 + 0.26 * len(cases)))
        axes = figure.subplots(1, len(arms), squeeze=False, sharex=True, sharey=True)[0]
        for axis, (arm, part) in zip(axes, arms, strict=True):
            places = [cases.index(case) for case in part["case"]]
            axis.hlines(places, part["busy_ms"], part["pair_ms"], color="#999999", linewidth=1)
            axis.plot(part["busy_ms"], places, "o", color=PALETTE[2], markersize=4.5, label="device busy")
            axis.plot(part["pair_ms"], places, "o", color=PALETTE[1], markersize=4.5, fillstyle="none", label="pair")
            axis.set(xscale="log", title=str(arm), xlabel="ms")
            axis.set_yticks(range(len(cases)), [names[case] for case in cases])
            axis.set_ylim(len(cases) - 0.5, -0.5)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    words = (f"{arm}: median {100 * part['busy_share'].median():.0f} %" for arm, part in arms)
    figure.alt = f"Time of a pair and device-busy time within it, {len(cases)} cases. Busy share of {'; '.join(words)}."
    return figure
