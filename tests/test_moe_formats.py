"""Block-scaled formats: the rules in plain torch, and kernels that must agree with them bit by bit."""

import pytest
import torch
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.moe import formats
from pmlkit.moe.quantise import quantise_folded, quantise_mxfp8, quantise_nvfp4
from pmlkit.moe.routing import route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows_of_every_kind(width: int = 192) -> Tensor:
    """Return rows [9, width] in bf16: normal, outliers, zeros, huge, tiny, subnormal, mixed scales, NaN and Inf blocks."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(9, width, generator=rng)
    x[1, ::17] *= 300
    x[2] = 0
    x[3] *= 2.0**120
    x[4] *= 2.0**-120
    x[5] *= 2.0**-134
    x[6] *= torch.logspace(-8, 8, width // 32).repeat_interleave(32)
    x[7, 40], x[8, 3], x[8, 70] = torch.nan, torch.inf, -torch.inf
    return x.bfloat16().to(DEVICE)


def bits(values: Tensor) -> Tensor:
    """Return the bytes of a tensor, so that NaN equals NaN."""
    return values.contiguous().view(torch.uint8)


@pytest.mark.parametrize("power", [-20, 0, 30])
def test_a_scale_is_the_smallest_power_of_two_that_holds_its_block(power: int) -> None:
    """448 times a power of two is its last value; the next float needs twice the scale. 43 % of logarithms get this wrong."""
    last = torch.tensor(448.0 * 2.0**power)
    for largest, code in ((last, power + 127), (torch.nextafter(last, last * 2), power + 128), (last / 2, power + 126)):
        x = torch.zeros(1, 32)
        x[0, 5] = -largest
        quantised = formats.mxfp8(x)
        assert quantised.codes.tolist() == [[code]]
        assert float(formats.from_mxfp8(quantised)[0, 5]) == pytest.approx(-float(largest), rel=2.0**-4)


def test_mxfp8_rounds_each_value_to_the_nearest_of_its_block() -> None:
    """No E4M3 number times the block's scale lies closer than the one that was taken."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    quantised = formats.mxfp8(x)
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite()]
    scale = 2.0 ** (quantised.codes.float() - 127).repeat_interleave(32, 1)
    nearest = (x[..., None] - grid * scale[..., None]).abs().amin(-1)
    assert torch.equal((x - formats.from_mxfp8(quantised)).abs(), nearest)


@pytest.mark.parametrize("block", [(1, 32), (32, 1), (32, 32)])
def test_orientations_share_scales_along_their_blocks(block: tuple[int, int]) -> None:
    """A transposed tensor in transposed blocks has the transposed codes; a NaN poisons its own block only."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    x[33, 50] = torch.nan
    quantised, turned = formats.mxfp8(x, block), formats.mxfp8(x.T, (block[1], block[0]))
    assert quantised.codes.shape == (64 // block[0], 96 // block[1])
    assert torch.equal(quantised.codes, turned.codes.T)
    assert torch.equal(bits(quantised.values), bits(turned.values).T)
    assert int(formats.from_mxfp8(quantised).isnan().sum()) == block[0] * block[1]
    with pytest.raises(PmlkitError, match=r"blocks of .* pad with zeros"):
        formats.mxfp8(x[:, :40], (1, 32))


def test_folding_loses_digits_only_of_what_becomes_subnormal() -> None:
    """Exact for blocks of like magnitude; counted where a row mixes magnitudes; zero blocks do not set the row's scale."""
    like = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    quantised = formats.mxfp8(like)
    folded = formats.fold(quantised)
    wrong = (formats.from_folded(folded) != formats.from_mxfp8(quantised)).sum()
    assert int(folded.lost) == int(wrong) <= 3
    mixed = like.clone()
    mixed[:, 64:] *= 2.0**-16
    quantised = formats.mxfp8(mixed)
    folded = formats.fold(quantised)
    assert int(folded.lost) == int((formats.from_folded(folded) != formats.from_mxfp8(quantised)).sum()) > 150
    tiny = torch.zeros(1, 64)
    tiny[0, 40] = 2.0**-100
    assert float(formats.from_folded(formats.fold(formats.mxfp8(tiny)))[0, 40]) == 2.0**-100


