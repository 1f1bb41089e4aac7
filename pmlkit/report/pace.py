"""Who sets the pace, host or device; and which published differences are differences of the loss itself."""

import pandas as pd

from pmlkit.report.frames import CELL_KEYS, case_name, machine_name
from pmlkit.report.load import RunData
from pmlkit.report.page import Html, Table, verdict

_LEAST, _MOST = 0.7, 0.9  # of the wall time that the device is busy: below, the host sets the pace; above, the device


def frame_pace(data: RunData) -> pd.DataFrame:
    """Return one row per case and arm with medians over processes: wall and busy milliseconds of a pair, launches, `pace`."""
    ok = data.frame[data.frame["status"] == "ok"].dropna(subset=["busy_share"])
    columns = ["pair_ms", "busy_ms", "queued_ms", "launches", "busy_share"]
    table = ok.groupby(CELL_KEYS, sort=False, dropna=False)[columns].median().reset_index()
    return table.assign(pace=[_pace(share) for share in table["busy_share"]])


def _pace(share: float) -> str:
    return "host" if share < _LEAST else "device" if share > _MOST else "both"


def table_pace(data: RunData) -> Table:
    """Return the pace of every case and arm."""
    table = frame_pace(data)
    shown = pd.DataFrame(
        {
            "case": [case_name(*key) for key in zip(table["op"], table["precision"], table["N"], strict=True)],
            "arm": table["label"],
            "pair, ms": table["pair_ms"],
            "device busy, ms": table["busy_ms"],
            "queued beforehand, ms": table["queued_ms"],
            "launches": table["launches"],
            "busy share": table["busy_share"],
            "pace set by": table["pace"],
        }
    )
    formats = dict.fromkeys(("pair, ms", "device busy, ms", "queued beforehand, ms"), ".3g")
    caption = "Device busy: kernels of one pair under a profiler; queued: the same pair submitted before the device may start"
    return Table(shown, "pace", caption, formats | {"launches": ".0f", "busy share": ".0%"})


def verdict_pace(data: RunData) -> Html:
    """Return how many rows of each arm time the host, in words; nothing for a run without a device."""
    table = frame_pace(data)
    sentences = []
    for arm, group in table.groupby("label", sort=False):
        host = group[group["pace"] == "host"]
        sentences.append(
            f"{arm}: {len(host)} of {len(group)} cases time the host (device busy {100 * group['busy_share'].median():.0f} % "
            f"of the wall time in the median, {group['launches'].median():.0f} launches a pair)."
        )
    return verdict(
        *(sentences or [f"{machine_name(data.run)}: no device was profiled, so host and device are not told apart."])
    )


def frame_survivors(judged: pd.DataFrame, flat: pd.DataFrame, data: RunData) -> pd.DataFrame:
    """Return the published comparisons with what speaks against reading them as differences of the loss.

    judged: verdicts on a pair of versions. flat: the series (gpu, op, precision, label) that hardly grow with the batch.
    data: a run on a device, whose baseline shows for each case who sets the pace. `survives`: decided, and by neither
    sign a difference of the host alone.
    """
    pace = frame_pace(data)
    measured = pace[pace["label"] == data.baseline].set_index("case")["pace"]
    series = set(flat.itertuples(index=False, name=None))
    table = judged.copy()
    table["flat"] = [
        any((row["gpu"], row["op"], row["precision"], label) in series for label in (row["base"], row["candidate"]))
        for row in table.to_dict("records")
    ]
    table["pace"] = table["case"].map(measured)
    table["decided"] = table["verdict"].isin(["faster", "slower"])
    table["survives"] = table["decided"] & ~table["flat"] & (table["pace"] != "host")
    return table


def verdict_survivors(table: pd.DataFrame, data: RunData) -> Html:
    """Return, for each published GPU, which differences survive and how many of those time the host."""
    sentences = []
    for (gpu, base, candidate), group in table.groupby(["gpu", "base", "candidate"], sort=False):
        comparable, decided = group[group["verdict"] != "not comparable"], group[group["decided"]]
        host = decided[decided["flat"] | (decided["pace"] == "host")]
        sentences.append(
            f"{gpu}, {candidate} against {base}: {len(decided)} of {len(comparable)} published differences survive intervals "
            f"and the false-discovery control; {len(host)} of these are of rows that time the host (a series that hardly "
            f"grows with the batch, or a pair that waits for the host on {machine_name(data.run)}), {len(decided) - len(host)} "
            f"may be the loss itself."
        )
    unknown = table[table["pace"].isna()]["case"].nunique()
    if unknown:
        sentences.append(
            f"The pace of {unknown} cases is unknown: {data.baseline} has no ok process there in {data.run.run_id}."
        )
    return verdict(*sentences)


def table_survivors(table: pd.DataFrame, data: RunData) -> Table:
    """Return every published comparison with its verdict and what it times."""
    shown = pd.DataFrame(
        {
            "case": [case_name(*key) for key in zip(table["op"], table["precision"], table["N"], strict=True)],
            "published on": table["gpu"],
            "time ratio": table["ratio"],
            "verdict": table["verdict"],
            "series hardly grows": ["yes" if flat else "no" for flat in table["flat"]],
            f"pace of {data.baseline} here": table["pace"],
            "a difference of": [_of(row) for row in table.to_dict("records")],
        }
    )
    return Table(shown, "survivors", "What the published differences are differences of", {"time ratio": ".3g"}, ("verdict",))


def _of(row: dict) -> str | None:
    if not row["decided"]:
        return None
    return "the loss, perhaps" if row["survives"] else "the host"
