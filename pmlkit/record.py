"""A measured record: what one process saw of one case. Raw, append-only; nothing that can be computed is stored."""

from itertools import chain
from statistics import median
from typing import Literal

import msgspec

from pmlkit.protocol import Cache
from pmlkit.work import Work

# Schema history: 1 = first version.
SCHEMA = "pmlkit.record/1"

Status = Literal[
    "ok", "wrong_result", "unsupported", "oom", "host_oom", "timeout", "crashed", "error", "skipped",
    "graph_capture_failed", "timer_error",
]  # fmt: skip
Flag = Literal[
    "unsteady", "throttled", "contended", "contention_unknown", "below_resolution", "host_bound", "device_bound",
    "clock_confounded", "implausible",
]  # fmt: skip

Math = Literal["plain", "native", "folded-fp8", "decode-bf16"]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Base of everything that is read from a file: an unknown field is an error."""


class Check(Strict, kw_only=True):
    """The answer compared with a float64 reference on the same rounded inputs, before anything was timed.

    rms_rel: largest ‖difference‖/‖reference‖ over the loss value and every gradient; max_rel: largest single difference
    over the largest reference value; None = not finite. worst_row: row of the largest difference; limit: what rms_rel
    must not exceed; reference: what it was compared with; plain_rms_rel: rms_rel before own mining was granted.
    graph_accepted: whether a replayed graph gives bit by bit what the same calls gave before; None where that was not asked.
    """

    max_rel: float | None
    rms_rel: float | None
    worst_row: int | None
    reference: str
    limit: float
    plain_rms_rel: float | None = None
    graph_accepted: bool | None = None

    @property
    def passed(self) -> bool:
        """Whether the answer is right."""
        return self.rms_rel is not None and self.rms_rel <= self.limit and self.graph_accepted is not False


class Timer(Strict, kw_only=True):
    """How time was taken. One sample is the total of `inner` iterations."""

    method: Literal["events", "graph_replay", "wall"]
    cache: Cache
    warmup: int
    warmup_s: float
    inner: int
    resolution_ns: float


class Memory(Strict, kw_only=True):
    """Memory of one rank in bytes; None = does not apply. source: where the peak comes from.

    alloc_retries, ooms: how often the allocator had to empty its cache, or failed, since the process began.
    """

    source: Literal["profiler", "cuda"]
    baseline_bytes: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int | None = None
    workspace_bytes: int | None = None
    graph_pool_bytes: int | None = None
    arena_bytes: int | None = None
    slot_bytes: int | None = None
    scratch_bytes: int | None = None
    saved_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: int | None = None


class Kernels(Strict, kw_only=True):
    """What one rank's device did for `pairs` pairs, seen by a profiler in a pass of its own.

    launches: kernels, copies and fills. busy_ns: time during which at least one of them ran. queued_ns: time by events
    of the same pairs when all were submitted before the first could start, so that no gap of the host is inside, or
    None where the subject waits for the device in between.
    """

    pairs: int
    launches: int
    busy_ns: int
    queued_ns: int | None


class Counters(Strict, kw_only=True):
    """NVLink payload counters of one rank around the timed replays, or None with the reason."""

    nvlink_tx_bytes: int | None
    nvlink_rx_bytes: int | None
    same_run: bool
    reason: str | None = None


class Capacity(Strict, kw_only=True):
    """How many rows a batch may have: the most of which a pair ran, and the fewest that failed, with the reason.

    refused, reason: None if even the case's own number of rows ran.
    """

    largest: int
    refused: int | None = None
    reason: str | None = None


class Conditions(Strict, kw_only=True):
    """What explains noise on one rank during the timed part: its start and its end, sm_mhz after every block too.

    held_back_ns: how long power or temperature held the clock down, by the driver's own count. cores: the processor
    cores that the worker was kept on. foreign_cores: how many of them others kept busy, on average.
    """

    sm_mhz: list[float] = []
    temp_c: list[float] = []
    power_w: list[float] = []
    energy_j: float | None = None
    throttle: list[str] = []
    held_back_ns: dict[str, int] = {}
    other_processes: int | None = None
    load_1m: list[float] = []
    cores: list[int] = []
    foreign_cores: float | None = None


class Record(Strict, kw_only=True):
    """One process, one case.

    arm: label that tells two uses of one subject apart. round, order: place in the campaign. math: arithmetic path.
    reason: why the status is not ok. samples_ns: phase -> samples in time order -> one entry per rank.
    """

    schema: str = SCHEMA
    run_id: str
    case_id: str
    arm: str
    replicate: int
    round: int
    order: int
    started_at: str
    wall_s: float
    protocol: str
    op: str
    subject: str
    version: str
    precision: str
    math: Math
    mode: Literal["training", "inference"] | None
    pipeline: str | None
    ep: int | None
    imbalance: float | None
    shape: dict[str, int]
    options: dict[str, str | int | float | bool]
    seed: int
    status: Status
    reason: str | None = None
    flags: list[Flag] = []
    check: Check | None = None
    timer: Timer | None = None
    samples_ns: dict[str, list[list[int]]] | None = None
    memory: list[Memory] | None = None
    kernels: list[Kernels] | None = None
    counters: list[Counters] | None = None
    capacity: Capacity | None = None
    work: Work | None = None
    conditions: list[Conditions] | None = None
    log_tail: str = ""

    def __post_init__(self) -> None:
        timed = self.status in ("ok", "timer_error")
        if (self.samples_ns is not None) != timed:
            raise ValueError(f"status {self.status!r} contradicts samples_ns: only ok and timer_error carry samples")
        if self.status == "ok" and not (self.check and self.check.passed):
            raise ValueError("status 'ok' without a passed check: a speed counts only after a right answer")
        if self.status == "wrong_result" and (self.check is None or self.check.passed):
            raise ValueError("status 'wrong_result' needs a failed check")
        if (self.reason is None) != (self.status == "ok"):
            raise ValueError(f"status {self.status!r} contradicts reason {self.reason!r}: ok has none, the rest need one")
        if self.samples_ns is not None:
            self._check_samples()

    def _check_samples(self) -> None:
        assert self.samples_ns is not None
        if self.timer is None or not self.samples_ns or not all(self.samples_ns.values()):
            raise ValueError("samples_ns without a timer or without samples")
        every = list(chain.from_iterable(self.samples_ns.values()))
        if len(set(map(len, every))) != 1:
            raise ValueError("samples_ns: every sample needs one entry per rank")
        least = min(map(min, every))
        if self.status == "ok" and least <= 0:
            raise ValueError(f"samples_ns holds {least}: zero or negative time is status 'timer_error'")

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Identity within a run, for resuming."""
        return (self.case_id, self.subject, self.version, self.arm, self.replicate)

    def iteration_ns(self, phase: str) -> float | None:
        """Return the process's one number: the median over samples of the slowest rank, per iteration; None without it."""
        if self.status != "ok" or not self.samples_ns or phase not in self.samples_ns or not self.timer:
            return None
        return median(map(max, self.samples_ns[phase])) / self.timer.inner
