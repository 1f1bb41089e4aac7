"""Grouped matrix products of the bf16 layer: rows of experts against their weights, forward and by rows backward.

One persistent program a multiprocessor. Tiles follow the table of blocks (`Routing.blocks_B8`): blocks of one expert take
turns with one tile of its weights, so that weights come from memory once. Operands come by tensor-memory-access
descriptors, sums are float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pmlkit.moe.launch import launch, processors
from pmlkit.moe.routing import Routing
from pmlkit.moe.swiglu import SwiGLU, swiglu, swiglu_backward


@dataclass(frozen=True)
class Tile:
    """BM rows by BN columns, BK of the contraction at once; BM is that of the table of blocks."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside the arguments."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def up_tile(block: int) -> Tile:
    """Return the tile of the first projection: BN counts columns of gate, and as many of up."""
    return Tile(128, 128, 64, 8, 4) if block == 128 else Tile(block, 64, 64, 4, 4)


def down_tile(block: int) -> Tile:
    """Return the tile of products without an epilogue."""
    return Tile(128, 256, 64, 8, 4) if block == 128 else Tile(block, 128, 64, 4, 4)


def back_tile(block: int) -> Tile:
    """Return the tile of the product whose epilogue is the activation's backward pass."""
    return Tile(128, 256, 64, 8, 4) if block == 128 else Tile(block, 128, 64, 4, 4)


def project_up(x_RD: Tensor, w13: Tensor, routing: Routing, activation: SwiGLU, keep: bool) -> tuple[Tensor | None, Tensor]:
    """Return gate and up [R, 2F], if kept, and their activation [R, F], of rows [R, D] and weights [E, 2F, D]."""
    rows, width = x_RD.shape
    F, t = w13.shape[1] // 2, up_tile(routing.tile)
    h1 = x_RD.new_empty(rows, 2 * F) if keep else None
    h2 = x_RD.new_empty(rows, F)
    by_half = w13.view(len(w13), 2, F, width)
    launch(
        _up_kernel, (processors(x_RD),),
        described(x_RD, [t.BM, t.BK]), described(by_half, [1, 2, t.BN, t.BK]), h2 if h1 is None else h1, h2,
        routing.blocks_B8, routing.count, F, width, *activation.numbers,
        activation.limit is not None, keep, t.BM, t.BN, t.BK, **t.options,
    )  # fmt: skip
    return h1, h2


def project(rows_RC: Tensor, weights: Tensor, routing: Routing, transposed: bool = False) -> Tensor:
    """Return rows [R, C] times their expert's weights [E, N, C], or [E, C, N] where transposed: [R, N]."""
    rows, width = rows_RC.shape
    N, t = weights.shape[2 if transposed else 1], down_tile(routing.tile)
    out_RN = rows_RC.new_empty(rows, N)
    launch(
        _product_kernel, (processors(rows_RC),),
        described(rows_RC, [t.BM, t.BK]), described(weights, [1, t.BK, t.BN] if transposed else [1, t.BN, t.BK]),
        out_RN,
        routing.blocks_B8, routing.count, N, width, transposed, t.BM, t.BN, t.BK, **t.options,
    )  # fmt: skip
    return out_RN


