"""Memory plan of one expert layer as the published GB300 report's planner makes it: pure arithmetic, torch-free.

It plans *that* system, byte for byte in the report's 63 cases, and not the kernels of this package.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from pmlkit.errors import PmlkitError
from pmlkit.moe import load, regions
from pmlkit.precision import precision as storage


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The plan of one rank: the request and what follows from it. Built by `plan_memory`, which checks the request.

    device_rows: rows a rank has room for; capacity_rows: the same with the worst padding. slot_bytes: budget of state
    kept for backward. scratch_parts: bytes of each region that every layer reuses, scratch_bytes their sum.
    arena_bytes: slot and scratch. input_bytes: the rank's BF16 input.
    """

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    ep: int
    precision: str
    pipeline: str
    mode: str
    capacity_factor: float = 8.0
    device_rows: int = field(init=False)
    capacity_rows: int = field(init=False)
    input_bytes: int = field(init=False)
    slot_bytes: int = field(init=False)
    scratch_parts: dict[str, int] = field(init=False, hash=False)
    scratch_bytes: int = field(init=False)
    arena_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive what is not given. Written to the dict: a frozen dataclass refuses assignment even here."""
        own = vars(self)
        own["device_rows"] = load.device_rows(self.ep, self.tokens, self.top_k, self.experts, self.capacity_factor)
        own["capacity_rows"] = load.padded_capacity(self.device_rows, self.local_experts, self.tile)
        own["input_bytes"] = regions.dense_bytes(self.tokens * self.hidden)
        own["slot_bytes"] = regions.slot(self) if self.mode == "training" else 0
        own["scratch_parts"] = regions.scratch_regions(self)
        own["scratch_bytes"] = sum(self.scratch_parts.values())
        own["arena_bytes"] = self.slot_bytes + self.scratch_bytes

    @property
    def balanced_rows(self) -> int:
        """Rows that each rank sends, and receives under an equal load."""
        return self.tokens * self.top_k

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ep

    @property
    def reachable_rows(self) -> int:
        """Rows that a rank receives at the very most."""
        return load.row_limit(self.ep, self.tokens, self.top_k, self.experts)

    @property
    def blocked(self) -> bool:
        """Whether operands are stored in a block format."""
        return self.precision in load.BLOCKED

    @property
    def tile(self) -> int:
        """Rows in steps of which an expert is stored."""
        return regions.TILE if self.blocked else 1

    def saved_bytes(self, rows: int) -> int:
        """Return the bytes kept for backward on a rank that received `rows`, nothing recomputed; 0 in inference.

        Raises PmlkitError for rows that cannot be and for more than device_rows, where the published system stops.
        """
        if not 0 <= rows <= self.reachable_rows:
            raise PmlkitError(f"rows {rows} in saved_bytes cannot be on one rank: pass 0 to {self.reachable_rows}")
        if rows > self.device_rows:
            raise PmlkitError(
                f"rows {rows} in saved_bytes: capacity_factor {self.capacity_factor:g} has room for "
                f"{self.device_rows}; plan with a factor of {math.ceil(rows / self.balanced_rows)}"
            )
        stored = load.padded_rows(rows, self.local_experts, self.tile)
        return regions.saved_state(self, stored) if self.mode == "training" else 0

    def recompute(self, rows_per_rank: list[int]) -> list[bool]:
        """Return whether backward recomputes the layer: one bool in training, as the report has it, [] in inference.

        All ranks decide alike, by the rank with most to save. Raises PmlkitError unless each rank has its entry.
        """
        if len(rows_per_rank) != self.ep:
            raise PmlkitError(
                f"rows_per_rank in recompute has {len(rows_per_rank)} entries for {self.ep} ranks: "
                "pass one a rank, as receive_rows returns them"
            )
        saved = max(self.saved_bytes(rows) for rows in rows_per_rank)
        return [saved > self.slot_bytes] if self.mode == "training" else []

    def explain(self) -> str:
        """Return the plan as aligned plain text: rows, every region, what backward keeps, and what is left out."""
        return "\n".join([*_request_lines(self), *_memory_lines(self), *_left_out_lines(self)])


def plan_memory(
    *,
    tokens: int,
    hidden: int,
    width: int,
    experts: int,
    top_k: int,
    ep: int,
    precision: str,
    pipeline: str,
    mode: str,
    capacity_factor: float = 8.0,
) -> MemoryPlan:
    """Return the memory plan of one layer on one of `ep` ranks (any number that divides `experts`).

    tokens: a rank's own tokens; hidden, width: model and expert width; capacity_factor: largest load of a rank over
    the balanced one. Raises PmlkitError for what cannot be planned, naming the value and what to use instead.
    """
    sizes: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "width": width}
    sizes |= {"experts": experts, "top_k": top_k, "ep": ep}
    load.check_sizes("plan_memory", sizes)
    load.check_format("plan_memory", precision, mode, pipeline)
    load.check_blocks("plan_memory", precision, {"hidden": hidden, "width": width})
    if not math.isfinite(capacity_factor) or capacity_factor < 1:
        raise PmlkitError(f"capacity_factor {capacity_factor!r} in plan_memory: pass a finite number of at least 1")
    formats: dict[str, Any] = {"precision": precision, "pipeline": pipeline, "mode": mode}
    return MemoryPlan(**sizes, **formats, capacity_factor=float(capacity_factor))


def _request_lines(plan: MemoryPlan) -> list[str]:
    """Return the head of the account: what was asked for and the rows that follow."""
    stored = load.padded_rows(plan.balanced_rows, plan.local_experts, plan.tile)
    bound = ": all that can reach a rank" if plan.device_rows == plan.reachable_rows else ""
    filled = f"at most: each of {plan.local_experts} experts fills whole tiles of {plan.tile}"
    return [
        "Memory of one expert layer on one rank, as the published GB300 report's planner has it",
        f"  T={plan.tokens} tokens a rank, D={plan.hidden}, F={plan.width}, E={plan.experts} experts, K={plan.top_k}",
        f"  EP={plan.ep}, {plan.local_experts} experts a rank; {plan.precision}, {plan.pipeline}, {plan.mode}",
        "Rows that a rank receives",
        _line("balanced", plan.balanced_rows, f"T·K; {stored:,} with padding"),
        _line("device", plan.device_rows, f"room at capacity factor {plan.capacity_factor:g}{bound}"),
        _line("padding", plan.capacity_rows - plan.device_rows, filled if plan.blocked else "none in bf16"),
        _line("capacity", plan.capacity_rows, "device + padding"),
    ]


def _memory_lines(plan: MemoryPlan) -> list[str]:
    """Return the planned bytes, and what backward keeps against its budget."""
    parts = [_size(name, size) for name, size in plan.scratch_parts.items()]
    lines = ["Scratch in bytes, reused by every layer", *parts, _size("scratch", plan.scratch_bytes, "the sum")]
    lines += ["Planned bytes", _size("slot", plan.slot_bytes, "budget of state kept for backward")]
    lines += [_size("scratch", plan.scratch_bytes), _size("arena", plan.arena_bytes, "slot + scratch")]
    lines += [_size("input", plan.input_bytes, "T·D in BF16")]
    if plan.mode == "inference":
        return [*lines, "Kept for backward", "  nothing in inference, so nothing is recomputed"]
    full = regions.saved_state(plan, plan.capacity_rows)
    kept = {"balance": plan.saved_bytes(plan.balanced_rows), "capacity": full}
    verdict = {True: "more than the slot: recompute", False: "fits the slot: no recompute"}
    saved = [_size(f"saved at {rows}", size, verdict[size > plan.slot_bytes]) for rows, size in kept.items()]
    return [*lines, "Kept for backward, bytes", *saved]


def _left_out_lines(plan: MemoryPlan) -> list[str]:
    """Return what a rank holds besides the plan, with the sizes that follow from the request."""
    routes, weights = plan.balanced_rows * plan.hidden, 3 * plan.local_experts * plan.hidden * plan.width
    tables = 3 if plan.mode == "training" else 2  # pull and push addresses, and those of the backward pass
    copy = int(storage(plan.precision).nbytes(weights))
    return [
        "Not in the plan, bytes",
        _size("symmetric buffers", 2 * regions.dense_bytes(routes), "dispatch and combine, T·K·D BF16 each"),
        _size("pointer tables", tables * 8 * plan.experts * plan.tokens, f"at most: {tables} tables of E·T addresses"),
        _size("weights", regions.dense_bytes(weights), "the caller's, BF16"),
        *([_size("quantised weights", copy, "one copy, with block scales")] if plan.blocked else []),
        "  launch workspaces, and what the CUDA context and the allocator hold: not known beforehand",
    ]


def _size(label: str, size: int, note: str = "") -> str:
    """Return a line of bytes and MiB."""
    return _line(label, size, f"{size / 2**20:>12,.2f} MiB  {note}")


def _line(label: str, amount: int, note: str) -> str:
    """Return one aligned line."""
    return f"  {label:<44}{amount:>18,}  {note}".rstrip()
