"""The routing tables in Triton's interpreter against a sort of plain numbers."""

import pytest
import torch
from torch import Tensor

from pmlkit.moe.routing import route

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes, for the interpreter")


def by_sorting(ids: Tensor, experts: int, room: int) -> tuple[list[int], list[int], list[int]]:
    """Return route of each row, row of each route and first rows, by a stable sort in Python."""
    flat = ids.flatten().tolist()
    order = sorted((i for i, e in enumerate(flat) if 0 <= e < experts), key=lambda i: flat[i])[:room]
    rows = [-1] * len(flat)
    for row, i in enumerate(order):
        rows[i] = row
    firsts = [sum(flat[i] < expert for i in order) for expert in range(experts + 1)]
    return order, rows, firsts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "T, K, E, room",
    [(1, 1, 1, None), (7, 3, 5, None), (300, 2, 384, None), (200, 6, 8, None), (200, 6, 8, 1000), (50, 2, 3, 0)],
)
def test_rows_follow_a_stable_sort(T: int, K: int, E: int, room: int | None, dtype: torch.dtype) -> None:
    """Several chunks, experts without rows, a number of experts that is no power of two, and too little room."""
    rng = torch.Generator().manual_seed(T + E)
    ids = torch.randint(-1, E + 1, (T, K), generator=rng).to(dtype)  # some are no expert
    found = route(ids, E, tile=64, capacity=room)
    order, rows, firsts = by_sorting(ids, E, T * K if room is None else room)
    assert found.route_R[: len(order)].tolist() == order
    assert found.source_R[: len(order)].tolist() == [i // K for i in order]
    assert found.row_TK.flatten().tolist() == rows
    assert found.offsets_E1.tolist() == firsts


@pytest.mark.parametrize("group", [1, 2, 16])
def test_blocks_cover_every_row_once(group: int) -> None:
    """Blocks of at most `tile` rows of one expert; those that take turns are neighbours of one expert."""
    ids = torch.randint(0, 3, (160, 2), generator=torch.Generator().manual_seed(1)).int()
    ids[:, 1] = 4  # of 6 experts 3 and 5 have no rows, 4 has five blocks
    found = route(ids, 6, tile=32, group=group)
    blocks = found.blocks_B8[: int(found.count)].tolist()
    offsets = found.offsets_E1.tolist()
    covered = []
    for number, (first, size, expert, row, end, *_) in enumerate(blocks):
        assert end == offsets[expert + 1]
        assert first <= number < first + size
        assert size <= group
        assert {blocks[b][2] for b in range(first, first + size)} == {expert}
        covered += range(row, min(row + 32, end))
    assert covered == list(range(320))


def test_duplicates_are_counted() -> None:
    """A token that names an expert twice has one repeated route, one that names it three times has two."""
    ids = torch.tensor([[0, 1, 2], [1, 1, 0], [2, 2, 2], [-1, -1, 0]]).int()
    assert route(ids, 3).status.tolist()[:3] == [2, 3, 0]
