"""One rank's expert work as measured, beside the busiest rank of the published cases: shares of each board's own peaks."""

from collections.abc import Sequence
from statistics import median

import pandas as pd

from pmlkit.errors import PmlkitError
from pmlkit.hardware import match_gpu
from pmlkit.report.compare import count_sentence, overall
from pmlkit.report.frames import board_of, iteration_ms
from pmlkit.report.load import RunData, load_run, provenance
from pmlkit.report.page import Html, verdict

EXPERTS = 384  # of the published layer; a rank's own are this over EP
TOKENS = 2048  # of a published rank
# What a layer's products run on, where that is not its format: a board without block-scaled products has another roof.
ROOF = {"folded-fp8": "fp8", "decode-bf16": "bf16"}
CASE = ["mode", "precision", "experts", "width", "tokens"]


def load_layers(names: Sequence[str]) -> list[RunData]:
    """Read runs of expert layers by name. Raises PmlkitError for an unknown run, and for one about something else."""
    runs = [load_run(name) for name in names]
    for run in runs:
        if ops := {record.op for record in run.records} - {"moe_layer"}:
            raise PmlkitError(f"run {run.run.run_id!r} is about {', '.join(sorted(ops))}: name runs of moe-one-gpu campaigns")
    return runs


def frame_layers(runs: Sequence[RunData]) -> pd.DataFrame:
    """Return one row per case and arm: median time of its processes, useful rate, share of the roof it runs under.

    A status other than ok, of any process, stands for the arm. roof: the peak that the share is of.
    """
    rows = []
    for run in runs:
        board = board_of(run.run)
        for (case, arm), group in _grouped(run).items():
            first, failed = group[0], next((record for record in group if record.status != "ok"), None)
            times = [time for record in group if (time := iteration_ms(record, "pair")) is not None]
            rate = first.work.useful_flops / median(times) / 1e9 if times and first.work and not failed else None
            key = ROOF.get(first.math, "fp8" if first.precision == "mxfp8" else first.precision)
            peak = board.peaks.get(key) if board else None
            rows.append(
                {
                    "case": case, "gpu": board.title if board else "", "mode": first.mode, "precision": first.precision,
                    "experts": first.shape["E"], "width": first.shape["F"], "tokens": first.shape["T"],
                    "rows": first.shape["T"] * first.shape["K"], "arm": arm, "ours": first.pipeline is not None,
                    "pipeline": first.pipeline or "", "math": first.math, "roof": key,
                    "status": failed.status if failed else "ok", "ms": None if failed else median(times),
                    "low_ms": None if failed else min(times), "high_ms": None if failed else max(times), "tflops": rate,
                    "share": rate / peak.value if rate and peak else None,
                    "saved_mib": _mib(first.memory[0].saved_bytes) if first.memory else None,
                    "error": max((r.check.rms_rel or 0.0 for r in group if r.check), default=None),
                    "limit": first.check.limit if first.check else None,
                    "graph": first.check.graph_accepted if first.check else None,
                }
            )  # fmt: skip
    columns = ["case", "gpu", *CASE, "rows", "arm", "ours", "pipeline", "math", "roof", "status", "ms", "low_ms", "high_ms"]
    frame = pd.DataFrame(rows, columns=[*columns, "tflops", "share", "saved_mib", "error", "limit", "graph"])
    return frame.sort_values([*CASE, "arm"], ignore_index=True)


def published_layers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the published cases as one rank's work: the busiest rank's rate and share, of the fastest pipeline of a case."""
    rate = frame["useful_tflops"] * frame["max_rows"] / frame["mean_rows"]
    boards = [match_gpu(gpu) for gpu in frame["gpu"]]
    peaks = [board.peaks[key].value if board else None for board, key in zip(boards, frame["precision"], strict=True)]
    tokens = (TOKENS * frame["max_rows"] / frame["mean_rows"]).round().astype(int)
    part = frame.assign(
        experts=EXPERTS // frame["ep"],
        tokens=tokens,
        published_tflops=rate,
        published_share=rate / pd.Series(peaks, frame.index),
    )
    best = part.sort_values("published_tflops", ascending=False).drop_duplicates(CASE)
    return best[[*CASE, "pipeline", "published_tflops", "published_share"]].rename(columns={"pipeline": "published_pipeline"})


def beside_published(layers: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Return pmlkit's measured layers with the published case of the same work, where there is one, and its best rival."""
    ours = layers["ours"].astype(bool)  # an empty column has no type
    own = layers[ours].drop_duplicates(["case", "pipeline", "math"])  # the twin of an A/A control is not shown
    rivals = layers[~ours & (layers["status"] == "ok")].sort_values("tflops", ascending=False).drop_duplicates("case")
    rivals = rivals[["case", "arm", "tflops"]].rename(columns={"arm": "rival", "tflops": "rival_tflops"})
    table = own.merge(rivals, on="case", how="left").merge(published, on=CASE, how="left")
    return table.assign(lead=table["tflops"] / table["rival_tflops"])


def verdict_layers(runs: Sequence[RunData], table: pd.DataFrame) -> Html:
    """Return what pmlkit's layers reach, how they stand against their rivals, and what the published system reached."""
    if not runs:
        return verdict("No run is named: measure one with `python -m pmlkit run moe-one-gpu` and pass -p runs=ID.")
    sentences = []
    for (mode, precision), part in table.dropna(subset=["tflops"]).groupby(["mode", "precision"], sort=False):
        words = f"{precision} {mode}: {_range(part['tflops'])} TFLOP/s"
        if part["share"].notna().any():
            words += f", {_range(100 * part['share'])} % of the {part['gpu'].iloc[0]}'s {part['roof'].iloc[0]} peak"
        if part["published_share"].notna().any():
            words += f"; the published busiest rank of the same work {_range(100 * part['published_share'])} % of GB300's"
        sentences.append(words + ".")
    for run in runs:
        for arm in run.candidates:
            table = run.comparisons[run.comparisons["candidate"] == arm]
            if (run.baseline, arm) not in run.controls and len(table):
                mean = overall(table)
                ratio = f", geometric mean of times ×{mean[0]:.3g}" if mean else ""
                sentences.append(f"{arm} against pmlkit's {run.baseline} ({run.run.run_id}): {count_sentence(table)}{ratio}.")
    return verdict(*(sentences or ["No process of these runs came to an end."]), "One rank's work, no communication.")


def provenance_layers(runs: Sequence[RunData]) -> Html:
    """Return the provenance of all runs."""
    boxes = [provenance(run) for run in runs]
    return Html("".join(box.markup for box in boxes), "\n".join(box.text for box in boxes))


def _grouped(run: RunData) -> dict[tuple[str, str], list]:
    groups: dict[tuple[str, str], list] = {}
    for record in run.records:
        groups.setdefault((record.case_id, record.arm), []).append(record)
    return groups


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def _range(values: pd.Series) -> str:
    """Return `a to b` in whole numbers, or the one number that both round to."""
    low, high = f"{values.min():,.0f}", f"{values.max():,.0f}"
    return low if low == high else f"{low} to {high}"
