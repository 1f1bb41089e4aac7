"""The mxfp8 layer of one rank with both projections in one persistent launch: W2 trails W13 by two windows of blocks.

Programs draw tickets from one counter. A step of the schedule folds the blocks of the window before, projects up those of its
own, and down those of the window before that; so work waits only for work of earlier tickets, which somebody has begun, and
cannot wait for ever, however few programs run at once. Progress goes through counters in device memory: stores, a barrier of
the program, an add with release; on the other side a read with acquire, a barrier, and a fence between what was stored and
what the tensor-memory accelerator will read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.moe.combine import combine, gather
from pmlkit.moe.config import INTERPRETED
from pmlkit.moe.folded import product_tile_of, up_tile_of
from pmlkit.moe.formats import MXFP8_BLOCK, Folded
from pmlkit.moe.grouped import Tile, described
from pmlkit.moe.launch import launch, processors
from pmlkit.moe.quantise import power, quantise_folded, to_e4m3
from pmlkit.moe.routing import LOST, Routing
from pmlkit.moe.swiglu import SwiGLU

WINDOW = 16  # blocks that take turns with one tile of weights, as in the table of blocks


def mega_tile(block: int) -> Tile:
    """Return the tile of both projections: BN counts columns of gate, as many of up, and half of those of the output."""
    return Tile(128, 128, 128, 8, 3) if block == 128 else Tile(block, 64, 128, 4, 3)


def forward(
    x_TD: Tensor, scores_TK: Tensor, w13: Folded, w2: Folded, routing: Routing, activation: SwiGLU, promote: bool = False
) -> Tensor:
    """Return the layer's output [T, D] in bf16: the bits of `staged.forward` where its tiles add up in the same order."""
    lost = routing.status[LOST.value :]
    x = quantise_folded(x_TD, lost=lost)
    rows_RD = gather(x.values.view(torch.bfloat16), routing).view(torch.float8_e4m3fn)
    rows, width = rows_RD.shape
    F, t = w2.values.shape[2], mega_tile(routing.tile)
    h2 = rows_RD.new_empty(rows, F)
    codes = torch.empty(rows, F // MXFP8_BLOCK, dtype=torch.uint8, device=h2.device)
    blocks = len(routing.blocks_B8)
    # Largest codes of rows, counters of blocks (projected up, folded) and the tickets: zero at the start of every launch.
    zeros = torch.zeros(rows + 2 * blocks + 1, dtype=torch.int32, device=h2.device)
    top_R, done, folded, ticket = zeros.split([rows, blocks, blocks, 1])
    scale, out = torch.empty(rows, dtype=torch.float32, device=h2.device), x_TD.new_empty(rows, width)
    launch(
        _mega_kernel, (processors(out),),
        described(rows_RD, [t.BM, t.BK]), described(w13.values.view(len(w13.values), 2, F, width), [1, 2, t.BN, t.BK]),
        described(h2, [t.BM, t.BK]), described(w2.values, [1, 2 * t.BN, t.BK]), x.scale, w13.scale, w2.scale,
        h2, codes, top_R, scale, out, routing.source_R, routing.blocks_B8, routing.count, done, folded, ticket, lost,
        F, width, *activation.numbers, activation.limit is not None, promote, not INTERPRETED, WINDOW, t.BM, t.BN, t.BK,
        **t.options,
    )  # fmt: skip
    return combine(out, routing, scores_TK)


@triton.jit
def _wait(counter_ptr, target, FENCE: tl.constexpr):
    """Wait until a counter has reached its target, and make what was stored before visible to descriptors."""
    seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    while seen < target:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()
    if FENCE:
        tl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def _announce(counter_ptr):
    """Count one item up once all threads of this program have stored."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def _fold_block(values_ptr, codes_ptr, top_ptr, scale_ptr, lost_ptr, row, end, F, BM: tl.constexpr):
    """Fold the rows of a block, 128 columns at once."""
    rows = row + tl.arange(0, BM)
    there = rows < end
    top, lost = tl.load(top_ptr + rows, mask=there, other=0), tl.zeros([BM], tl.int32)
    base = rows[:, None].to(tl.int64)
    for first in range(0, F, 128):
        at, block = first + tl.arange(0, 128), first // 32 + tl.arange(0, 4)
        place, mask = values_ptr + base * F + at[None, :], there[:, None] & (at < F)[None, :]
        values = tl.load(place, mask=mask, other=0.0).to(tl.float32).reshape(BM, 4, 32)
        known = there[:, None] & (block < F // 32)[None, :]
        code = tl.load(codes_ptr + base * (F // 32) + block[None, :], mask=known, other=0).to(tl.int32)
        bad = (code == 255)[:, :, None]
        exact = values * power(tl.maximum(tl.minimum(code - top[:, None], 0), -126))[:, :, None]
        folded = to_e4m3(exact, bad)
        lost += tl.sum(tl.sum(((folded.to(tl.float32) != exact) & (bad == 0)).to(tl.int32), 2), 1)
        tl.store(place, folded.reshape(BM, 128), mask=mask)
    tl.store(scale_ptr + rows, power(top - 127), mask=there)
    total = tl.sum(lost, 0)
    tl.atomic_add(lost_ptr, total, mask=total > 0, sem="relaxed")


@triton.jit
def _mega_kernel(
    x, w13, h2, w2, x_scale_ptr, w13_scale_ptr, w2_scale_ptr, h2_ptr, codes_ptr, top_ptr, scale_ptr, out_ptr,
    source_ptr, blocks_ptr, count_ptr, done_ptr, folded_ptr, ticket_ptr, lost_ptr, F, D, alpha, limit,
    CLAMPED: tl.constexpr, PROMOTE: tl.constexpr, FENCE: tl.constexpr, WINDOW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    blocks, ups, downs = tl.load(count_ptr), tl.cdiv(F, BN), tl.cdiv(D, 2 * BN)
    a_step = WINDOW * (1 + ups + downs)
    tickets = (tl.cdiv(blocks, WINDOW) + 2) * a_step
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    while ticket < tickets:
        step, item = ticket // a_step, ticket % a_step
        turn, column = item % WINDOW, item // WINDOW - 1  # column -1 is the fold
        behind = tl.where(column < 0, 1, tl.where(column < ups, 0, 2))
        block = (step - behind) * WINDOW + turn
        if (block >= 0) & (block < blocks):
            own = blocks_ptr + block * 8
            expert, row, end = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4)
            if column < 0:
                _wait(done_ptr + block, ups, False)
                _fold_block(h2_ptr, codes_ptr, top_ptr, scale_ptr, lost_ptr, row, end, F, BM)
                _announce(folded_ptr + block)
            elif column < ups:
                up_tile_of(
                    x, w13, x_scale_ptr, w13_scale_ptr, h2_ptr, h2_ptr, codes_ptr, top_ptr, source_ptr,
                    expert, row, end, column, F, D, alpha, limit, CLAMPED, PROMOTE, False, BM, BN, BK,
                )  # fmt: skip
                _announce(done_ptr + block)
            else:
                _wait(folded_ptr + block, 1, FENCE)
                product_tile_of(
                    h2, w2, scale_ptr, w2_scale_ptr, out_ptr, expert, row, end, column - ups, D, F, PROMOTE, BM, 2 * BN, BK
                )
        ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
