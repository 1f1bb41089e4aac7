"""Protocols as data: how one process times one case, and how many processes a campaign starts."""

from typing import Literal

import msgspec

from pmlkit.errors import PmlkitError, nearest

Cache = Literal["as-in-loop", "hot", "cold", "rotating"]


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """How one process times one case, and how often that is done.

    processes, most: processes of every case and arm at first; rounds are added until the intervals are narrow enough or
    there are `most` (equal numbers: none is added).
    device: `cpu` (wall clock) or `cuda` (events, graph replay). blocks: samples per phase. inner: iterations of a
    sample, or None: as many as last `block_s` seconds. warmup, warmup_s: at least this many pairs and this many seconds,
    and until nothing was compiled or allocated in the last ten, before anything is kept.
    lasting: whether a process of an arm measures all cases of a round, taking turns with the other arms' processes, instead
    of one case each: for campaigns whose many cases take less time than the start of a process.
    cache: `as-in-loop` = iterations follow each other as in training; `hot` = each follows an untimed one of itself;
    `cold` = the second-level cache is overwritten before each; `rotating` = more input sets than the cache holds take
    turns. seeks: `time`, or `capacity` = the largest batch of which a pair runs. ahead: how many later groups import while
    one is measured, on processor cores kept apart from its own.
    threads: CPU threads of the worker. timeout_s: after this the worker is killed.
    """

    name: str
    blocks: int
    warmup: int
    warmup_s: float
    processes: int = 5
    most: int = 5
    device: Literal["cpu", "cuda"] = "cpu"
    inner: int | None = None
    block_s: float = 0.03
    cache: Cache = "as-in-loop"
    lasting: bool = False
    seeks: Literal["time", "capacity"] = "time"
    ahead: int = 0
    threads: int = 1
    timeout_s: float = 120.0


_GPU = Protocol(name="pmlkit", device="cuda", processes=7, most=15, blocks=15, block_s=0.01, warmup=20, warmup_s=1.0, ahead=2)

PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(name="pmlkit-cpu", blocks=3, warmup=3, warmup_s=0.05),
        _GPU,
        # Where device time is short: the least number of processes whose ranges may be trusted, half the seconds each. On
        # one H200 a process then takes 2 s instead of 3; windows that still drift get more warm-up as under `pmlkit`.
        msgspec.structs.replace(_GPU, name="pmlkit-short", processes=5, block_s=0.005, warmup_s=0.5),
        # The same without further rounds: the whole campaign fits a known time.
        msgspec.structs.replace(_GPU, name="pmlkit-five", processes=5, most=5, block_s=0.005, warmup_s=0.5),
        msgspec.structs.replace(_GPU, name="pmlkit-cold", cache="cold"),
        msgspec.structs.replace(_GPU, name="pmlkit-rotating", cache="rotating"),
        # Large batches: a pair may take seconds, so neither count nor seconds of warm-up are worth more than one look.
        msgspec.structs.replace(_GPU, name="pmlkit-large", processes=5, most=5, block_s=0.002, warmup=3, warmup_s=0.1),
        # What is the same every time is seen once: how wrong an answer is, and how large a batch may be.
        msgspec.structs.replace(_GPU, name="pmlkit-answer", processes=1, most=1, blocks=3, inner=1, warmup=1, warmup_s=0.0),
        msgspec.structs.replace(_GPU, name="pmlkit-capacity", processes=1, most=1, seeks="capacity", timeout_s=600.0),
        # As the published page: 3 processes, each 3 blocks of 100 pairs.
        Protocol(name="pml-page", device="cuda", processes=3, most=3, blocks=3, inner=100, warmup=20, warmup_s=1.0, ahead=2),
        # As the published report (windows of 30 replays), with 15 windows instead of 5: its five had not settled.
        Protocol(name="moe-report", device="cuda", blocks=15, inner=30, warmup=30, warmup_s=1.0, ahead=2),
        # The same where device time is short: windows of 5 replays, one process a subject and round.
        Protocol(
            name="moe-short",
            device="cuda",
            processes=5,
            most=5,
            blocks=15,
            inner=5,
            warmup=10,
            warmup_s=0.1,
            lasting=True,
            timeout_s=300.0,
        ),
    )
}


def protocol(name: str) -> Protocol:
    """Return a protocol. Raises PmlkitError for an unknown name."""
    if name not in PROTOCOLS:
        raise PmlkitError(f"unknown protocol {name!r} in protocol.py: {nearest(name, list(PROTOCOLS))}")
    return PROTOCOLS[name]
