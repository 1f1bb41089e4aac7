"""Grouped products of nvfp4 weights, decoded in registers to bf16, with nvfp4 rows, decoded as they are made: `decode-bf16`.

Every E2M1 value times an E4M3 scale is a bf16 number, so that products are those of the format and only sums are rounded.
Weights are the left operand: rows, of which an expert may have few, then fill columns of a tensor core's tile.

A byte of weights holds columns 2i and 2i + 1. So rows are kept in chunks of 128 columns, the 64 even ones first: the low
halves of 64 bytes then meet one run of 64 columns, the high halves the next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.moe.formats import NVFP4
from pmlkit.moe.grouped import Tile, described, tile_of
from pmlkit.moe.launch import launch, processors
from pmlkit.moe.quantise import nvfp4_parts
from pmlkit.moe.routing import Routing
from pmlkit.moe.swiglu import SwiGLU, swiglu

CHUNK = 128
_SHIFT = tl.constexpr(2.0**118)  # of 2^126 between E2M1's bits in a bf16 number and its value: more would overflow
_REST = tl.constexpr(2.0**8 / (448.0 * 6.0))


def decoded_tile(block: int) -> Tile:
    """Return the tile: BM rows of weights by BN rows of tokens, as many as the table of blocks has."""
    return Tile(128, block, CHUNK, 8 if block >= 128 else 4, 3)


def by_chunk(scales: Tensor) -> Tensor:
    """Return block scales [E, N, C/16] as the product reads them: [E, chunks, N, 8], zero where there are no columns."""
    experts, rows, blocks = scales.shape
    chunks = -(-blocks * 16 // CHUNK)
    padded = scales.view(torch.uint8).new_zeros(experts, rows, chunks * 8)
    padded[..., :blocks] = scales.view(torch.uint8)
    return padded.view(experts, rows, chunks, 8).transpose(1, 2).contiguous()


def decoded_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [T, D] in nvfp4 and decoded, in chunks, bf16 [T, chunks * 128], and their maxima, float32 [T]."""
    return _rows(x_TD, x_TD, x_TD.shape[1], SwiGLU(), False)


def activated_rows(h1_RN: Tensor, routing: Routing, activation: SwiGLU) -> tuple[Tensor, Tensor]:
    """Return the activation of gate and up [R, 2F] in nvfp4 and decoded, in chunks, bf16, and its maxima, float32 [R]."""
    return _rows(h1_RN, routing.offsets_E1[-1:], h1_RN.shape[1] // 2, activation, True)


def _rows(x: Tensor, count: Tensor, width: int, activation: SwiGLU, activated: bool) -> tuple[Tensor, Tensor]:
    padded = -(-width // CHUNK) * CHUNK
    out = x.new_empty(len(x), padded)
    amax = torch.empty(len(x), dtype=torch.float32, device=x.device)
    blocks = triton.next_power_of_2(padded // 16)
    launch(
        _rows_kernel, (len(x),), x, count, out, amax, width, padded, *activation.numbers,
        activated, activation.limit is not None, blocks, num_warps=8 if blocks > 64 else 4,
    )  # fmt: skip
    return out, amax


def project(rows_RC: Tensor, amax: Tensor, amax_of: Tensor | None, weights: NVFP4, routing: Routing) -> Tensor:
    """Return decoded rows [R, chunks * 128] times their expert's weights [E, N, C], bf16 [R, N].

    amax: maxima of rows, or of tokens where `amax_of` names the token of each row. weights: scales as `by_chunk`, amax of
    each expert.
    """
    N, t = weights.values.shape[1], decoded_tile(routing.tile)
    out_RN = rows_RC.new_empty(len(rows_RC), N)
    launch(
        _product_kernel, (processors(out_RN),),
        described(rows_RC, [t.BN, t.BK // 2]), described(weights.values, [1, t.BM, t.BK // 2]), weights.scales, weights.amax,
        amax, amax if amax_of is None else amax_of, out_RN, routing.blocks_B8, routing.count, N, rows_RC.shape[1],
        amax_of is not None, t.BM, t.BN, **t.options,
    )  # fmt: skip
    return out_RN


@triton.jit
def _rows_kernel(
    x_ptr, count_ptr, out_ptr, amax_ptr, D, W, alpha, limit,
    ACTIVATED: tl.constexpr, CLAMPED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)[:, None] * 16 + tl.arange(0, 16)[None, :]
    if ACTIVATED:
        mask = (at < D) & (row < tl.load(count_ptr))
        gate = tl.load(x_ptr + row * 2 * D + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * D + D + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, swiglu(gate, up, alpha, limit, CLAMPED), 0.0)
    else:
        x = tl.load(x_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    codes, scale, bad, amax = nvfp4_parts(x, 0.0, False)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(amax_ptr + row, amax)
    sizes = ((codes & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    values = tl.where(codes >= 8, -sizes, sizes) * scale.to(tl.float32)[:, None]
    values = tl.where(bad[:, None], float("nan"), values).to(tl.bfloat16)
    values = values.reshape(BLOCKS // 8, 64, 2).permute(0, 2, 1).reshape(BLOCKS // 8, 128)
    place = tl.arange(0, BLOCKS // 8)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out_ptr + row * W + place, values, mask=place < W)


@triton.jit
def _decoded(nibbles, scales, BM: tl.constexpr):
    """Return E2M1 numbers [BM, 64] times their blocks' scales [BM, 8], over 2^8, in bf16, exactly."""
    bits = ((nibbles & 7) << 6) | ((nibbles & 8) << 12)
    values = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True).reshape(BM, 8, 8)
    return (values * scales[:, :, None]).reshape(BM, 64)


@triton.jit
def _product_kernel(
    x, w, scale_ptr, w_amax_ptr, amax_ptr, source_ptr, out_ptr, blocks_ptr, count_ptr, N, C,
    GATHERED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BM)
    for tile in tl.range(tl.program_id(0), tl.load(count_ptr) * columns, tl.num_programs(0), flatten=True):
        expert, row, end, column = tile_of(tile, columns, blocks_ptr)  # pyright: ignore[reportGeneralTypeIssues]
        at = column * BM + tl.arange(0, BM)
        sums = tl.zeros([BM, BN], tl.float32)
        base = scale_ptr + expert.to(tl.int64) * (C // 128) * N * 8 + at[:, None] * 8 + tl.arange(0, 8)[None, :]
        for k in range(0, C, 128):
            packed = w.load([expert, column * BM, k // 2]).reshape(BM, 64).to(tl.uint16)
            codes = tl.load(base + (k // 128) * N * 8, mask=(at < N)[:, None], other=0)
            scales = (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * _SHIFT).to(tl.bfloat16)
            sums = tl.dot(_decoded(packed & 15, scales, BM), x.load([row, k]).T, sums)
            sums = tl.dot(_decoded(packed >> 4, scales, BM), x.load([row, k + 64]).T, sums)
        rows = row + tl.arange(0, BN)
        there = rows < end
        source = tl.load(source_ptr + rows, mask=there, other=0) if GATHERED else rows
        factor = tl.load(amax_ptr + source, mask=there, other=0.0) / (448.0 * 6.0)
        value = sums * (factor * (tl.load(w_amax_ptr + expert) * _REST))[None, :]
        place = out_ptr + rows[None, :].to(tl.int64) * N + at[:, None]
        tl.store(place, value.to(tl.bfloat16), mask=there[None, :] & (at < N)[:, None])
