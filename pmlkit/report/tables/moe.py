"""Tables of the mixture-of-experts and roofline reports."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from pmlkit.hardware import gpus
from pmlkit.report.page import Table
from pmlkit.report.verdicts import repeats, slowdowns

_CASE = {"mode": "mode", "ep": "EP", "imbalance": "imbalance", "width": "F", "precision": "precision", "pipeline": "pipeline"}


def table_cases(frame: pd.DataFrame) -> Table:
    """Return every published case: times, range of windows, useful rate, link and memory rates, status."""
    shown = _named(
        frame.assign(windows=[f"{low:.3f}–{high:.3f}" for low, high in zip(frame["low_ms"], frame["high_ms"], strict=True)]),
        category="category",
        status="status",
        forward_ms="forward, ms",
        backward_ms="backward, ms",
        layer_ms="layer, ms",
        windows="window range, ms",
        useful_tflops="useful TFLOP/s",
        nvlink_gbps="NVLink mean, GB/s",
        nvlink_max_gbps="NVLink busiest, GB/s",
        hbm_gbps="HBM estimate, GB/s",
    )
    rates = ("useful TFLOP/s", "NVLink mean, GB/s", "NVLink busiest, GB/s", "HBM estimate, GB/s")
    formats = dict.fromkeys(("forward, ms", "backward, ms", "layer, ms"), ".3f") | dict.fromkeys(rates, ",.0f")
    caption = "All published cases; repeated configurations stay separate rows"
    return Table(shown, "moe-cases", caption, _counts(formats), ("status",))


def table_memory(frame: pd.DataFrame) -> Table:
    """Return planned and observed memory of every case, in GiB per rank."""
    columns = {f"{name}_gib": name for name in ("slot", "scratch", "arena", "saved_max", "allocated", "reserved")}
    titles = {"saved_max": "saved, busiest rank", "allocated": "allocated peak", "reserved": "reserved peak"}
    shown = _named(frame, **{key: titles.get(name, name) + ", GiB" for key, name in columns.items()})
    formats = dict.fromkeys([c for c in shown.columns if str(c).endswith("GiB")], ".2f")
    return Table(shown, "moe-memory", "Memory per rank: planned slot, scratch and arena; allocator peaks", _counts(formats))


def table_slowdowns(frame: pd.DataFrame) -> Table:
    """Return what imbalance costs: layer time over the balanced twin, beside the busiest rank's share of rows."""
    part = slowdowns(frame).assign(head=lambda f: f["max_rows"] / f["mean_rows"])
    shown = _named(
        part, layer_ms="layer, ms", balanced_ms="balanced, ms", slowdown="slowdown", head="busiest rank's rows / mean"
    )
    formats = {"layer, ms": ".3f", "balanced, ms": ".3f", "slowdown": ".2f", "busiest rank's rows / mean": ".2f"}
    return Table(shown, "moe-slowdowns", "Layer time under imbalance against the balanced case", _counts(formats))


def table_repeats(frame: pd.DataFrame) -> Table:
    """Return the configurations measured twice: the free A/A test of the source."""
    shown = _named(
        repeats(frame), first="first row", second="second row", first_ms="first, ms", second_ms="second, ms", change="change"
    )
    formats = {"first, ms": ".3f", "second, ms": ".3f", "change": "+.2%"}
    return Table(shown, "moe-repeats", "Configurations measured twice", _counts(formats))


def table_shares(frame: pd.DataFrame) -> Table:
    """Return each case's rate and its share of every roof and of the balance-adjusted ceiling."""
    shares = {f"{name}_share": title for name, title in (("compute", "of compute"), ("hbm", "of HBM"), ("nvlink", "of NVLink"))}
    shown = _named(
        frame,
        useful_tflops="useful TFLOP/s",
        intensity="FLOP/byte",
        **shares,
        nearest="nearest roof",
        overlap="sum of shares",
        ceiling_tflops="balanced ceiling, TFLOP/s",
        ceiling_share="of ceiling",
    )
    formats = dict.fromkeys([*shares.values(), "of ceiling"], ".1%") | {"sum of shares": ".2f"}
    formats |= dict.fromkeys(("useful TFLOP/s", "FLOP/byte", "balanced ceiling, TFLOP/s"), ",.0f")
    return Table(shown, "roof-shares", "Shares of theoretical roofs", _counts(formats))


