"""Declared work: what a case has to compute and move, independent of who does it."""

import msgspec


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work of one case, for the whole pair or layer (a training factor is already inside).

    model: id and version of the work model that produced it.
    flops: useful floating-point operations per precision key. Never held as one sum against one roof.
    bytes: bytes per memory level, `hbm` at least. A model, not a counter.
    payload_bytes_rank0: bytes that rank 0 sends per forward pass, None where nothing is exchanged.
    buckets: named parts of the *forward* memory bytes, where the model names them.
    """

    model: str
    flops: dict[str, float]
    bytes: dict[str, float]
    payload_bytes_rank0: int | None = None
    buckets: dict[str, float] = {}

    @property
    def useful_flops(self) -> float:
        """All useful operations together, for rates (TFLOP/s) only."""
        return sum(self.flops.values())

    @property
    def hbm_bytes(self) -> float:
        """Bytes through device memory."""
        return self.bytes["hbm"]
