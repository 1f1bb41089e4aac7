"""Figures of the loss reports: ratios with intervals, times, memory."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from pmlkit.report.compare import count_sentence
from pmlkit.report.figure import PALETTE, VERDICT_COLOURS, ReportFigure, nothing, style
from pmlkit.report.frames import KEYS, case_name
from pmlkit.stats import geometric_mean


class Quantity(NamedTuple):
    """Something to draw per case and version. cells: columns gpu, op, precision, N, label, status, values."""

    cells: pd.DataFrame
    what: str
    unit: str


def plot_ratios(table: pd.DataFrame, margin: float) -> ReportFigure:
    """Draw the ratio of times, candidate over base, with its interval for every case; a panel a GPU and candidate."""
    panels = list(table.groupby(["gpu", "base", "candidate"], sort=False))
    if not panels:
        return nothing("Only one arm ran, so there is no ratio to draw: 0 comparisons.")
    cases = _cases(table)
    with style():
        figure = ReportFigure(figsize=(9.5, 1.3 + 0.26 * len(cases)))
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, ((gpu, base, candidate), part) in zip(axes, panels, strict=True):
            axis.axvspan(1 / (1 + margin), 1 + margin, color="#dddddd", zorder=0)
            axis.axvline(1, color="#888888", linewidth=0.8, zorder=0)
            for row in part.to_dict("records"):
                _draw_ratio(axis, list(cases).index(row["case"]), row)
            axis.set(xscale="log", title=gpu, xlabel=f"time of {candidate} / time of {base}")
            _case_axis(axis, cases)
            _plain_ticks(axis, part[["low", "high"]].to_numpy(dtype=float))
        handles = [axes[0].plot([], [], "o", color=colour)[0] for colour in VERDICT_COLOURS.values()]
        figure.legend(handles, list(VERDICT_COLOURS), loc="outside lower center", ncols=5)
    figure.alt = "Ratios of times with 95 % intervals; below 1 the candidate is faster. " + " ".join(
        f"{gpu}, {candidate} over {base}: {count_sentence(part)}.{_extremes(part)}" for (gpu, base, candidate), part in panels
    )
    return figure


def plot_values(*quantities: Quantity) -> ReportFigure:
    """Draw one dot a version (geometric mean of its processes) with the range of its processes, a panel a quantity and GPU.

    The axes are logarithmic: dots, not bars. A version that did not run shows its status instead.
    """
    labels = list(dict.fromkeys(label for quantity in quantities for label in quantity.cells["label"]))
    cases = _cases(pd.concat([quantity.cells for quantity in quantities]))
    panels = [(quantity, gpu) for quantity in quantities for gpu in dict.fromkeys(quantity.cells["gpu"])]
    with style():
        figure = ReportFigure(figsize=(10.5, 1.3 + 0.32 * len(cases)))
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axis, (quantity, gpu) in zip(axes, panels, strict=True):
            part = quantity.cells[quantity.cells["gpu"] == gpu]
            for row in part.to_dict("records"):
                place = labels.index(row["label"])
                y = list(cases).index(row["case"]) + (place - (len(labels) - 1) / 2) * 0.24
                _draw_value(axis, y, row, PALETTE[place])
            axis.set(xscale="log", title=gpu, xlabel=f"{quantity.what}, {quantity.unit}")
            _case_axis(axis, cases)
            _plain_ticks(axis, np.array([value for values in part["values"] for value in values]))
        handles = [axes[0].plot([], [], "o", color=PALETTE[i])[0] for i in range(len(labels))]
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.alt = " ".join(f"{q.what} in {q.unit}. {_alt_values(q.cells, labels)}" for q in quantities)
    return figure


def memory_cells(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the cells of a memory column of a frame, for a Quantity."""
    groups = frame.groupby([*KEYS, "label"], sort=False, as_index=False)
    return groups.agg(status=("status", "first"), values=(column, lambda values: values.dropna().tolist()))


def _draw_ratio(axis: Axes, y: int, row: dict) -> None:
    colour = VERDICT_COLOURS[row["verdict"]]
    if row["verdict"] == "not comparable":
        axis.annotate(row["change"], (0.02, y), xycoords=("axes fraction", "data"), color="#555555", size=7, va="center")
        return
    axis.plot([row["low"], row["high"]], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
    axis.plot(row["ratio"], y, "o", color=colour, markersize=5)


def _draw_value(axis: Axes, y: float, row: dict, colour: str) -> None:
    if row["status"] != "ok":
        axis.annotate(row["status"], (0.01, y), xycoords=("axes fraction", "data"), color=colour, size=6, va="center")
    elif row["values"]:
        axis.plot([min(row["values"]), max(row["values"])], [y, y], color=colour, linewidth=2, alpha=0.5)
        axis.plot(geometric_mean(row["values"]), y, "o", color=colour, markersize=3.5)


def _case_axis(axis: Axes, cases: dict[str, str]) -> None:
    axis.set_yticks(range(len(cases)), list(cases.values()))
    axis.set_ylim(len(cases) - 0.5, -0.5)


def _cases(frame: pd.DataFrame) -> dict[str, str]:
    """Return the name of every case by its id, in order of appearance."""
    return {row["case"]: case_name(row["op"], row["precision"], row["N"]) for row in frame.to_dict("records")}


def _plain_ticks(axis: Axes, values: np.ndarray) -> None:
    """Label a logarithmic axis with plain numbers, denser where the range is short."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return
    decades = np.log10(finite.max() / finite.min())
    if decades > 1.2:
        steps: tuple[float, ...] = (1,) if decades > 2 else (1, 3)
    else:
        steps = (1, 2, 5) if decades > 0.5 else (1, 1.2, 1.5, 2, 3, 4, 5, 7, 9)
    lowest, highest = np.floor(np.log10(finite.min())), np.ceil(np.log10(finite.max()))
    ticks = [step * 10.0**power for power in range(int(lowest) - 1, int(highest) + 1) for step in steps]
    least, most = axis.get_xlim()
    ticks = [tick for tick in ticks if least <= tick <= most]
    axis.set_xticks(ticks, [f"{tick:,.4g}" for tick in ticks])
    axis.set_xticks([], minor=True)


def _extremes(group: pd.DataFrame) -> str:
    """Return the largest gain and the largest loss of a table as words."""
    measured = group.dropna(subset=["ratio"])
    if measured.empty:
        return ""
    ends = (("lowest", measured.nsmallest(1, "ratio")), ("highest", measured.nlargest(1, "ratio")))
    words = [
        f"{word} ratio {row['ratio']:.3g} [{row['low']:.3g}, {row['high']:.3g}] at "
        f"{case_name(row['op'], row['precision'], row['N'])}"
        for word, rows in ends
        for row in rows.to_dict("records")
    ]
    return f" {', '.join(words)}."


def _alt_values(cells: pd.DataFrame, labels: list[str]) -> str:
    words = []
    for key, group in cells.groupby(KEYS, sort=False):
        gpu, _, op, precision, rows = key
        numbers = [
            f"{label} {geometric_mean(row['values']):.3g}" if row["values"] else f"{label} {row['status']}"
            for label in labels
            for row in group[group["label"] == label].to_dict("records")
        ]
        words.append(f"{gpu} {case_name(op, precision, rows)}: {', '.join(numbers)}")
    return "; ".join(words) + "."
