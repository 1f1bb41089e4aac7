"""Which row of which expert a route becomes: a stable counting sort by expert on the device, and its status word.

A route is one of a token's K choices; route t*K + k belongs to token t. A row is a route's place among all received rows:
rows of one expert are neighbours, in the order of their routes. Nothing here waits for the device, and the only atomics
add integers, so that the same ids always give the same rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pmlkit.errors import PmlkitError
from pmlkit.moe.launch import launch

CHUNK = 256  # routes of a program
WORDS = tl.constexpr(8)  # int32 words of a block's entry, of which six are used
# Places in the status word; each counts.
BAD_ID, DUPLICATE, DROPPED, NOT_FINITE, LOST = (tl.constexpr(place) for place in range(5))
STATUS_WORDS = 8


@dataclass(frozen=True, eq=False)
class Routing:
    """Where routes go. R = T*K, the most rows there can be; rows from `offsets[E]` on are not there.

    source_R: int32, token of a row. route_R: int32, route of a row. row_TK: int32, row of a route, -1 for a route that
    was dropped. offsets_E1: int32 [E + 1], first row of each expert. blocks_B8: int32 [B, 8], blocks of at most `tile`
    rows of one expert: first block and number of blocks that share its weights in turn, expert, first row, end of the
    expert's rows. count: int32 [1], how many blocks there are. status: int32 [8], see `check_status`.
    """

    source_R: Tensor
    route_R: Tensor
    row_TK: Tensor
    offsets_E1: Tensor
    blocks_B8: Tensor
    count: Tensor
    status: Tensor
    tile: int


def check_status(status: Tensor, experts: int) -> None:
    """Raise PmlkitError for what a layer of so many experts has counted: wrong ids, dropped routes, NaN. Waits for it."""
    found = status.tolist()
    for place, what in (
        (BAD_ID, f"expert ids lie outside 0 to {experts - 1}: their routes were left out"),
        (DUPLICATE, "routes repeat an expert of their token: each counts on its own; give every token K experts"),
        (DROPPED, "routes found no room: raise the capacity, or balance the router"),
        (NOT_FINITE, "tokens came out as NaN or Inf: look at the input, the scores and the weights"),
    ):
        if found[place.value]:
            raise PmlkitError(f"mixture of experts: {found[place.value]} {what}")


def route(ids_TK: Tensor, experts: int, *, tile: int = 128, group: int = 16, capacity: int | None = None) -> Routing:
    """Return where the routes of expert ids [T, K] (int32 or int64, on the kernels' device) go.

    tile: rows of a block. group: blocks of an expert that take turns with its weights, so that the second-level cache
    holds both. capacity: rows there is room for, or None for T*K; later routes are dropped and counted.
    Raises PmlkitError for ids of another shape or type.
    """
    if ids_TK.ndim != 2 or ids_TK.dtype not in (torch.int32, torch.int64):
        raise PmlkitError(f"expert ids: need int32 or int64 [T, K], got {ids_TK.dtype} {tuple(ids_TK.shape)}")
    ids_TK = ids_TK.contiguous()
    tokens, top_k = ids_TK.shape
    routes, chunks = tokens * top_k, max(1, -(-tokens * top_k // CHUNK))
    # Tensors of their own, not views of one: operators may not return tensors that share memory.
    sizes = [routes, routes, routes, experts + 1, 1, STATUS_WORDS, chunks * experts]
    made = [ids_TK.new_empty(size, dtype=torch.int32) for size in sizes]
    source_R, route_R, row_TK, offsets_E1, count, status, counts = made
    blocks_B8 = ids_TK.new_empty(most_blocks(routes, experts, tile), WORDS.value, dtype=torch.int32)
    EP = triton.next_power_of_2(experts)
    launch(_count_kernel, (chunks,), ids_TK, counts, status, routes, experts, CHUNK, EP)
    room = routes if capacity is None else min(capacity, routes)
    share = triton.next_power_of_2(-(-len(blocks_B8) // chunks))
    launch(
        _place_kernel, (chunks,), ids_TK, counts, source_R, route_R, row_TK, offsets_E1, blocks_B8, count, status,
        routes, experts, chunks, room, top_k, tile, group, CHUNK, EP, share,
    )  # fmt: skip
    return Routing(source_R, route_R, row_TK.view(tokens, top_k), offsets_E1, blocks_B8, count, status, tile)


def most_blocks(routes: int, experts: int, tile: int) -> int:
    """Return how many blocks there can be: full ones, and a last one of every expert that has a row."""
    return max(1, -(-routes // tile) + min(experts, routes))


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, status_ptr, routes, experts, CHUNK: tl.constexpr, EP: tl.constexpr):
    """Write how many routes of a chunk go to each expert, [chunks, experts]; clear the status word."""
    program, expert = tl.program_id(0), tl.arange(0, EP)
    total = tl.zeros([EP], tl.int32)
    for part in tl.static_range(0, CHUNK, 32):
        at = program * CHUNK + part + tl.arange(0, 32)
        ids = tl.load(ids_ptr + at, mask=at < routes, other=-1)
        total += tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + program * experts + expert, total, mask=expert < experts)
    if program == 0:
        tl.store(status_ptr + tl.arange(0, 8), tl.zeros([8], tl.int32))


@triton.jit
def _place_kernel(
    ids_ptr, counts_ptr, source_ptr, route_ptr, row_ptr, offsets_ptr, blocks_ptr, count_ptr, status_ptr,
    routes, experts, chunks, room, top_k, tile, group, CHUNK: tl.constexpr, EP: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Give every route of a chunk its row, and write this program's share of the table of blocks."""
    program, expert = tl.program_id(0), tl.arange(0, EP)
    before, total = tl.zeros([EP], tl.int32), tl.zeros([EP], tl.int32)
    for chunk in range(0, chunks):
        some = tl.load(counts_ptr + chunk * experts + expert, mask=expert < experts, other=0)
        before += tl.where(chunk < program, some, 0)
        total += some
    ends = tl.minimum(tl.cumsum(total, 0), room)
    begins = tl.minimum(tl.cumsum(total, 0) - total, room)
    for part in tl.static_range(0, CHUNK, 32):
        at = program * CHUNK + part + tl.arange(0, 32)
        real = at < routes
        ids = _ids(ids_ptr, at, real, experts)
        valid = ids >= 0
        own = ids[:, None] == expert[None, :]
        row = tl.sum(tl.where(own, (begins + before)[None, :], 0), 1) + _earlier(
            ids, program * CHUNK, part, ids_ptr, routes, experts
        )
        kept = valid & (row < room)
        row = tl.where(kept, row, -1)
        tl.store(row_ptr + at, row, mask=real)
        tl.store(source_ptr + row, (at // top_k).to(tl.int32), mask=kept)
        tl.store(route_ptr + row, at.to(tl.int32), mask=kept)
        repeated = tl.zeros([32], tl.int32)
        for k in range(1, top_k):
            repeated += (_ids(ids_ptr, at - k, valid & (at % top_k >= k), experts) == ids).to(tl.int32)
        _count_up(status_ptr + 0, real & (valid == 0))
        _count_up(status_ptr + 1, valid & (repeated > 0))
        _count_up(status_ptr + 2, valid & (kept == 0))
    if program == 0:
        tl.store(offsets_ptr + 1 + expert, ends, mask=expert < experts)
        tl.store(offsets_ptr, 0)
    _write_blocks(program, begins, ends, expert, blocks_ptr, count_ptr, tile, group, EP, SHARE)


@triton.jit
def _ids(ids_ptr, at, there, experts):
    """Return expert ids as int32, -1 for what is no expert: cut to 32 bits first, 2^32 + 5 would be expert 5."""
    ids = tl.load(ids_ptr + at, mask=there, other=-1)
    return tl.where((ids >= 0) & (ids < experts), ids, -1).to(tl.int32)


@triton.jit
def _earlier(ids, first, part: tl.constexpr, ids_ptr, routes, experts):
    """Return how many routes of this chunk before each of 32 ids have the same id."""
    lane = tl.arange(0, 32)
    count = tl.zeros([32], tl.int32)
    for earlier in tl.static_range(0, part + 32, 32):
        at = first + earlier + lane
        other = _ids(ids_ptr, at, at < routes, experts)
        same = ids[:, None] == other[None, :]
        if earlier == part:
            same &= lane[None, :] < lane[:, None]
        count += tl.sum(same.to(tl.int32), 1)
    return count


@triton.jit
def _count_up(ptr, found):
    """Add how many were found, if any."""
    number = tl.sum(found.to(tl.int32), 0)
    tl.atomic_add(ptr, number, mask=number > 0, sem="relaxed")


@triton.jit
def _write_blocks(program, begins, ends, expert, blocks_ptr, count_ptr, tile, group, EP: tl.constexpr, SHARE: tl.constexpr):
    """Write SHARE entries of the table of blocks; blocks that are not there write nothing."""
    blocks = (ends - begins + tile - 1) // tile
    behind = tl.cumsum(blocks, 0)
    number = tl.sum(blocks, 0)
    if program == 0:
        tl.store(count_ptr, number)
    for step in tl.static_range(0, SHARE):
        block = program * SHARE + step
        mine = tl.sum((behind <= block).to(tl.int32), 0)  # experts whose blocks all come before this one
        here = expert == mine
        first = tl.sum(tl.where(here, behind - blocks, 0), 0)
        inside = block - first
        leader = inside // group * group
        size = tl.minimum(tl.sum(tl.where(here, blocks, 0), 0) - leader, group)
        row = tl.sum(tl.where(here, begins, 0), 0) + inside * tile
        entry, there = blocks_ptr + block * 8, block < number
        tl.store(entry, first + leader, mask=there)
        tl.store(entry + 1, size, mask=there)
        tl.store(entry + 2, mine, mask=there)
        tl.store(entry + 3, row, mask=there)
        tl.store(entry + 4, tl.sum(tl.where(here, ends, 0), 0), mask=there)
