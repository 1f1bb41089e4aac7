"""The sentences that open a report: the verdict first, with its numbers, and what must not be concluded."""

from typing import Any

import pandas as pd

from pmlkit.report.compare import count_sentence, overall
from pmlkit.report.frames import board_of, case_name, iteration_ms, machine_name
from pmlkit.report.health import validity
from pmlkit.report.load import RunData, SourceData
from pmlkit.report.page import Html, note, verdict
from pmlkit.report.plots.moe import settling_words
from pmlkit.report.roofline import least_seconds


def verdict_versions(table: pd.DataFrame) -> Html:
    """Return the verdict on a published pair of versions, one sentence a GPU, with the largest gain and loss."""
    groups = table.groupby(["gpu", "base", "candidate"], sort=False)
    return verdict(*(f"{c} against {b} on {gpu}: {count_sentence(part)}. {_ends(part)}" for (gpu, b, c), part in groups))


def verdict_run(data: RunData) -> Html:
    """Return the verdict on a run: each arm against the baseline, with the A/A control's noise floor."""
    sentences = []
    for arm, table in data.comparisons.groupby("candidate", sort=False):
        if (data.baseline, arm) in data.controls:
            sentences.append(f"{arm} against {data.baseline} (the same code twice): {count_sentence(table)}.")
            continue
        mean = overall(table)
        words = f"Geometric mean of times ×{mean[0]:.3g} over {mean[1]} common cases. " if mean else ""
        sentences.append(f"{arm} against {data.baseline}: {count_sentence(table)}. {words}{_ends(table)}")
    return verdict(*sentences, f"Validity: {validity(data)}.")


def verdict_moe(data: SourceData) -> Html:
    """Return the verdict on the mixture-of-experts source: best rates, the price of imbalance, the A/A repeats."""
    frame = data.frame
    sentences = []
    for mode, part in frame.groupby("mode", sort=False):
        best = [group.nlargest(1, "useful_tflops").iloc[0] for _, group in part.groupby("precision", sort=False)]
        rates = ", ".join(f"{r.precision} {r.useful_tflops:,.0f} TFLOP/s ({r.pipeline}, EP{r.ep}, F={r.width:,})" for r in best)
        sentences.append(f"Highest useful rate per GPU, {mode}: {rates}.")
    ratios = slowdowns(frame)
    if len(ratios):
        worst = ratios[ratios["imbalance"] == ratios["imbalance"].max()]
        paid = 100 * worst["slowdown"] / (worst["max_rows"] / worst["mean_rows"])
        sentences.append(
            f"Imbalance {worst['imbalance'].iloc[0]:g} makes the layer {worst['slowdown'].min():.1f} to "
            f"{worst['slowdown'].max():.1f} times slower than balanced: {paid.min():.0f} to {paid.max():.0f} % of what the "
            f"busiest rank's rows would cost in proportion."
        )
    changes = repeats(frame)
    if len(changes):
        sentences.append(
            f"{len(changes)} configurations were measured twice and differ by {100 * changes['change'].min():+.1f} to "
            f"{100 * changes['change'].max():+.1f} %: that is the noise floor between allocations."
        )
    return verdict(*sentences, f"Windows in time order: {settling_words(frame)[-1].removeprefix('all: ')}.")


def slowdowns(frame: pd.DataFrame) -> pd.DataFrame:
    """Return every imbalanced case with its layer time over that of its balanced twin (`slowdown`)."""
    keys = ["mode", "ep", "precision", "pipeline", "width"]
    part = frame[frame["category"] == "single_layer"]
    balanced = part[part["imbalance"] == 1].set_index(keys)["layer_ms"].rename("balanced_ms")
    joined = part[part["imbalance"] > 1].join(balanced, on=keys)
    return joined.assign(slowdown=joined["layer_ms"] / joined["balanced_ms"])


