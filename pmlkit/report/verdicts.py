"""The sentences that open a report: the verdict first, with its numbers, and what must not be concluded."""

from typing import Any

import pandas as pd

from pmlkit.hardware import match_gpu
from pmlkit.report.compare import count_sentence, overall
from pmlkit.report.frames import case_name, iteration_ms, machine_name
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


def validity(data: RunData) -> str:
    """Return planned, recorded, failed and flagged counts and the noise floor as words; nothing ok is said in capitals."""
    ok = int((data.frame["status"] == "ok").sum())
    flagged = int((data.frame["flags"] != "").sum())
    floor = "no A/A control ran" if data.floor is None else f"A/A noise floor {100 * data.floor:.1f} %"
    words = f"{data.run.planned} planned, {len(data.frame)} recorded, {ok} ok, {flagged} flagged; {floor}"
    return f"{words}; margin {100 * data.margin:.1f} %" if ok else f"{words}; NOTHING WAS MEASURED"


def verdict_health(data: RunData) -> Html:
    """Return whether a run can be trusted: coverage, the A/A control, drift over the campaign, checks."""
    ok = data.frame[data.frame["status"] == "ok"]
    control = data.comparisons[[(data.baseline, arm) in data.controls for arm in data.comparisons["candidate"]]]
    alarms = int(control["verdict"].isin(["faster", "slower"]).sum())
    sentences = [f"{'Complete' if len(data.frame) == data.run.planned else 'INCOMPLETE'}: {validity(data)}."]
    if len(control):
        sentences.append(f"A/A control: {alarms} false alarms in {len(control)} comparisons of the same code with itself.")
    if len(ok):
        drift = drift_percent(ok)
        sentences.append(
            f"Drift: from the first to the last third of the campaign the pair time changes by {drift:+.1f} % in the median."
        )
        worst = ok.assign(share=ok["error"] / ok["limit"]).nlargest(1, "share").iloc[0]
        share = 100 * worst["error"] / worst["limit"]
        wrong = int((data.frame["status"] == "wrong_result").sum())
        sentences.append(
            f"Answers: {wrong} wrong, which were not timed; of the timed ones the nearest to its limit is {worst['label']} on "
            f"{case_name(worst['op'], worst['precision'], worst['N'])} ({worst['error']:.1e}, {share:.0f} % of the limit)."
        )
    return verdict(*sentences)


