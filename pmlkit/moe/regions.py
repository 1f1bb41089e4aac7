"""Bytes of what the published GB300 report's planner stores: operands, scratch regions, saved state. Torch-free.

Two branches have no case in the report: nvfp4 in the staged pipeline, and BF16 training with an expert width of at
least the hidden width. Training scratch is that of a backward pass that recomputes, also where none will.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pmlkit.moe.load import padded_capacity
from pmlkit.precision import precision

if TYPE_CHECKING:
    from pmlkit.moe.memory import MemoryPlan

ALIGN = 128  # bytes: the planner rounds operands of a block format, and the slot, up to this
TILE = 128  # rows: an expert of a block format fills up whole tiles, since scales are stored in atoms of 128 rows
PAGED = 4  # row scales are given four times their size, for the planner's paged layout
GRID = 152  # streaming multiprocessors that the published planner assumes
DESCRIPTORS = 10 * 128  # bytes a multiprocessor: ten tensor-map descriptors of 128 bytes
COUNTER = 4  # bytes: progress is counted in int32


def scratch_regions(plan: MemoryPlan) -> dict[str, int]:
    """Return the bytes of each scratch region by name. They are live together, so scratch is their sum."""
    if plan.blocked:
        return _training(plan) if plan.mode == "training" else _inference(plan)
    rows, hidden, width = plan.capacity_rows, plan.hidden, plan.width
    regions = {"gathered rows": dense_bytes(rows * hidden), "pre-activation": dense_bytes(rows * 2 * width)}
    if plan.mode == "training":
        regions["pre-activation gradient"] = dense_bytes(rows * 2 * width)
    regions["activation"] = dense_bytes(rows * width)
    if plan.mode == "training" and hidden > width:  # narrower gradients fit a region that is already there
        regions["gathered output gradient"] = dense_bytes(rows * hidden)
    return regions


def saved_state(plan: MemoryPlan, rows: int) -> int:
    """Return the bytes kept for a backward pass that recomputes nothing; `rows` received, padding included."""
    inputs = dense_bytes(rows * plan.hidden)
    if plan.blocked:  # kept as column operands, the activation too
        inputs = sum(column_bytes(plan.precision, rows, width) for width in (plan.hidden, plan.width))
    pre_activation = dense_bytes(rows * 2 * plan.width)
    outputs = dense_bytes(plan.balanced_rows * plan.hidden)  # of the routes that the rank sent, for score gradients
    return inputs + pre_activation + outputs


def slot(plan: MemoryPlan) -> int:
    """Return the budget for saved state: the dense input, and the factor times what full saving adds at factor 1."""
    full = saved_state(plan, padded_capacity(plan.balanced_rows, plan.local_experts, plan.tile))
    factor = min(plan.capacity_factor, plan.ep)
    return round_up(plan.input_bytes + math.ceil(factor * (full - plan.input_bytes)))


def row_bytes(key: str, rows: int, width: int) -> int:
    """Return the bytes of a block-scaled row operand (rows, width): values, then paged block scales and row scales."""
    form = precision(key)
    scales = rows * (width // (form.block or 1)) * form.scale_bits // 8
    row_scales = 4 * rows if form.tensor_scale else 0  # nvfp4: one float32 a token
    return round_up(rows * width * form.element_bits // 8) + round_up(PAGED * scales + row_scales)


def column_bytes(key: str, rows: int, width: int) -> int:
    """Return the bytes of a block-scaled column operand (rows, width): values, then scales of blocks along the rows."""
    form = precision(key)
    scales = width * -(-rows // (form.block or 1)) * form.scale_bits // 8
    return round_up(rows * width * form.element_bits // 8) + round_up(scales)


def dense_bytes(values: int) -> int:
    """Return the bytes of `values` in BF16."""
    return int(precision("bf16").nbytes(values))


def round_up(size: int) -> int:
    """Round bytes up to the alignment."""
    return -(-size // ALIGN) * ALIGN


def _row_operands(plan: MemoryPlan) -> int:
    """Return the bytes of the row operands: staged kernels hold one at a time, the fused kernel both."""
    sizes = [row_bytes(plan.precision, plan.capacity_rows, width) for width in (plan.hidden, plan.width)]
    return sum(sizes) if plan.pipeline == "mega" else max(sizes)


def _training(plan: MemoryPlan) -> dict[str, int]:
    """Return the regions of block-scaled training."""
    key, rows, hidden, width = plan.precision, plan.capacity_rows, plan.hidden, plan.width
    return {
        "row operands": max(_row_operands(plan), row_bytes(key, rows, 2 * width)),
        "column operands, input and output gradient": 2 * column_bytes(key, rows, hidden),
        "pre-activation, bf16": dense_bytes(rows * 2 * width),
        "column operand, activation": column_bytes(key, rows, width),
        "activation gradient, bf16": dense_bytes(rows * width),
        "column operand, pre-activation gradient": column_bytes(key, rows, 2 * width),
    }


def _inference(plan: MemoryPlan) -> dict[str, int]:
    """Return the regions of block-scaled inference. What the fused kernel adds is settled by the report's sizes."""
    key, rows, hidden, width = plan.precision, plan.capacity_rows, plan.hidden, plan.width
    regions = {"row operands": _row_operands(plan), "pre-activation, bf16": dense_bytes(rows * 2 * width)}
    if plan.pipeline != "mega":
        return regions
    block = precision(key).block or 1
    counters = 3 * (rows // block) + plan.local_experts * -(-(hidden // block) // 8) + 4
    counters += (counters - 1) % 2  # all but one come in pairs
    return regions | {
        "column tile, input": column_bytes(key, TILE, hidden),
        "column tile, activation": column_bytes(key, TILE, width),
        "progress counters": round_up(COUNTER * counters),
        "tensor maps": GRID * DESCRIPTORS,
        "zero row": dense_bytes(hidden),
    }
