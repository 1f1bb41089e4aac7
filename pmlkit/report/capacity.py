"""How many rows a batch may have, by loss, precision and version."""

import pandas as pd

from pmlkit.precision import PRECISIONS
from pmlkit.registry import OPS
from pmlkit.report.figure import PALETTE, ReportFigure, nothing, style
from pmlkit.report.frames import machine_name
from pmlkit.report.load import RunData
from pmlkit.report.page import Html, Table, verdict


def frame_capacity(data: RunData) -> pd.DataFrame:
    """Return the processes that sought a capacity: largest and refused rows, reason, peak MiB and milliseconds of a pair."""
    return data.frame[data.frame["largest"].notna()]


def verdict_capacity(data: RunData) -> Html:
    """Return how far each arm comes."""
    table = frame_capacity(data)
    if table.empty:
        return verdict(f"{data.run.run_id} sought no capacity. To seek it on this GPU: python -m pmlkit run loss-capacity.")
    sentences = []
    for arm, group in table.groupby("label", sort=False):
        whole = int(group["refused"].isna().sum())
        least = min(group.to_dict("records"), key=lambda row: row["largest"])
        sentences.append(
            f"{arm} on {machine_name(data.run)}: {whole} of {len(group)} cases run with all {int(group['N'].max()):,} rows; "
            f"the smallest largest batch is {int(least['largest']):,} rows ({_name(least)})."
        )
    return verdict(*sentences)


def table_capacity(data: RunData) -> Table:
    """Return every search: the largest batch that ran, its time and memory, and why a larger one did not."""
    table = frame_capacity(data)
    shown = pd.DataFrame(
        {
            "case": [_name(row) for row in table.to_dict("records")],
            "arm": table["label"],
            "largest rows": table["largest"],
            "refused rows": table["refused"],
            "pair, ms": table["pair_ms"],
            "peak, MiB": table["peak_mib"],
            "refused because": table["refusal"],
        }
    )
    formats = {"largest rows": ",.0f", "refused rows": ",.0f", "pair, ms": ",.3g", "peak, MiB": ",.0f"}
    return Table(shown, "capacity", "The largest batch of which a pair ran, to 2 %", formats)


def plot_capacity(data: RunData) -> ReportFigure:
    """Draw the largest batch of every arm; an arrow: all rows of the case ran, so the limit lies beyond."""
    table = frame_capacity(data)
    if table.empty:
        return nothing("No process of this run sought a capacity, so there is no largest batch to draw: 0 cases.")
    table = table.assign(name=[_name(row) for row in table.to_dict("records")])
    rows = list(dict.fromkeys(table["name"]))
    with style():
        figure = ReportFigure(figsize=(9, 1.3 + 0.3 * len(rows)))
        axis = figure.subplots()
        for place, (arm, group) in enumerate(table.groupby("label", sort=False)):
            colour = PALETTE[place]
            for whole, marker, label in ((True, ">", None), (False, "o", str(arm))):
                part = group[group["refused"].isna() == whole]
                places = [rows.index(name) for name in part["name"]]
                axis.plot(part["largest"], places, marker, color=colour, markersize=6, label=label)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="rows of the largest batch (arrow: as many as were tried)")
        axis.set_yticks(range(len(rows)), rows)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        figure.legend(loc="outside lower center", ncols=8)
    words = (f"{row['name']}, {row['label']}: {int(row['largest']):,}" for row in table.to_dict("records"))
    figure.alt = f"Largest batch in rows. {'; '.join(words)}."
    return figure


def _name(row: dict) -> str:
    return f"{OPS[row['op']].title} {PRECISIONS[row['precision']].element}"
