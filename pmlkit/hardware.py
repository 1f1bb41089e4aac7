"""The peaks ledger: what each board could do at most, by whom it is said, and who says otherwise."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from pmlkit.errors import PmlkitError, nearest


@dataclass(frozen=True)
class Dispute:
    """Another published value of a peak, with its source and the reason why it is not used."""

    value: float
    source: str
    note: str


@dataclass(frozen=True)
class Peak:
    """One theoretical peak: dense, per GPU, per direction for links. unit: TFLOP/s or GB/s (SI)."""

    key: str
    value: float
    unit: str
    source: str
    retrieved: str
    disputes: tuple[Dispute, ...] = ()
    direction: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A board. names: exact driver names; published: exact names in published reports; None = the ledger does not know."""

    key: str
    title: str
    names: tuple[str, ...]
    published: tuple[str, ...]
    sm_count: int | None
    power_w: int | None
    peaks: dict[str, Peak]

    def peak(self, key: str) -> Peak:
        """Return a peak: a precision key, `hbm` or `nvlink`. Raises PmlkitError if the board has none."""
        if key not in self.peaks:
            raise PmlkitError(f"{self.title} has no {key!r} peak in peaks.toml: {nearest(key, list(self.peaks))}")
        return self.peaks[key]


@cache
def gpus() -> dict[str, Gpu]:
    """Return every board of the ledger by key."""
    ledger = tomllib.loads((files("pmlkit") / "peaks.toml").read_text())
    retrieved = ledger.pop("retrieved")
    return {key: _gpu(key, entry, retrieved) for key, entry in ledger.items()}


def match_gpu(name: str, sm_count: int | None = None, power_w: float | None = None) -> Gpu | None:
    """Return the board with exactly this driver or published name, or None: then no percentage may be shown.

    sm_count and power_w (the enforced limit) are compared where both sides know them, so that a partitioned or capped
    card does not borrow the peaks of the full one.
    """
    for gpu in gpus().values():
        if name in gpu.names or name in gpu.published:
            same_sms = sm_count is None or gpu.sm_count is None or sm_count == gpu.sm_count
            same_power = power_w is None or gpu.power_w is None or abs(power_w - gpu.power_w) < 1
            return gpu if same_sms and same_power else None
    return None


def _gpu(key: str, entry: dict[str, Any], retrieved: str) -> Gpu:
    rates = {name: (value, "TFLOP/s", "compute") for name, value in entry["compute_tflops"].items()}
    rates |= {name: (entry[f"{name}_gbps"], "GB/s", name) for name in ("hbm", "nvlink") if f"{name}_gbps" in entry}
    disputes = entry.get("disputes", [])
    peaks = {}
    for name, (value, unit, source) in rates.items():
        others = tuple(Dispute(d["value"], d["source"], d["note"]) for d in disputes if d["key"] == name)
        direction = "per direction" if name == "nvlink" else None
        peaks[name] = Peak(name, value, unit, entry["sources"][source], retrieved, others, direction)
    return Gpu(
        key=key,
        title=entry["title"],
        names=tuple(entry["names"]),
        published=tuple(entry["published"]),
        sm_count=entry.get("sm_count"),
        power_w=entry.get("power_w"),
        peaks=peaks,
    )
