"""A case: one thing to measure, described completely enough to be measured again."""

import hashlib
import json

import msgspec


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One configuration of one operation. Forward and backward are samples of one case, not cases.

    op: registry key. precision: storage format of the inputs. shape: sizes by name.
    mode, pipeline, ep, imbalance: mixture-of-experts axes, None for losses. options: further switches.
    """

    op: str
    precision: str
    shape: dict[str, int]
    seed: int = 0
    mode: str | None = None
    pipeline: str | None = None
    ep: int | None = None
    imbalance: float | None = None
    options: dict[str, str | int | float | bool] = {}

    @property
    def slug(self) -> str:
        """Readable name: op, precision, the axes that are set, then the sizes in declared order."""
        axes = [self.mode, self.pipeline, self.ep and f"ep{self.ep}", self.imbalance and f"i{self.imbalance:g}"]
        sizes = [f"{name.lower().replace('_', '')}{size}" for name, size in self.shape.items()]
        return "-".join([self.op, self.precision, *(a for a in axes if a), *sizes]).replace("_", "-")

    @property
    def case_id(self) -> str:
        """The slug and eight hex digits of the canonical JSON: equal cases, and only those, share an id."""
        text = json.dumps(msgspec.to_builtins(self), sort_keys=True, separators=(",", ":"))
        return f"{self.slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
