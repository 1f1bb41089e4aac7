"""How far losses and gradients are from float64, beside what a fused loss promises."""

import pandas as pd

from pmlkit.report.figure import PALETTE, ReportFigure, nothing, style
from pmlkit.report.frames import case_name, layout_name
from pmlkit.report.load import RunData
from pmlkit.report.page import Html, Table, verdict

# What the fused losses promise: norm of the difference over norm of the float64 gradient of the same rounded rows. In tight
# clusters a softmax loses digits whatever computes it.
PROMISED = {"fp32": 2e-6, "bf16": 4e-3, "fp16": 1e-3}
_TIGHT, _SOFTMAXES = 4e-6, ("ntxent", "proxy_anchor")
_KEYS = ["case", "op", "precision", "N", "layout"]


def frame_gradients(data: RunData) -> pd.DataFrame:
    """Return one row per case and arm: the largest `error` of its processes, the `promised` one, and their `share`.

    An answer that is not finite has an error of infinity; what could not run has none.
    """
    seen = data.frame[data.frame["limit"].notna()]
    table = seen.assign(error=seen["error"].fillna(float("inf"))).groupby([*_KEYS, "label"], sort=False)["error"].max()
    table = table.reset_index()
    tight = (table["precision"] == "fp32") & (table["layout"] == layout_name({"spread": 21})) & table["op"].isin(_SOFTMAXES)
    table["promised"] = table["precision"].map(PROMISED).mask(tight, _TIGHT)
    return table.assign(share=table["error"] / table["promised"])


def verdict_gradients(data: RunData) -> Html:
    """Return for each arm how many answers are within the promise, and its worst one."""
    sentences = []
    for arm, group in frame_gradients(data).groupby("label", sort=False):
        worst = max(group.to_dict("records"), key=lambda row: row["share"])
        inside = int((group["share"] <= 1).sum())
        name = f"{case_name(worst['op'], worst['precision'], worst['N'])}, {worst['layout']}"
        sentences.append(
            f"{arm}: {inside} of {len(group)} answers are within what the fused losses promise; the farthest is {name}, with "
            f"{worst['error']:.1e}, {worst['share']:.2g} times the promise."
        )
    return verdict(*(sentences or [f"{data.run.run_id} has no checked answer."]))


def table_gradients(data: RunData) -> Table:
    """Return every case with the error of each arm beside the promised one."""
    table = frame_gradients(data)
    wide = table.pivot_table(index=[*_KEYS, "promised"], columns="label", values="error", sort=False).reset_index()
    arms = list(dict.fromkeys(table["label"]))
    names = [case_name(*key) for key in zip(wide["op"], wide["precision"], wide["N"], strict=True)]
    shown = pd.concat([pd.DataFrame({"case": names, "rows": wide["layout"]}), wide[[*arms, "promised"]]], axis=1)
    caption = "Largest relative error of value and gradients against float64 on the same rounded rows"
    return Table(shown, "gradients", caption, dict.fromkeys((*arms, "promised"), ".1e"))


def plot_gradients(data: RunData) -> ReportFigure:
    """Draw every error over the promised one, a panel a precision; left of 1 it is kept."""
    table = frame_gradients(data)
    table = table[table["share"].between(0, float("inf"), inclusive="left")]
    if table.empty:
        return nothing("No answer of this run was checked against float64, so there is no error to draw: 0 cases.")
    names = [f"{case_name(r['op'], r['precision'], r['N'])}, {r['layout']}" for r in table.to_dict("records")]
    table = table.assign(name=names)
    panels = list(table.groupby("precision", sort=False))
    most = max(part["name"].nunique() for _, part in panels)
    with style():
        figure = ReportFigure(figsize=(5.2 * len(panels), 1.3 + 0.24 * most))
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (precision, part) in zip(axes, panels, strict=True):
            rows = list(dict.fromkeys(part["name"]))
            for place, (arm, group) in enumerate(part.groupby("label", sort=False)):
                places = [rows.index(name) for name in group["name"]]
                axis.plot(group["share"].clip(lower=1e-3), places, "o", color=PALETTE[place], markersize=4.5, label=str(arm))
            axis.axvline(1, color="#444444", linewidth=0.8)
            axis.set(xscale="log", title=str(precision), xlabel="error / promised error")
            axis.set_yticks(range(len(rows)), rows, fontsize=7)
            axis.set_ylim(len(rows) - 0.5, -0.5)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    words = (f"{arm}: {int((part['share'] <= 1).sum())} of {len(part)}" for arm, part in table.groupby("label", sort=False))
    figure.alt = f"Error over the promised error, {len(set(names))} cases. Within the promise: {'; '.join(words)}."
    return figure
