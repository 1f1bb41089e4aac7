"""Tables of the loss reports: what a page printed, what a run measured, and the verdict of each pair of versions."""

import pandas as pd

from pmlkit.report.frames import case_name
from pmlkit.report.page import Table

_STATUS = ("status", "verdict")


def table_published(frame: pd.DataFrame) -> Table:
    """Return a published loss table with its printed digits, statuses and both names of a version."""
    table = pd.DataFrame(
        {
            "case": _names(frame),
            "GPU": frame["gpu"],
            "version": frame["label"],
            "identifier": frame["version"],
            "status": frame["status"],
            "total, ms": frame["printed_total"],
            "forward, ms": frame["printed_forward"],
            "backward, ms": frame["printed_backward"],
            "process range, ms": frame["printed_range"],
            "peak, MiB": frame["printed_peak"],
        }
    )
    return Table(table, "published-rows", "Every published row, as printed", classes=_STATUS)


def table_measured(frame: pd.DataFrame, key: str) -> Table:
    """Return what a run measured: one row a case and arm, medians over processes and the range of the pair."""
    groups = frame.groupby(["case", "op", "precision", "N", "gpu", "label", "version"], sort=False)
    rows = []
    for (_, *case, gpu, label, version), group in groups:
        ok = group[group["status"] == "ok"]
        failed = group[group["status"] != "ok"]
        rows.append(
            {
                "case": case_name(*case),
                "measured on": gpu,
                "arm": label,
                "version": version,
                "status": "ok" if failed.empty else failed["status"].mode()[0],
                "processes ok": f"{len(ok)} of {len(group)}",
                "pair, ms": ok["pair_ms"].median(),
                "forward, ms": ok["forward_ms"].median(),
                "backward, ms": ok["backward_ms"].median(),
                "process range, ms": f"{ok['pair_ms'].min():.3g}–{ok['pair_ms'].max():.3g}" if len(ok) else None,
                "peak, MiB": ok["peak_mib"].median(),
                "of it workspace, MiB": ok["workspace_mib"].median(),
                "beyond inputs and workspace, MiB": ok["beyond_mib"].median(),
                "error": ok["error"].max(),
            }
        )
    times = dict.fromkeys(("pair, ms", "forward, ms", "backward, ms"), ".3g")
    memory = dict.fromkeys(("peak, MiB", "of it workspace, MiB", "beyond inputs and workspace, MiB"), ",.4g")
    caption = "Medians over processes; error: largest ‖difference‖/‖float64‖ of loss and gradients"
    return Table(pd.DataFrame(rows), key, caption, times | memory | {"error": ".1e"}, _STATUS)


def table_verdicts(table: pd.DataFrame, key: str, caption: str) -> Table:
    """Return the verdict of every case: both times, ratio with interval, adjusted p, verdict or the status change."""
    shown = pd.DataFrame(
        {
            "case": _names(table),
            "measured on": table["gpu"],
            "base": table["base"],
            "candidate": table["candidate"],
            "base, ms (geometric mean)": table["base_ms"],
            "candidate, ms (geometric mean)": table["candidate_ms"],
            "time ratio": table["ratio"],
            "95 % interval": [_interval(*ends) for ends in zip(table["low"], table["high"], strict=True)],
            "adjusted p": table["q"],
            "verdict": table["verdict"],
            "status change": table["change"].replace("", None),
        }
    )
    means = ("base, ms (geometric mean)", "candidate, ms (geometric mean)")
    formats = dict.fromkeys(means, ".3g") | {"time ratio": ".3g", "adjusted p": ".2g"}
    return Table(shown, key, caption, formats, _STATUS)


def _interval(low: float, high: float) -> str | None:
    return None if pd.isna(low) else f"{low:.3g} – {high:.3g}"


def _names(frame: pd.DataFrame) -> list[str]:
    return [case_name(*key) for key in zip(frame["op"], frame["precision"], frame["N"], strict=True)]
