"""Grouped products of mxfp8 operands at the rate of an fp8 tensor core that knows no block scales (Hopper): `folded-fp8`.

Block scales are powers of two, so they go into the values (`formats.fold`); what is left is one scale a row of either
operand, applied to the float32 sum. Between the projections h2 is quantised tile by tile; only when a row is whole is its
largest block scale known, so that `fold_rows` follows.

promote: whether the tensor core's sum, of about 14 digits, is added to a float32 one after every 128 products; else once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.moe.formats import MXFP8, MXFP8_BLOCK, Folded
from pmlkit.moe.grouped import Tile, described, halves, tile_of
from pmlkit.moe.launch import launch, processors
from pmlkit.moe.quantise import e8m0_codes, magnitude_bits, power, to_e4m3
from pmlkit.moe.routing import Routing
from pmlkit.moe.swiglu import SwiGLU, swiglu


def up_tile(block: int) -> Tile:
    """Return the tile of the first projection: BN counts columns of gate, and as many of up."""
    return Tile(128, 128, 128, 8, 3) if block == 128 else Tile(block, 64, 128, 4, 4)


def down_tile(block: int) -> Tile:
    """Return the tile of the second projection."""
    return Tile(128, 256, 128, 8, 3) if block == 128 else Tile(block, 128, 128, 4, 4)


def project_up(
    rows_RD: Tensor, x_scale_T: Tensor, w13: Folded, routing: Routing, activation: SwiGLU, promote: bool, keep: bool = False
) -> tuple[MXFP8, Tensor, Tensor | None]:
    """Return h2 [R, F] in mxfp8, the largest scale code of each row, int32, and h1 [R, 2F] in bf16 if it is to be kept.

    rows_RD: [R, D] folded values of each row's token; x_scale_T: scale of each token; w13: [E, 2F, D]. h1 is rounded to
    bf16 before the activation; h2 is quantised from float32.
    """
    rows, width = rows_RD.shape
    F, t = w13.values.shape[1] // 2, up_tile(routing.tile)
    h2, codes = rows_RD.new_empty(rows, F), routing.count.new_empty(rows, F // MXFP8_BLOCK, dtype=torch.uint8)
    top_R = torch.zeros(rows, dtype=torch.int32, device=h2.device)
    h1 = torch.empty(rows, 2 * F, dtype=torch.bfloat16, device=h2.device) if keep else None
    by_half = w13.values.view(len(w13.values), 2, F, width)
    launch(
        _up_kernel, (processors(h2),),
        described(rows_RD, [t.BM, t.BK]), described(by_half, [1, 2, t.BN, t.BK]), x_scale_T, w13.scale,
        codes if h1 is None else h1, h2, codes, top_R,
        routing.source_R, routing.blocks_B8, routing.count, F, width, *activation.numbers,
        activation.limit is not None, promote, keep, t.BM, t.BN, t.BK, **t.options,
    )  # fmt: skip
    return MXFP8(h2, codes), top_R, h1


def fold_rows(h2: MXFP8, top_R: Tensor, routing: Routing, lost: Tensor) -> Folded:
    """Fold rows [R, F] in place, given each row's largest code; adds to `lost`, int32 [1]."""
    rows, width = h2.values.shape
    scale = torch.empty(rows, dtype=torch.float32, device=top_R.device)
    blocks = triton.next_power_of_2(-(-width // MXFP8_BLOCK))
    launch(_fold_kernel, (rows,), h2.values, h2.codes, top_R, scale, lost, routing.offsets_E1[-1:], width, blocks, num_warps=4)
    return Folded(h2.values, scale, lost)


def project(h2: Folded, w2: Folded, routing: Routing, promote: bool) -> Tensor:
    """Return rows [R, C] times their expert's weights [E, N, C], bf16 [R, N]."""
    rows, width = h2.values.shape
    N, t = w2.values.shape[1], down_tile(routing.tile)
    out_RN = torch.empty(rows, N, dtype=torch.bfloat16, device=h2.values.device)
    launch(
        _product_kernel, (processors(out_RN),),
        described(h2.values, [t.BM, t.BK]), described(w2.values, [1, t.BN, t.BK]), h2.scale, w2.scale, out_RN,
        routing.blocks_B8, routing.count, N, width, promote, t.BM, t.BN, t.BK, **t.options,
    )  # fmt: skip
    return out_RN


@triton.jit
def up_tile_of(
    x, w, x_scale_ptr, w_scale_ptr, h1_ptr, h2_ptr, codes_ptr, top_ptr, source_ptr,
    expert, row, end, column, F, D, alpha, limit,
    CLAMPED: tl.constexpr, PROMOTE: tl.constexpr, KEEP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write a tile of h2 in mxfp8 with its scale codes, raise its rows' largest codes, and keep h1 where wanted."""
    sums = tl.zeros([BM, 2 * BN], tl.float32)
    for k in range(0, D, BK):
        weights = w.load([expert, 0, column * BN, k]).reshape(2 * BN, BK)
        sums = tl.dot(x.load([row, k]), weights.T, sums, max_num_imprecise_acc=BK if PROMOTE else None)
    rows, at = row + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    there = rows < end
    source = tl.load(source_ptr + rows, mask=there, other=0)
    x_scale = tl.load(x_scale_ptr + source, mask=there, other=0.0)[:, None]
    place = w_scale_ptr + expert * 2 * F + at
    gate, up = halves(sums)  # pyright: ignore[reportGeneralTypeIssues]
    gate *= x_scale * tl.load(place, mask=at < F, other=0.0)[None, :]
    up *= x_scale * tl.load(place + F, mask=at < F, other=0.0)[None, :]
    gate, up = gate.to(tl.bfloat16), up.to(tl.bfloat16)
    mask = there[:, None] & (at < F)[None, :]
    if KEEP:
        place = h1_ptr + rows[:, None].to(tl.int64) * (2 * F) + at[None, :]
        tl.store(place, gate, mask=mask)
        tl.store(place + F, up, mask=mask)
    h2 = swiglu(gate.to(tl.float32), up.to(tl.float32), alpha, limit, CLAMPED).reshape(BM, BN // 32, 32)
    codes = e8m0_codes(tl.max(magnitude_bits(h2), 2))
    values = to_e4m3(h2 * power(tl.maximum(127 - codes, -126))[:, :, None], (codes == 255)[:, :, None])
    tl.store(h2_ptr + rows[:, None].to(tl.int64) * F + at[None, :], values.reshape(BM, BN), mask=mask)
    block = column * (BN // 32) + tl.arange(0, BN // 32)
    mask = there[:, None] & (block < F // 32)[None, :]
    tl.store(codes_ptr + rows[:, None].to(tl.int64) * (F // 32) + block[None, :], codes.to(tl.uint8), mask=mask)
    top = tl.max(tl.where(mask & (codes < 255), codes, 0), 1)
    tl.atomic_max(top_ptr + rows, top, mask=there, sem="relaxed")


@triton.jit
def product_tile_of(
    a, w, a_scale_ptr, w_scale_ptr, out_ptr, expert, row, end, column, N, C,
    PROMOTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write a tile of rows times weights in bf16."""
    sums = tl.zeros([BM, BN], tl.float32)
    for k in range(0, C, BK):
        weights = w.load([expert, column * BN, k]).reshape(BN, BK)
        sums = tl.dot(a.load([row, k]), weights.T, sums, max_num_imprecise_acc=BK if PROMOTE else None)
    rows = row + tl.arange(0, BM)
    a_scale = tl.load(a_scale_ptr + rows, mask=rows < end, other=0.0)[:, None]
    HALF: tl.constexpr = BN // 2
    left, right = halves(sums)  # pyright: ignore[reportGeneralTypeIssues]
    for half in tl.static_range(2):
        at = column * BN + half * HALF + tl.arange(0, HALF)
        mask = (rows < end)[:, None] & (at < N)[None, :]
        scale = a_scale * tl.load(w_scale_ptr + expert * N + at, mask=at < N, other=0.0)[None, :]
        value = ((left if half == 0 else right) * scale).to(tl.bfloat16)
        tl.store(out_ptr + rows[:, None].to(tl.int64) * N + at[None, :], value, mask=mask)


@triton.jit
def _up_kernel(
    x, w, x_scale_ptr, w_scale_ptr, h1_ptr, h2_ptr, codes_ptr, top_ptr, source_ptr, blocks_ptr, count_ptr, F, D, alpha, limit,
    CLAMPED: tl.constexpr, PROMOTE: tl.constexpr, KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(F, BN)
    for tile in tl.range(tl.program_id(0), tl.load(count_ptr) * columns, tl.num_programs(0), flatten=True):
        expert, row, end, column = tile_of(tile, columns, blocks_ptr)  # pyright: ignore[reportGeneralTypeIssues]
        up_tile_of(
            x, w, x_scale_ptr, w_scale_ptr, h1_ptr, h2_ptr, codes_ptr, top_ptr, source_ptr, expert, row, end, column,
            F, D, alpha, limit, CLAMPED, PROMOTE, KEEP, BM, BN, BK,
        )  # fmt: skip


@triton.jit
def _fold_kernel(values_ptr, codes_ptr, top_ptr, scale_ptr, lost_ptr, count_ptr, F, BLOCKS: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    if row < tl.load(count_ptr):
        at = block[:, None] * 32 + tl.arange(0, 32)[None, :]
        place = values_ptr + row * F + at
        values = tl.load(place, mask=at < F, other=0.0)
        codes = tl.load(codes_ptr + row * (F // 32) + block, mask=block < F // 32, other=0).to(tl.int32)
        top, bad = tl.load(top_ptr + row), (codes == 255)[:, None]
        exact = values.to(tl.float32) * power(tl.maximum(tl.minimum(codes - top, 0), -126))[:, None]
        folded = to_e4m3(exact, bad)
        lost = tl.sum(tl.sum(((folded.to(tl.float32) != exact) & (bad == 0)).to(tl.int32), 1), 0)
        tl.store(place, folded, mask=at < F)
        tl.store(scale_ptr + row, power(top - 127))
        tl.atomic_add(lost_ptr, lost, mask=lost > 0, sem="relaxed")


@triton.jit
def _product_kernel(
    a, w, a_scale_ptr, w_scale_ptr, out_ptr, blocks_ptr, count_ptr, N, C,
    PROMOTE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.load(count_ptr) * columns, tl.num_programs(0), flatten=True):
        expert, row, end, column = tile_of(tile, columns, blocks_ptr)  # pyright: ignore[reportGeneralTypeIssues]
        product_tile_of(a, w, a_scale_ptr, w_scale_ptr, out_ptr, expert, row, end, column, N, C, PROMOTE, BM, BN, BK)
