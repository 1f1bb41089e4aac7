"""Block-scaled number formats in plain torch: what the kernels must reproduce bit by bit, and what they decode to.

mxfp8: E4M3 values; 32 share a scale 2^k, the smallest power of two >= amax/448, stored as k + 127 (E8M0). nvfp4: E2M1
values, two in a byte, the first in the low half; 16 share an E4M3 scale, and a row or an expert a float32 maximum. A block
with NaN or Inf gets its scale's NaN code and comes back as NaN; other blocks do not notice.
Rules: OCP Microscaling Formats 1.0 and the published GB300 system.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError

NAN_SCALE = 255  # E8M0
NAN_E4M3 = 0x7F
E4M3_MOST, E2M1_MOST = 448.0, 6.0
LEAST_AMAX = 1e-8  # nvfp4: a row or an expert of zeros has this maximum
LEAST_SCALE = 2.0**-9  # nvfp4: the smallest positive E4M3 number
MXFP8_BLOCK, NVFP4_BLOCK = 32, 16


@dataclass(frozen=True, eq=False)
class MXFP8:
    """values: float8_e4m3fn [..., R, C]. codes: uint8 E8M0, [..., R/a, C/b] for blocks of a rows by b columns."""

    values: Tensor
    codes: Tensor


@dataclass(frozen=True, eq=False)
class Folded:
    """mxfp8 whose block scales went into its values. values: float8_e4m3fn [..., R, C]. scale: float32 [..., R].

    lost: how many values that took digits from, a number on the device.
    """

    values: Tensor
    scale: Tensor
    lost: Tensor


@dataclass(frozen=True, eq=False)
class NVFP4:
    """values: uint8 [..., R, C/2]. scales: float8_e4m3fn [..., R, C/16]. amax: float32, of each row or of each expert."""

    values: Tensor
    scales: Tensor
    amax: Tensor


def mxfp8(x: Tensor, block: tuple[int, int] = (1, MXFP8_BLOCK)) -> MXFP8:
    """Quantise [..., R, C] of any float type in blocks: (1, 32) along rows, (32, 1) along columns, (32, 32) tiles.

    Raises PmlkitError for sizes that blocks do not divide.
    """
    tiles = _blocks(x.float(), block)
    codes = _codes(tiles.abs().amax((-3, -1)))
    inverse = _power(127 - codes.int())[..., :, None, :, None]
    values = (tiles * inverse).clamp(-E4M3_MOST, E4M3_MOST)
    values = torch.where((codes == NAN_SCALE)[..., :, None, :, None], torch.nan, values)
    return MXFP8(_whole(values).to(torch.float8_e4m3fn), codes)


def from_mxfp8(quantised: MXFP8) -> Tensor:
    """Return what the values stand for, in float32, exactly."""
    a, b = (quantised.values.shape[i] // quantised.codes.shape[i] for i in (-2, -1))
    scale = torch.where(quantised.codes == NAN_SCALE, torch.nan, _power(quantised.codes.int() - 127))
    return _whole(_blocks(quantised.values.float(), (a, b)) * scale[..., :, None, :, None])


def fold(quantised: MXFP8) -> Folded:
    """Return row-blocked mxfp8 as E4M3 values with one scale a row, the largest of its blocks' scales.

    Multiplying by a power of two loses digits only of values that become subnormal. A NaN block becomes NaN values.
    """
    codes = quantised.codes.int()
    known = torch.where(codes == NAN_SCALE, 0, codes)
    top = known.amax(-1, keepdim=True)
    shift = _power((known - top).clamp(min=-126))[..., :, None, :, None]
    exact = _whole(_blocks(quantised.values.float(), (1, MXFP8_BLOCK)) * shift)
    values = exact.to(torch.float8_e4m3fn)
    lost = ((values.float() != exact) & ~exact.isnan()).sum(dtype=torch.int32)
    return Folded(values, _power(top[..., 0] - 127), lost)


def from_folded(folded: Folded) -> Tensor:
    """Return what the values stand for, in float32, exactly."""
    return folded.values.float() * folded.scale[..., None]


def nvfp4(x: Tensor, amax: Tensor | None = None, no_clip: bool = False) -> NVFP4:
    """Quantise [..., R, C] of any float type along rows.

    amax: float32 [..., R] or [..., 1], the maximum that rows share, from `largest`; each row's own without it. no_clip:
    where rounding made a scale too small for its block's largest value, take the next one.
    Raises PmlkitError for rows that 16 does not divide.
    """
    tiles = _blocks(x.float(), (1, NVFP4_BLOCK))[..., 0, :, :]
    amax = largest(x) if amax is None else amax
    whole = torch.full_like(amax, E4M3_MOST * E2M1_MOST) / amax  # a number over a tensor is rounded twice
    block = tiles.abs().amax(-1)
    wanted = block * whole[..., None]
    scales = (wanted / E2M1_MOST).clamp(LEAST_SCALE, E4M3_MOST).to(torch.float8_e4m3fn)
    if no_clip:
        short = (scales.float() * E2M1_MOST < wanted) & (scales.float() < E4M3_MOST)
        scales = (scales.view(torch.uint8) + short).view(torch.float8_e4m3fn)
    bad = ~block.isfinite()
    nibbles = _e2m1((tiles * whole[..., None, None]) / scales.float()[..., None])
    nibbles = torch.where(bad[..., None], 0, nibbles).flatten(-2).unflatten(-1, (-1, 2))
    scales = torch.where(bad, NAN_E4M3, scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    return NVFP4(nibbles[..., 0] | nibbles[..., 1] << 4, scales, amax.expand(x.shape[:-1]).contiguous())


def largest(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of each row in float32, at least 1e-8."""
    return torch.where(x.isfinite(), x, 0).float().abs().amax(-1).clamp(min=LEAST_AMAX)


