"""A published record: somebody else's figure, as released, with what is needed to compare it."""

from pathlib import Path

from pmlkit.errors import PmlkitError, nearest
from pmlkit.jsonl import Lines, read_lines
from pmlkit.paths import data
from pmlkit.record import Status, Strict
from pmlkit.work import Work

# Schema history: 1 = first version.
SCHEMA = "pmlkit.published/1"


class Printed(Strict, kw_only=True):
    """A printed number: its value and half the unit of its last printed digit."""

    value: float
    half_width: float


class LossValues(Strict, kw_only=True):
    """A row of a loss table. `total_ms` is the mean of the processes, low and high their range. Null where not ok."""

    total_ms: Printed | None
    forward_ms: Printed | None
    backward_ms: Printed | None
    low_ms: Printed | None
    high_ms: Printed | None
    peak_mib: Printed | None


class MoeValues(Strict, kw_only=True):
    """A case of a mixture-of-experts report, every value as published.

    windows_ms: per phase (`forward`, `backward`, `layer`), the maximum rank of each window in time order.
    forward_ms, backward_ms, layer_ms: the published medians. receive_rows, saved_bytes: one entry per rank.
    """

    windows_ms: dict[str, list[float]]
    forward_ms: float
    backward_ms: float | None
    layer_ms: float
    receive_rows: list[int]
    capacity_rows: int
    slot_bytes: int
    scratch_bytes: int
    arena_bytes: int
    input_bytes: int
    host_scratch_bytes: int
    saved_bytes: list[int]
    recompute: list[bool]
    allocated_peak_gib: float
    reserved_peak_gib: float
    nvlink_tx_gbps: float
    nvlink_rx_gbps: float
    nvlink_max_tx_gbps: float
    nvlink_max_rx_gbps: float
    analytical_hbm_gbps: float
    useful_tflops: float
    payload_bytes_rank0: int
    flops_per_payload_byte_rank0: float | None
    numerical_accepted: bool
    graph_accepted: bool
    allocation_retries: int
    ooms: int


class PublishedRecord(Strict, kw_only=True):
    """One row of a published source.

    row: the row's identifier in the source. version: technical identifier, display_name: what the source prints.
    printed: the strings as printed, by column. Exactly one of `loss` and `moe` is set.
    """

    schema: str = SCHEMA
    source: str
    file: str
    row: str
    url: str | None
    retrieved: str | None
    gpu: str
    op: str
    subject: str | None
    version: str | None
    display_name: str | None
    mode: str | None
    precision: str
    pipeline: str | None
    ep: int | None
    imbalance: float | None
    category: str | None
    shape: dict[str, int]
    environment: dict[str, str]
    status: Status
    printed: dict[str, str]
    loss: LossValues | None
    moe: MoeValues | None
    work: Work

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.moe is None):
            raise ValueError(f"row {self.row!r}: exactly one of loss and moe must be set")
        # A MoE source reports figures beside its acceptance flags: a refused case keeps them, its status tells.
        if self.loss is not None and (self.status == "ok") != (self.loss.total_ms is not None):
            raise ValueError(f"row {self.row!r}: status {self.status!r} contradicts its values")


def published_file(source: str) -> Path:
    """Return the committed records of a source. Raises PmlkitError for an unknown source."""
    path = data() / "published" / f"{source}.jsonl"
    if not path.is_file():
        known = [p.stem for p in sorted(path.parent.glob("*.jsonl"))]
        raise PmlkitError(f"unknown published source {source!r} in data/published: {nearest(source, known)}")
    return path


def read_published(source: str) -> Lines[PublishedRecord]:
    """Read the records of a published source; bad lines come back as problems."""
    return read_lines(published_file(source), PublishedRecord, SCHEMA)