def project_back(
    grad_RD: Tensor, w2: Tensor, h1: Tensor, scores_TK: Tensor, routing: Routing, activation: SwiGLU
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what follows from the gradient of the output at each row [R, D], before scores: through W2 and the activation.

    h1: gate and up [R, 2F]. Returns their gradient [R, 2F]; the activation times the score [R, F], for W2's gradient; and
    parts [R, P] float32 whose sums are the gradients of the scores: row products of W2'g with the activation in bf16.
    """
    rows, width = grad_RD.shape
    F, t = w2.shape[2], back_tile(routing.tile)
    dh1, scored_h2 = torch.empty_like(h1), h1.new_empty(rows, F)
    parts = torch.empty(rows, -(-F // t.BN), dtype=torch.float32, device=h1.device)
    launch(
        _back_kernel, (processors(grad_RD),),
        described(grad_RD, [t.BM, t.BK]), described(w2, [1, t.BK, t.BN]), h1, dh1, scored_h2, parts,
        scores_TK, routing.route_R, routing.blocks_B8, routing.count, F, width, *activation.numbers,
        activation.limit is not None, t.BM, t.BN, t.BK, **t.options,
    )  # fmt: skip
    return dh1, scored_h2, parts


def described(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe a contiguous tensor for loads of blocks."""
    return TensorDescriptor.from_tensor(tensor, block)


@triton.jit
def tile_of(tile, columns, blocks_ptr):
    """Return expert, first row, end of the expert's rows and column block of a tile."""
    any_block = blocks_ptr + tile // columns * 8
    first, size = tl.load(any_block), tl.load(any_block + 1)
    inside = tile - first * columns
    own = blocks_ptr + (first + inside % size) * 8
    return tl.load(own + 2), tl.load(own + 3), tl.load(own + 4), inside // size


@triton.jit
def halves(tile):
    """Return the left and the right half of a tile's columns."""
    HALF: tl.constexpr = tile.shape[1] // 2
    return tl.split(tile.reshape(tile.shape[0], 2, HALF).permute(0, 2, 1))


@triton.jit
def _up_kernel(
    x, w, h1_ptr, h2_ptr, blocks_ptr, count_ptr, F, D, alpha, limit,
    CLAMPED: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(F, BN)
    for tile in tl.range(tl.program_id(0), tl.load(count_ptr) * columns, tl.num_programs(0), flatten=True):
        expert, row, end, column = tile_of(tile, columns, blocks_ptr)  # pyright: ignore[reportGeneralTypeIssues]
        sums = tl.zeros([BM, 2 * BN], tl.float32)
        for k in range(0, D, BK):
            weights = w.load([expert, 0, column * BN, k]).reshape(2 * BN, BK)
            sums = tl.dot(x.load([row, k]), weights.T, sums)
        gate, up = halves(sums)
        gate, up = gate.to(tl.bfloat16), up.to(tl.bfloat16)
        rows, at = row + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        mask = (rows < end)[:, None] & (at < F)[None, :]
        if KEEP:
            place = h1_ptr + rows[:, None].to(tl.int64) * (2 * F) + at[None, :]
            tl.store(place, gate, mask=mask)
            tl.store(place + F, up, mask=mask)
        h2 = swiglu(gate.to(tl.float32), up.to(tl.float32), alpha, limit, CLAMPED)
        tl.store(h2_ptr + rows[:, None].to(tl.int64) * F + at[None, :], h2.to(tl.bfloat16), mask=mask)


@triton.jit
def _product_kernel(
    a, w, out_ptr, blocks_ptr, count_ptr, N, C,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.load(count_ptr) * columns, tl.num_programs(0), flatten=True):
        expert, row, end, column = tile_of(tile, columns, blocks_ptr)  # pyright: ignore[reportGeneralTypeIssues]
        sums = tl.zeros([BM, BN], tl.float32)
        for k in range(0, C, BK):
            if TRANSPOSED:
                weights = w.load([expert, k, column * BN]).reshape(BK, BN)
            else:
                weights = w.load([expert, column * BN, k]).reshape(BN, BK).T
            sums = tl.dot(a.load([row, k]), weights, sums)
        rows = row + tl.arange(0, BM)
        HALF: tl.constexpr = BN // 2  # the whole tile at once spills 140 registers
        left, right = halves(sums)
        for half in tl.static_range(2):
            at = column * BN + half * HALF + tl.arange(0, HALF)
            mask = (rows < end)[:, None] & (at < N)[None, :]
            value = (left if half == 0 else right).to(tl.bfloat16)
            tl.store(out_ptr + rows[:, None].to(tl.int64) * N + at[None, :], value, mask=mask)


@triton.jit
def _back_kernel(
    g, w, h1_ptr, dh1_ptr, h2_ptr, parts_ptr, score_ptr, route_ptr, blocks_ptr, count_ptr, F, D, alpha, limit,
    CLAMPED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(F, BN)
    for tile in tl.range(tl.program_id(0), tl.load(count_ptr) * columns, tl.num_programs(0), flatten=True):
        expert, row, end, column = tile_of(tile, columns, blocks_ptr)  # pyright: ignore[reportGeneralTypeIssues]
        sums = tl.zeros([BM, BN], tl.float32)
        for k in range(0, D, BK):
            sums = tl.dot(g.load([row, k]), w.load([expert, k, column * BN]).reshape(BK, BN), sums)
        rows = row + tl.arange(0, BM)
        route = tl.load(route_ptr + rows, mask=rows < end, other=0)
        score = tl.load(score_ptr + route, mask=rows < end, other=0.0)[:, None]
        total = tl.zeros([BM], tl.float32)
        QUARTER: tl.constexpr = BN // 4  # at once the tile, its derivatives and what they come from do not fit registers
        left, right = halves(sums)
        for half in tl.static_range(2):
            first, second = halves(left if half == 0 else right)
            for quarter in tl.static_range(2):
                at = column * BN + (2 * half + quarter) * QUARTER + tl.arange(0, QUARTER)
                mask = (rows < end)[:, None] & (at < F)[None, :]
                place = rows[:, None].to(tl.int64) * (2 * F) + at[None, :]
                part = first if quarter == 0 else second
                gate = tl.load(h1_ptr + place, mask=mask, other=0.0).to(tl.float32)
                up = tl.load(h1_ptr + place + F, mask=mask, other=0.0).to(tl.float32)
                h2, by_gate, by_up = swiglu_backward(gate, up, alpha, limit, CLAMPED)  # pyright: ignore[reportGeneralTypeIssues]
                h2 = h2.to(tl.bfloat16).to(tl.float32)
                total += tl.sum(tl.where(mask, part * h2, 0.0), 1)
                part *= score
                tl.store(dh1_ptr + place, (part * by_gate).to(tl.bfloat16), mask=mask)
                tl.store(dh1_ptr + place + F, (part * by_up).to(tl.bfloat16), mask=mask)
                tl.store(h2_ptr + rows[:, None].to(tl.int64) * F + at[None, :], (h2 * score).to(tl.bfloat16), mask=mask)
        tl.store(parts_ptr + rows.to(tl.int64) * columns + column, total, mask=rows < end)
