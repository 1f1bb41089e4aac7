"""Operands of mxfp8 weight gradients in Triton's interpreter, bit by bit against formats in plain torch."""

import itertools

import pytest
import torch
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.moe import columns, formats
from pmlkit.moe.both_ways import both_ways
from pmlkit.moe.combine import gather
from pmlkit.moe.routing import route
from pmlkit.moe.swiglu import SwiGLU

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes, for the interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
EXPERTS = 4


def crowded() -> Tensor:
    """Return ids [170, 2] that give one expert most rows, and one of them none."""
    rng = torch.Generator().manual_seed(0)
    return torch.where(torch.rand(170, 2, generator=rng) < 0.8, 0, torch.randint(1, 3, (170, 2), generator=rng)).int()


def twin(rows: Tensor, offsets: list[int]) -> list[formats.Folded | None]:
    """Return each expert's rows by columns, in plain torch: padded to 128 with zeros, in blocks of 32 rows, folded."""
    made = []
    for begin, end in itertools.pairwise(offsets):
        own = torch.nn.functional.pad(rows[begin:end], (0, 0, 0, -(end - begin) % 128))
        made.append(formats.fold(formats.mxfp8(own.T.contiguous())) if end > begin else None)
    return made


def same(found: formats.Folded, rows: Tensor, offsets: list[int]) -> None:
    at = 0
    for expert, one in enumerate(twin(rows, offsets)):
        if one is not None:
            width = one.values.shape[1]
            assert torch.equal(found.values[:, at : at + width].view(torch.uint8), one.values.view(torch.uint8))
            assert torch.equal(found.scale[expert], one.scale)
            at += width
    assert at <= found.values.shape[1] == columns.slots(340, EXPERTS)


def test_tokens_by_columns() -> None:
    """Outliers, zeros and a NaN; digits that folding takes are counted."""
    ids = crowded()
    routing = route(ids, EXPERTS, tile=128)
    x = torch.randn(170, 72, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[::9] *= 300
    x[:, 5], x[7, 3] = 0, torch.nan
    rows, offsets, lost = gather(x, routing), routing.offsets_E1.tolist(), torch.zeros(1, dtype=torch.int32)
    assert offsets[1] > 256 and offsets[3] == offsets[4]
    found = columns.token_columns(x, routing, lost)
    same(found, rows.float(), offsets)
    assert int(lost) == sum(int(one.lost) for one in twin(rows.float(), offsets) if one is not None)


@pytest.mark.parametrize("limit", [None, 0.7])
def test_activation_and_its_slope_by_columns(limit: float | None) -> None:
    """As torch's own autograd has them, in float32, up to a step of the format where that rounds otherwise."""
    activation, rng = SwiGLU(limit), torch.Generator().manual_seed(2)
    routing = route(crowded(), EXPERTS, tile=128)
    h1, dh2 = torch.randn(340, 96, generator=rng).bfloat16(), torch.randn(340, 48, generator=rng).bfloat16()
    scores, offsets = torch.rand(170, 2, generator=rng), routing.offsets_E1.tolist()
    of_rows = scores.flatten()[routing.route_R.long()][:, None]
    leaf = h1.float().requires_grad_()
    h2 = activation(*leaf.chunk(2, 1))
    slope = torch.autograd.grad(h2, leaf, dh2.float() * of_rows)[0]
    lost = torch.zeros(1, dtype=torch.int32)
    for found, rows in (
        (columns.activation_columns(h1, scores, routing, activation, lost), h2.detach() * of_rows),
        (columns.slope_columns(h1, dh2, scores, routing, activation, lost), slope),
    ):
        at = 0
        for expert, one in enumerate(twin(rows, offsets)):
            if one is not None:
                width = one.values.shape[1]
                part = found.values[:, at : at + width].float() * found.scale[expert][:, None]
                wanted = formats.from_folded(one)
                assert (part - wanted).norm() <= 2e-3 * wanted.norm() and (part != wanted).float().mean() < 2e-3
                at += width


def test_weights_both_ways() -> None:
    """Tiles of 32 x 32 share a scale; rows and transposed columns hold the same numbers, folded along their own length."""
    weights = torch.randn(3, 96, 160, generator=torch.Generator().manual_seed(3)).bfloat16()
    weights[1] *= torch.logspace(-3, 3, 160).bfloat16()
    weights[2, 7, 9], weights[2, 40:70] = torch.nan, 0
    found, tiles = both_ways(weights), formats.mxfp8(weights.float(), (32, 32))
    for ours, values, codes in (
        (found.rows, tiles.values, tiles.codes),
        (found.columns, tiles.values.mT, tiles.codes.mT),
    ):
        one = formats.fold(formats.MXFP8(values.contiguous(), codes.repeat_interleave(32, 1)))
        assert torch.equal(ours.values.view(torch.uint8), one.values.view(torch.uint8))
        assert torch.equal(ours.scale, one.scale) and int(ours.lost) == int(one.lost)
    with pytest.raises(PmlkitError, match="tiles of 32"):
        both_ways(weights[:, :40])