@pytest.mark.parametrize(
    "value, nibble", [(0.25, 0), (0.26, 1), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.1, 7), (-3.5, 14)]
)
def test_nvfp4_ties_go_to_even(value: float, nibble: int) -> None:
    """Where amax is 2688 and the block's largest 6 x 448, scales are 448 and values come in units of 448."""
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 2688.0, value * 448
    quantised = formats.nvfp4(x)
    assert float(quantised.amax) == 2688.0 and float(quantised.scales) == 448.0
    assert int(quantised.values[0, 0]) == 7 | nibble << 4  # the first value is in the low half


def test_nvfp4_scales_round_to_even_and_may_be_raised() -> None:
    """A block whose largest value asks for a scale of 17.9 gets 18; one of 17.1 gets 17 = 16 or, without clipping, 18."""
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16], x[0, 32] = 2688.0, 6 * 17.9, 6 * 16.9
    assert formats.nvfp4(x).scales.float().tolist() == [[448.0, 18.0, 16.0]]
    assert formats.nvfp4(x, no_clip=True).scales.float().tolist() == [[448.0, 18.0, 18.0]]
    assert float(formats.from_nvfp4(formats.nvfp4(torch.zeros(1, 16))).abs().sum()) == 0.0
    shared = formats.nvfp4(x, torch.tensor([5376.0]))
    assert float(shared.amax) == 5376.0 and float(shared.scales[0, 0]) == 224.0


def test_nvfp4_keeps_errors_within_its_grid() -> None:
    """A block's largest value keeps 1 part in 16, others half a step of the grid, which near 6 is a sixth of the largest."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    error = (formats.from_nvfp4(formats.nvfp4(x)) - x).abs().unflatten(1, (-1, 16))
    largest = x.abs().unflatten(1, (-1, 16)).amax(-1, keepdim=True)
    assert float((error / largest).max()) < 1 / 6 + 1 / 16


def test_kernels_write_what_the_rules_say() -> None:
    """Every kind of row, bit by bit, in the three formats that kernels write."""
    x = rows_of_every_kind()
    wanted, found = formats.mxfp8(x), quantise_mxfp8(x)
    assert torch.equal(bits(found.values), bits(wanted.values)) and torch.equal(found.codes, wanted.codes)
    wanted, found = formats.fold(formats.mxfp8(x)), quantise_folded(x)
    assert torch.equal(bits(found.values), bits(wanted.values)) and torch.equal(found.scale, wanted.scale)
    assert int(found.lost) == int(wanted.lost) > 0
    wanted, found = formats.nvfp4(x), quantise_nvfp4(x)
    for kernel, rule in ((found.values, wanted.values), (found.scales, wanted.scales), (found.amax, wanted.amax)):
        assert torch.equal(bits(kernel), bits(rule))
    amax = formats.largest(x).max().expand(9).contiguous()
    wanted, found = formats.nvfp4(x, amax), quantise_nvfp4(x, amax_R=amax)
    assert torch.equal(found.values, wanted.values) and torch.equal(bits(found.scales), bits(wanted.scales))
    some = torch.randn(200, 32, generator=torch.Generator().manual_seed(5)).bfloat16().to(DEVICE)
    assert torch.equal(bits(quantise_nvfp4(some).scales), bits(formats.nvfp4(some).scales))
    with pytest.raises(PmlkitError, match="rows of 40 numbers into blocks of 32"):
        quantise_mxfp8(x[:, :40].contiguous())


def test_kernels_gather_rows_of_experts() -> None:
    """A token's row is quantised at every place that its routes have."""
    x = rows_of_every_kind()[:5]
    ids = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 0], [0, 1]], dtype=torch.int32, device=DEVICE)
    routing = route(ids, 3, tile=64)
    wanted = formats.mxfp8(x[routing.source_R.long()])
    found = quantise_mxfp8(x, routing)
    assert torch.equal(bits(found.values), bits(wanted.values)) and torch.equal(found.codes, wanted.codes)