def repeats(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the configurations that occur under two categories, and the relative change between the two."""
    keys = ["mode", "ep", "precision", "pipeline", "width", "imbalance"]
    groups = [group for _, group in frame.groupby(keys, sort=False) if len(group) > 1]
    rows: list[dict[Any, Any]] = [
        {
            **group.iloc[0][keys].to_dict(),
            "first": group.iloc[0]["row"],
            "second": group.iloc[1]["row"],
            "first_ms": group.iloc[0]["layer_ms"],
            "second_ms": group.iloc[1]["layer_ms"],
            "change": group.iloc[1]["layer_ms"] / group.iloc[0]["layer_ms"] - 1,
        }
        for group in groups
    ]
    return pd.DataFrame(rows)


def verdict_roofline(frame: pd.DataFrame) -> Html:
    """Return the verdict on the roofs: how near anything comes, which roof is nearest, and what imbalance explains."""
    frame = frame.dropna(subset=["best_share"])
    if frame.empty:
        return verdict("Unknown board: the ledger has no peak for it, so no percentage can be given.")
    nearest = ", ".join(f"{name} in {n}" for name, n in frame["nearest"].value_counts().items())
    top = frame.nlargest(1, "best_share").iloc[0]
    median, most = 100 * frame["best_share"].median(), 100 * top["best_share"]
    sentences = [
        f"The best share of any of the three roofs has median {median:.0f} % and maximum {most:.1f} % ({top['row']}). "
        f"Nearest roof: {nearest} of {len(frame)} cases."
    ]
    for skewed in frame[frame["balance"] < 1].nsmallest(1, "useful_tflops").to_dict("records"):
        sentences.append(
            f"Imbalance explains much of the low end: {skewed['row']} reaches {skewed['useful_tflops']:,.0f} TFLOP/s, "
            f"{100 * skewed['compute_share']:.1f} % of peak, {100 * skewed['ceiling_share']:.0f} % of its balance-adjusted "
            f"ceiling."
        )
    sums = frame[frame["imbalance"] == 1].groupby("precision", sort=False)["overlap"].median()
    shares = ", ".join(f"{value:.2f} ({key})" for key, value in sums.items())
    return verdict(
        *sentences,
        f"At balance the three shares add up to a median of {shares}; 1 reads as if compute, memory and link took turns.",
    )


def caveats_published_losses(frame: pd.DataFrame) -> Html:
    """Return what the published loss page cannot carry, computed from its own numbers."""
    flat, series = host_bound_series(frame)
    half = 100 * ((frame["high_ms"] - frame["low_ms"]) / 2 / frame["total_ms"])
    spread = ", ".join(f"{gpu} {group.median():.1f} %" for gpu, group in half.groupby(frame["gpu"], sort=False))
    return note(
        "Do not conclude",
        f"that most rows time the loss: {flat} of {series} series over several batch sizes grow by less than 1.2 times from "
        f"the smallest to the largest batch, so they time Python and launches",
        f"anything from three processes where they disagree: half the process range is, in the median, {spread} of the total",
        "that small-batch memory ratios are the loss's: the peak includes the matrix-product workspace",
        *missing_words(frame),
        "that equal times mean equal answers: the page measures time and memory only",
    )


def missing_words(frame: pd.DataFrame) -> list[str]:
    """Return one sentence per version and status of rows that did not run: there only a capability can be stated."""
    failed = frame[frame["status"] != "ok"]
    words = []
    for (label, status), group in failed.groupby(["label", "status"], sort=False):
        cases = zip(group["op"], group["precision"], group["N"], strict=True)
        names = ", ".join(dict.fromkeys(case_name(*case) for case in cases))
        words.append(f"a speed-up where {label} was {status} ({names}): only a capability change can be stated")
    return words


def caveats_moe(frame: pd.DataFrame) -> Html:
    """Return what the mixture-of-experts source cannot carry."""
    sites = int((frame["mode"] == "training").sum())
    accepted = int((frame["status"] == "ok").sum())
    return note(
        "Do not conclude",
        f"how EP64 differs from EP32 in training: the two ran at different sites ({sites} training cases in all)",
        "that NVLink and times belong to one run: the counters come from a separate collection",
        "that memory traffic was measured: it is a useful-byte estimate averaged over ranks, idle ones included",
        "that imbalance between experts was tested: it is between ranks only, experts of one rank share alike",
        f"anything about accuracy beyond an acceptance flag, which is true in {accepted} of {len(frame)} cases",
    )


def caveats_roofline() -> Html:
    """Return how the rooflines are to be read."""
    return note(
        "How to read this",
        "peaks are theoretical, dense and at nominal clocks; no ceiling measured on these boards is published beside them",
        "memory shares rest on a useful-byte model, so they are lower bounds; NVLink shares take the busiest rank's counter",
        "training counts three times the forward operations and bytes: a convention of the source, kept here",
        "on the link panel x is the bf16 payload without de-duplication, larger than what mxfp8 and nvfp4 inference moves",
    )


def verdict_loss_roofs(frame: pd.DataFrame) -> Html:
    """Return how near the published loss rows come to the roofs of their boards."""
    sentences = []
    for gpu, group in frame.dropna(subset=["share"]).groupby("gpu", sort=False):
        top = group.nlargest(1, "share").iloc[0]
        sentences.append(
            f"{gpu}: published losses reach {100 * group['share'].median():.2g} % of their nearest roof in the median and "
            f"{100 * top['share']:.2g} % at most ({top['label']}, {case_name(top['op'], top['precision'], top['N'])})."
        )
    return verdict(*(sentences or ["No published loss row is of a board that the ledger knows."]))


def verdict_run_roofs(data: RunData) -> Html:
    """Return how near a run comes to the roofs of its board, or why no percentage can be given."""
    machine, gpu = machine_name(data.run), board_of(data.run)
    rates, shares = [], []
    for record in data.records:
        pair = iteration_ms(record, "pair")
        if pair is None or record.work is None:
            continue
        rates.append(record.work.useful_flops / pair / 1e6)
        if gpu is not None and set(record.work.flops) <= set(gpu.peaks):
            shares.append(max(least_seconds(record.work, gpu).values()) / pair * 1e3)
    if not rates:
        return verdict(f"{machine}: nothing ran, so there is no rate.")
    best = f"{machine}: the highest useful rate of {data.run.run_id} is {max(rates):,.0f} GFLOP/s"
    if not shares:
        return verdict(f"{best}. The peaks ledger does not know this machine, so no percentage is given.")
    return verdict(f"{best}; the best share of the nearest roof is {100 * max(shares):.2g} %.")


def host_bound_series(frame: pd.DataFrame) -> tuple[int, int]:
    """Return how many (GPU, loss, dtype, version) series over several sizes grow less than 1.2 times, and how many exist."""
    growth = series_growth(frame)
    return int((growth < 1.2).sum()), len(growth)


def flat_series(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the series (gpu, op, precision, label) that grow less than 1.2 times: they time Python and launches."""
    growth = series_growth(frame)
    return growth[growth < 1.2].index.to_frame(index=False)


def series_growth(frame: pd.DataFrame) -> pd.Series:
    """Return the time at the largest batch over that at the smallest, for every series that has several."""
    ok = frame[frame["status"] == "ok"].sort_values("N")
    groups = ok.groupby(["gpu", "op", "precision", "label"])["total_ms"]
    several = groups.size() > 1
    return (groups.last() / groups.first())[several]


def _ends(table: pd.DataFrame) -> str:
    """Return the largest gain and the largest loss among decided cases, with intervals."""
    words = []
    for name, largest in (("faster", False), ("slower", True)):
        decided = table[table["verdict"] == name].sort_values("ratio", ascending=not largest)
        for row in decided.head(1).to_dict("records"):
            case = case_name(row["op"], row["precision"], row["N"])
            words.append(f"Most {name}: {case}, time ×{row['ratio']:.3g} [{row['low']:.3g}, {row['high']:.3g}]")
    return ". ".join(words) + "." if words else ""
