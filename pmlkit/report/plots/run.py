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
    table = frame[frame["status"] == "ok"].groupby(keys, sort=False)[columns].median().reset_index()
    if table.empty:
        return nothing("No process is ok, so there is no time to divide: 0 cases.")
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
