"""Tile choices of the fused losses, one small function, so that tests can ask it without a GPU."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """How a kernel covers an N x M matrix of pairs whose rows have width D.

    BM, BN: rows and columns of a tile. BK: columns of the rows loaded at once. DC: gradient columns that one program
    keeps. ONE: whether BK covers the width. splits: programs that share a row block. PREC: arithmetic of float32 products.
    """

    BM: int
    BN: int
    BK: int
    ONE: bool
    DC: int
    splits: int
    warps: int
    stages: int
    PREC: str

    def row_blocks(self, rows: int) -> int:
        """Return how many blocks of rows there are."""
        return -(-rows // self.BM)

    def chunks(self, width: int) -> int:
        """Return how many programs share the gradient columns."""
        return -(-width // self.DC)

    def blocks(self, rows: int, width: int) -> int:
        """Return how many blocks of rows by gradient columns there are; each may have several programs."""
        return self.row_blocks(rows) * self.chunks(width)

    def programs(self, rows: int) -> int:
        """Return how many programs cover the rows, each keeping all columns of its rows."""
        return self.row_blocks(rows) * self.splits

    def partial(self, rows: int, width: int) -> int:
        """Return how many numbers the programs of gradient blocks hand each other: DC sums and one more a row."""
        return self.blocks(rows, width) * self.splits * self.BM * (self.DC + 1) if self.splits > 1 else 0


_PROGRAMS = 264  # two for each of the 132 multiprocessors of an H100 or H200
_LARGE = 16384  # rows whose blocks alone keep every multiprocessor busy
_MOST_PARTIAL_BYTES = 16 * 2**20  # what programs of one block may write for each other


def tiles(rows: int, others: int, width: int, dtype: torch.dtype, tf32: bool = False) -> Tiles:
    """Return the tiles for `rows` against `others` of a width in a type. Untuned: chosen by occupancy alone.

    Small batches get small tiles and several programs a row block, so that two programs a multiprocessor have work;
    large ones the tile that fills the tensor cores.
    """
    widest = 1 << max(4, (width - 1).bit_length())
    large = rows >= _LARGE
    # float32 never takes 128 rows: for compute capability 10.0 Triton 3.7.1 makes an empty kernel of 128 x 64 in 3xTF32.
    # Wider rows than 128 come in parts of 64, so that registers and the smallest card's shared memory hold them.
    whole = width <= 128
    BM = 128 if large and whole and dtype != torch.float32 else 64 if rows >= 4096 else 32
    BN = 64
    DC = min(widest, 128)
    blocks, splits = -(-rows // BM), 1
    while (
        not large
        and splits < 16
        and 2 * splits * BN <= others
        and splits * blocks * -(-width // DC) < _PROGRAMS
        and 2 * splits * blocks * BM * -(-width // DC) * (DC + 1) * 4 <= _MOST_PARTIAL_BYTES
    ):
        splits *= 2
    return Tiles(
        BM=BM,
        BN=BN,
        BK=min(widest, 128 if whole else 64),
        ONE=whole,
        DC=DC,
        splits=splits,
        warps=8 if large else 4,
        stages=2 if whole or dtype != torch.float32 else 1,
        PREC="tf32" if tf32 else "tf32x3",
    )