def table_peaks() -> Table:
    """Return the peaks ledger: every value with unit, source and the other values that are in print."""
    rows = [
        {
            "GPU": gpu.title,
            "peak": peak.key,
            "value": peak.value,
            "unit": peak.unit if peak.direction is None else f"{peak.unit} {peak.direction}",
            "source": peak.source,
            "disputed": "; ".join(f"{d.value:,.5g}: {d.source} ({d.note})" for d in peak.disputes) or None,
        }
        for gpu in gpus().values()
        for peak in gpu.peaks.values()
    ]
    date = next(iter(gpus().values())).peak("hbm").retrieved
    caption = f"Theoretical peaks: dense, per GPU; sources as of {date}"
    return Table(pd.DataFrame(rows), "peaks", caption, {"value": ",.5g"})


def table_loss_roofs(frame: pd.DataFrame) -> Table:
    """Return the share of the nearest roof of published loss rows."""
    shown = pd.DataFrame(
        {
            "GPU": frame["gpu"], "loss": frame["op"], "precision": frame["precision"], "batch": frame["N"],
            "version": frame["label"], "total, ms": frame["total_ms"], "least time, µs": frame["bound_us"],
            "share of nearest roof": frame["share"], "nearest roof": frame["nearest"],
        }
    )  # fmt: skip
    formats = {"total, ms": ".3g", "least time, µs": ".3g", "share of nearest roof": ".2%", "batch": ",d"}
    return Table(shown, "loss-roofs", "Published losses against the roofs of their boards", formats)


def _named(frame: pd.DataFrame, **columns: str) -> pd.DataFrame:
    """Return the case columns and these further columns, titled."""
    return frame[[*_CASE, *columns]].rename(columns=_CASE | columns)


def _counts(formats: Mapping[Any, str]) -> dict[str, str]:
    return {"imbalance": "g", "F": ",d", **formats}


def table_layers(table: pd.DataFrame) -> Table:
    """Return one rank's work: pmlkit's rate and share of its roof, the best rival, the published busiest rank."""
    titles = {
        "mode": "mode", "precision": "precision", "experts": "experts", "width": "F", "rows": "rows", "pipeline": "pipeline",
        "math": "math path", "status": "status", "ms": "ms", "tflops": "TFLOP/s", "roof": "roof", "share": "of the roof",
        "rival": "best rival", "lead": "rate / rival's", "published_pipeline": "published", "published_tflops": "its TFLOP/s",
        "published_share": "of its peak",
    }  # fmt: skip
    shown = table[list(titles)].rename(columns=titles)
    formats = {"F": ",d", "rows": ",d", "ms": ".3f", "TFLOP/s": ",.0f", "of the roof": ".1%", "rate / rival's": ".3f"}
    formats |= {"its TFLOP/s": ",.0f", "of its peak": ".1%"}
    return Table(shown, "layers", "One rank's expert work, no communication, beside GB300's busiest rank", formats, ("status",))


def table_layer_answers(layers: pd.DataFrame) -> Table:
    """Return how right every arm's answer was, whether its replayed graph gave the very same, and what forward keeps."""
    titles = {
        "mode": "mode", "precision": "precision", "experts": "experts", "width": "F", "rows": "rows", "arm": "arm",
        "status": "status", "error": "error", "limit": "limit", "graph": "graph accepted", "saved_mib": "saved, MiB",
    }  # fmt: skip
    shown = layers[list(titles)].rename(columns=titles)
    formats = {"F": ",d", "rows": ",d", "error": ".2e", "limit": ".2e", "saved, MiB": ",.1f"}
    return Table(shown, "layer-answers", "Answers: distance from float64 over its norm, worst process", formats, ("status",))