def drift_percent(ok: pd.DataFrame) -> float:
    """Return the median change, in percent, of pair times relative to their case's median, last third against first."""
    change = ok["pair_ms"] / ok.groupby(["case_id", "label"])["pair_ms"].transform("median")
    ordered = change.loc[ok["order"].sort_values().index]
    third = max(1, len(ordered) // 3)
    return float(100 * (ordered.iloc[-third:].median() / ordered.iloc[:third].median() - 1))


def verdict_moe(data: SourceData) -> Html:
    """Return the verdict on the mixture-of-experts source: best rates, the price of imbalance, the A/A repeats."""
    frame = data.frame
    sentences = []
    for mode, part in frame.groupby("mode", sort=False):
        best = [group.nlargest(1, "useful_tflops").iloc[0] for _, group in part.groupby("precision", sort=False)]
        rates = ", ".join(f"{r.precision} {r.useful_tflops:,.0f} TFLOP/s ({r.pipeline}, EP{r.ep}, F={r.width:,})" for r in best)
        sentences.append(f"Highest useful rate per GPU, {mode}: {rates}.")
    ratios = slowdowns(frame)
    most = int(ratios["imbalance"].max())
    worst = ratios[ratios["imbalance"] == most]
    sentences.append(
        f"Imbalance {most} costs {worst['slowdown'].min():.1f} to {worst['slowdown'].max():.1f} times the balanced layer "
        f"time: the busiest rank pays in full."
    )
    changes = repeats(frame)
    sentences.append(
        f"{len(changes)} configurations were measured twice and differ by {100 * changes['change'].min():+.1f} to "
        f"{100 * changes['change'].max():+.1f} %: that is the noise floor between allocations."
    )
    return verdict(*sentences, f"Windows have not settled: {settling_words(frame)[-1].removeprefix('all: ')}.")


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
    if "best_share" not in frame:
        return verdict("Unknown board: no peak is known, so no percentage can be given.")
    nearest = ", ".join(f"{name} in {n}" for name, n in frame["nearest"].value_counts().items())
    top = frame.nlargest(1, "best_share").iloc[0]
    skewed = frame[frame["balance"] < 1].sort_values("tflops").iloc[0]
    sums = frame[frame["imbalance"] == 1].groupby("precision", sort=False)["overlap"].median()
    median, most = 100 * frame["best_share"].median(), 100 * top["best_share"]
    peak, ceiling = 100 * skewed["compute_share"], 100 * skewed["ceiling_share"]
    return verdict(
        f"Nothing is near a roof: the best share of any of the three roofs has median {median:.0f} % and maximum {most:.1f} % "
        f"({top['row']}). Nearest roof: {nearest} of {len(frame)} cases.",
        f"Imbalance explains the low end: {skewed['row']} reaches {skewed['tflops']:,.0f} TFLOP/s, {peak:.1f} % of peak but "
        f"{ceiling:.0f} % of its balance-adjusted ceiling.",
        "At balance the three shares add up to a median of "
        + ", ".join(f"{value:.2f} ({key})" for key, value in sums.items())
        + ": as if compute, memory and link hardly overlapped.",
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
        "speed-ups for NT-Xent at 2,048 rows: 2.9.0 ran out of memory there, so only a capability change can be stated",
        "that equal times mean equal answers: the page measures time and memory only",
    )


def caveats_moe(frame: pd.DataFrame) -> Html:
    """Return what the mixture-of-experts source cannot carry."""
    sites = int((frame["mode"] == "training").sum())
    return note(
        "Do not conclude",
        f"how EP64 differs from EP32 in training: the two ran at different sites ({sites} training cases in all)",
        "that NVLink and times belong to one run: the counters come from a separate collection",
        "that memory traffic was measured: it is a useful-byte estimate averaged over ranks, idle ones included",
        "that imbalance between experts was tested: it is between ranks only, experts of one rank share alike",
        "anything about accuracy beyond an acceptance flag, which is true in every case",
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
    for gpu, group in frame.groupby("gpu", sort=False):
        top = group.nlargest(1, "share").iloc[0]
        sentences.append(
            f"{gpu}: published losses reach {100 * group['share'].median():.2g} % of their nearest roof in the median and "
            f"{100 * top['share']:.2g} % at most ({top['label']}, {case_name(top['op'], top['precision'], top['N'])}): "
            f"they time launches and Python, not the board."
        )
    return verdict(*sentences)


def verdict_run_roofs(data: RunData) -> Html:
    """Return how near a run comes to the roofs of its board, or why no percentage can be given."""
    machine = machine_name(data.run)
    gpu = match_gpu(machine)
    rates, shares = [], []
    for record in data.records:
        pair = iteration_ms(record, "pair")
        if pair is not None and record.work is not None:
            rates.append(record.work.useful_flops / pair / 1e6)
            if gpu is not None:
                shares.append(max(least_seconds(record.work, gpu).values()) / pair * 1e3)
    if not rates:
        return verdict(f"{machine}: nothing ran, so there is no rate.")
    best = f"{machine}: the highest useful rate of {data.run.run_id} is {max(rates):,.0f} GFLOP/s"
    if not shares:
        return verdict(f"{best}. The peaks ledger does not know this machine, so no percentage is given.")
    return verdict(f"{best}; the best share of the nearest roof is {100 * max(shares):.2g} %.")


def host_bound_series(frame: pd.DataFrame) -> tuple[int, int]:
    """Return how many (GPU, loss, dtype, version) series over several sizes grow less than 1.2 times, and how many exist."""
    ok = frame[frame["status"] == "ok"]
    flat = series = 0
    for _, group in ok.groupby(["gpu", "op", "precision", "label"]):
        if len(group) > 1:
            ordered = group.sort_values("N")["total_ms"]
            series += 1
            flat += bool(ordered.iloc[-1] / ordered.iloc[0] < 1.2)
    return flat, series


def _ends(table: pd.DataFrame) -> str:
    """Return the largest gain and the largest loss among decided cases, with intervals."""
    words = []
    for name, largest in (("faster", False), ("slower", True)):
        decided = table[table["verdict"] == name].sort_values("ratio", ascending=not largest)
        for row in decided.head(1).to_dict("records"):
            case = case_name(row["op"], row["precision"], row["N"])
            words.append(f"Most {name}: {case}, time ×{row['ratio']:.3g} [{row['low']:.3g}, {row['high']:.3g}]")
    return ". ".join(words) + "." if words else ""
