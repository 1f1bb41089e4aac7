"""Tile choices of the fused losses, one small function, so that tests can ask it without a GPU."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Shape:
    """What a plan depends on. others: number of reference rows or proxies, or of the rows themselves without them.

    settings: numbers of the loss, in the order of its constructor. tf32: whether float32 rows may be cut to 11 digits.
    """

    rows: int
    others: int
    width: int
    dtype: torch.dtype
    others_dtype: torch.dtype
    reference_set: bool
    settings: tuple[float, ...]
    tf32: bool = False


@dataclass(frozen=True)
class Tiles:
    """How a kernel covers an N x M matrix of pairs whose rows have width D.

    BM, BN: rows and columns of a tile. BK: columns of the rows loaded at once. W: width of ready rows. DC: gradient
    columns that one program keeps. splits: programs that share a row block.
    """

    BM: int
    BN: int
    BK: int
    W: int
    DC: int
    splits: int
    warps: int
    stages: int

    def row_blocks(self, rows: int) -> int:
        """Return how many blocks of rows there are."""
        return -(-rows // self.BM)

    @property
    def chunks(self) -> int:
        """How many programs share the gradient columns."""
        return -(-self.W // self.DC)

    def blocks(self, rows: int) -> int:
        """Return how many blocks of rows by gradient columns there are; each may have several programs."""
        return self.row_blocks(rows) * self.chunks

    def programs(self, rows: int) -> int:
        """Return how many programs cover the rows, each keeping all columns of its rows."""
        return self.row_blocks(rows) * self.splits

    def partial(self, rows: int) -> int:
        """Return how many numbers the programs of gradient blocks hand each other: DC sums and one more a row."""
        return self.blocks(rows) * self.splits * self.BM * (self.DC + 1) if self.splits > 1 else 0


# Tuned on an NVIDIA H200 on 2026-12-01, D = 128, every loss in float32 and bfloat16: 128, 512, 2,048 and 32,768 rows. By
# sweeps that left no records: times in comments on tiles, here and in the losses, only say why a choice was made.
_PROGRAMS = 256  # two for each of the 132 multiprocessors of an H100 or H200, of both sides together
_LARGE = 16384  # rows whose blocks alone keep every multiprocessor busy
_BANDED = 1024  # columns from which negatives have a loop of their own
_MOST_PARTIAL_BYTES = 9 * 2**20  # what programs of one block may write for each other, of both sides together


def large(rows: int) -> bool:
    """Return whether every row block has one program."""
    return rows >= _LARGE


def bands(shape: Shape) -> bool:
    """Return whether tiles of negatives alone are worth a loop of their own."""
    return max(shape.rows, shape.others) > _BANDED


def parts(shape: Shape) -> int:
    """Return how many float16 numbers stand for one of a row: two where float32 is to keep its digits."""
    exact = torch.float32 in (shape.dtype, shape.others_dtype) and not shape.tf32
    return 2 if exact and shape.dtype != torch.bfloat16 else 1


def fresh(shape: Shape) -> bool:
    """Return whether sums over all rows must be added tile by tile in float32: beyond 2^17 rows, for float16 gradients."""
    return max(shape.rows, shape.others) > 2**17


def ready_width(width: int) -> int:
    """Return the width of ready rows: a power of two from 16 to 128, or a multiple of 128."""
    return 1 << max(4, (width - 1).bit_length()) if width <= 128 else -(-width // 128) * 128


def tiles(rows: int, others: int, shape: Shape) -> Tiles:
    """Return the tiles for `rows` against `others` of a shape.

    Small batches get small tiles and several programs a row block, so that every multiprocessor has work; in large ones
    a block has one program.
    """
    W = ready_width(shape.width)
    BM = 64 if rows * others >= 2**21 else 16
    between = BM == 64 and rows <= 4096 and not shape.reference_set and parts(shape) == 1
    BN = 32 if between else 64  # 2,048 bfloat16 rows: contrastive 39 us instead of 44, NT-Xent 40 instead of 42
    DC = min(W, 128)
    blocks, splits = -(-rows // BM) * -(-W // DC), 1
    sides = 1 + (shape.reference_set and not large(max(rows, others)))
    while (
        not large(rows)
        and splits < 32
        and 256 * splits <= others
        and 2 * splits * blocks * sides <= _PROGRAMS
        and 2 * splits * blocks * sides * BM * (DC + 1) * 4 <= _MOST_PARTIAL_BYTES
    ):
        splits *= 2
    # Wider rows than 128 come in parts of 64, so that registers and the smallest card's shared memory hold them.
    stages = 3 if parts(shape) == 1 else 2 if W <= 128 else 1
    return Tiles(BM=BM, BN=BN, BK=W if W <= 128 else 64, W=W, DC=DC, splits=splits, warps=4, stages=stages)


def forward_tiles(rows: int, others: int, shape: Shape) -> Tiles:
    """Return tiles of a forward pass that keeps little but its tile: taller ones for large batches in one part.

    NVIDIA H200, 2026-12-01, 32,768 bfloat16 rows: 708 us to mine batch-hard triplets where 64 x 128 takes 890; 635 us for
    NT-Xent where 64 x 64 takes 790.
    """
    t = tiles(rows, others, shape)
    return replace(t, BM=128, BN=64, stages=3) if large(rows) and parts(shape) == 1 and t.W <= 128 else t
