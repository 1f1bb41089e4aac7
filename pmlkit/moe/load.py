"""Routing load of a layer: rows that ranks receive and store, and the checks that all planners share. Torch-free.

Rules of the published GB300 report: ranks are loaded unequally by a power law, the experts of one rank equally.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

from pmlkit.errors import PmlkitError, nearest
from pmlkit.precision import precision

MODES = ("training", "inference")
# Storage format -> modes it serves. The report trains in bf16 and mxfp8; nvfp4 there is for inference only.
FORMATS = {"bf16": MODES, "mxfp8": MODES, "nvfp4": ("inference",)}
BLOCKED = ("mxfp8", "nvfp4")
PIPELINES = {"standard": ("bf16",), "staged": BLOCKED, "mega": BLOCKED}


def receive_rows(ep: int, tokens: int, top_k: int, imbalance: float) -> list[int]:
    """Return the rows that each of `ep` ranks receives when every rank sends tokens·top_k, most loaded rank first.

    imbalance: rows of rank 0 over the mean; 1 is equal, ep or more puts everything on rank 0. In between, rank r has
    the weight (r + 1)^-a with `a` such that rank 0 gets its share, and largest remainders round to the exact total
    (the published report's rule: rounding each rank to nearest misses its totals).
    Raises PmlkitError for a size below 1 or an imbalance that is below 1 or not finite.
    """
    check_sizes("receive_rows", {"ep": ep, "tokens": tokens, "top_k": top_k})
    if not math.isfinite(imbalance) or imbalance < 1:
        raise PmlkitError(
            f"imbalance {imbalance!r} in receive_rows: rank 0 over the mean rank is a finite number of at least 1; "
            "pass 1 for an equal load"
        )
    each = tokens * top_k
    if imbalance == 1:
        return [each] * ep
    if imbalance >= ep:
        return [ep * each] + [0] * (ep - 1)
    head = Fraction(imbalance) * each
    tail = [Fraction(weight) for weight in _tail_weights(ep, imbalance)]
    scale = (ep * each - head) / sum(tail)
    return _largest_remainder([head, *(weight * scale for weight in tail)])


def split_even(rows: int, experts: int) -> list[int]:
    """Return the rows of each of a rank's `experts` local experts, equal up to one. Raises PmlkitError if negative."""
    check_sizes("split_even", {"experts": experts})
    if rows < 0:
        raise PmlkitError(f"rows {rows!r} in split_even is negative: pass the rows that the rank received")
    each, more = divmod(rows, experts)
    return [each + 1] * more + [each] * (experts - more)


def row_limit(ep: int, tokens: int, top_k: int, experts: int) -> int:
    """Return the most rows one rank can receive: a token sends at most one row to each of the rank's experts."""
    return ep * tokens * min(top_k, experts // ep)


def device_rows(ep: int, tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Return the rows a rank has room for at `factor` times the balanced load, padding excluded.

    A factor above ep counts as ep: no rank receives more than everything.
    """
    return min(int(tokens * top_k * min(factor, ep) + 0.5), row_limit(ep, tokens, top_k, experts))


def padded_rows(rows: int, experts: int, tile: int) -> int:
    """Return the rows stored for `rows` spread equally over local `experts` that each fill up whole tiles of rows."""
    return sum(-(-count // tile) * tile for count in split_even(rows, experts))


def padded_capacity(rows: int, experts: int, tile: int) -> int:
    """Return rows enough to store `rows` in any spread over local `experts` that each fill up whole tiles."""
    return (rows + experts * (tile - 1)) // tile * tile


def check_sizes(place: str, sizes: Mapping[str, int]) -> None:
    """Raise PmlkitError unless all `sizes` are whole and positive, `ep` divides `experts` and `top_k` fits into it."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PmlkitError(f"{name} {size!r} in {place} is not a positive whole number: pass 1 or more")
    if "experts" not in sizes or "ep" not in sizes:
        return
    experts, ep, top_k = sizes["experts"], sizes["ep"], sizes["top_k"]
    if experts % ep:
        fits = [n for n in range(1, experts + 1) if experts % n == 0]
        below, above = max(n for n in fits if n < ep), min((n for n in fits if n > ep), default=None)
        remedy = f"use {below}" + (f" or {above}" if above else "")
        raise PmlkitError(f"ep {ep} in {place} does not divide {experts} experts: {remedy}")
    if top_k > experts:
        raise PmlkitError(f"top_k {top_k} in {place} is more than {experts} experts: pass {experts} or fewer")


def check_format(place: str, precision_key: str, mode: str, pipeline: str | None = None) -> None:
    """Raise PmlkitError unless a layer exists in this storage format and mode and, where given, this pipeline."""
    if mode not in MODES:
        raise PmlkitError(f"unknown mode {mode!r} in {place}: {nearest(mode, list(MODES))}")
    key = precision(precision_key).key
    if key not in FORMATS:
        raise PmlkitError(f"precision {key!r} in {place} has no expert layer: use {' or '.join(FORMATS)}")
    if mode not in FORMATS[key]:
        trainable = " or ".join(name for name, modes in FORMATS.items() if mode in modes)
        raise PmlkitError(f"precision {key!r} in {place} is for inference only: use mode 'inference', or {trainable}")
    if pipeline is not None and pipeline not in PIPELINES:
        raise PmlkitError(f"unknown pipeline {pipeline!r} in {place}: {nearest(pipeline, list(PIPELINES))}")
    if pipeline is not None and key not in PIPELINES[pipeline]:
        fits = " or ".join(name for name, keys in PIPELINES.items() if key in keys)
        raise PmlkitError(f"pipeline {pipeline!r} in {place} does not take {key}: use {fits}")


def check_blocks(place: str, key: str, widths: Mapping[str, int]) -> None:
    """Raise PmlkitError unless all `widths` are whole blocks of the storage format."""
    block = precision(key).block or 1
    for name, width in widths.items():
        if width % block:
            remedy = f"use {width + -width % block}"
            raise PmlkitError(f"{name} {width} in {place} is no multiple of {key}'s block, {block}: {remedy}")


def _tail_weights(ep: int, imbalance: float) -> list[float]:
    """Return the weights of ranks 1 to ep - 1 against weight 1 of rank 0, for 1 < imbalance < ep.

    Their sum falls with the exponent and must be ep/imbalance - 1. Solving for it, not for the head's share, keeps
    all digits when imbalance comes close to ep.
    """
    logs = [math.log(rank + 1) for rank in range(1, ep)]
    wanted = float((ep - Fraction(imbalance)) / Fraction(imbalance))

    def weights(exponent: float) -> list[float]:
        return [math.exp(-exponent * log) for log in logs]

    low, high = 0.0, 1.0
    while math.fsum(weights(high)) > wanted:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if math.fsum(weights(middle)) > wanted else (low, middle)
    return weights(high)


def _largest_remainder(shares: list[Fraction]) -> list[int]:
    """Round `shares` and keep their whole sum: the largest fractions go up, of equal ones the first."""
    rows = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda rank: rows[rank] - shares[rank])
    for rank in order[: int(sum(shares)) - sum(rows)]:
        rows[rank] += 1
    return rows