def from_nvfp4(quantised: NVFP4) -> Tensor:
    """Return what the values stand for, in float32: value times block scale (exact), times amax/2688."""
    halves = torch.stack((quantised.values & 15, quantised.values >> 4), -1).flatten(-2).int()
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=halves.device)
    signed = torch.where(halves >= 8, -grid[halves % 8], grid[halves % 8])
    blocks = signed.unflatten(-1, (-1, NVFP4_BLOCK)) * quantised.scales.float()[..., None]
    return blocks.flatten(-2) * (quantised.amax / (E4M3_MOST * E2M1_MOST))[..., None]


def _e2m1(x: Tensor) -> Tensor:
    """Return the nibbles of E2M1 numbers nearest to x, ties to even, saturated at 6."""
    size = x.abs()
    up = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    code = sum((size >= edge if even else size > edge).to(torch.uint8) for edge, even in up)
    return code | x.signbit().to(torch.uint8) << 3


def _codes(amax: Tensor) -> Tensor:
    """Return E8M0 codes of maxima in float32, from their bits: a logarithm is wrong near 1.75 times a power of two."""
    bits = amax.view(torch.int32)
    code = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(min=0)
    return torch.where(amax.isfinite(), code, NAN_SCALE).to(torch.uint8)


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float32, subnormal numbers included."""
    subnormal = torch.ones_like(exponent) << (exponent + 149).clamp(0, 22)
    return torch.where(exponent > -127, exponent + 127 << 23, subnormal).view(torch.float32)


def _blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return [..., R, C] as [..., R/a, a, C/b, b]."""
    if x.shape[-2] % block[0] or x.shape[-1] % block[1]:
        raise PmlkitError(f"cannot cut {tuple(x.shape)} into blocks of {block[0]} x {block[1]}: pad with zeros first")
    return x.unflatten(-2, (-1, block[0])).unflatten(-1, (-1, block[1]))


def _whole(tiles: Tensor) -> Tensor:
    return tiles.flatten(-2).flatten(-3, -2)
