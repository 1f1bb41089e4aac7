"""Rows of a loss case: seeded numbers, the same on every device, laid out as the case's shape says."""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from pmlkit.errors import PmlkitError

SIZES = ("N", "D", "C", "per_class")
LAYOUTS = ("spread", "copies", "active")


def draw(shape: dict[str, int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows [N, D] and proxies [C, D] or None in float64, and labels [N] in int64 between them.

    Sizes: N, D and either per_class (rows a class, in random order) or C (random labels, and one proxy a class, drawn
    like torch's kaiming_normal_ with fan_out, the start of ProxyAnchorLoss). At most one layout; without any, rows are
    independent normal numbers.
    spread: rows lie around a centre of their class, this many thousandths of the centres' own spread away.
    copies: so many neighbours are one row. active: this percentage of pairs of rows is nearer than 1 after scaling to
    unit rows, by a direction that all share (exact for large D).
    Raises PmlkitError for other shapes.
    """
    rows, width, classes, per_class = (shape.get(key, 0) for key in SIZES)
    layouts = [key for key in shape if key in LAYOUTS]
    if width < 1 or bool(classes) == bool(per_class) or len(layouts) > 1 or set(shape) - {*SIZES, *LAYOUTS}:
        raise PmlkitError(f"shape {shape}: need N, D, exactly one of C and per_class, and at most one of {', '.join(LAYOUTS)}")
    emb_ND = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    proxies_CD = None
    if per_class:
        labels_N = (torch.arange(rows) // per_class)[torch.randperm(rows, generator=generator)]
    else:
        labels_N = torch.randint(classes, (rows,), generator=generator)
        proxies_CD = torch.randn(classes, width, dtype=torch.float64, generator=generator) * (2 / classes) ** 0.5
    for layout in layouts:
        emb_ND = _lay_out(layout, shape[layout], emb_ND, labels_N, generator)
    return emb_ND, labels_N, proxies_CD


def _lay_out(layout: str, amount: int, emb_ND: Tensor, labels_N: Tensor, generator: torch.Generator) -> Tensor:
    rows, width = emb_ND.shape
    if layout == "copies":
        return emb_ND[torch.arange(rows) // amount * amount]
    if layout == "spread":
        centres_KD = torch.randn(int(labels_N.max()) + 1 if rows else 0, width, dtype=torch.float64, generator=generator)
        return centres_KD[labels_N] + amount / 1000 * emb_ND
    # Unit rows of a common direction and one of their own across it: their cosines are about normal around `share` with
    # deviation (1 - share) / sqrt(D), and a distance of 1 is a cosine of 1/2.
    deviations = NormalDist().inv_cdf(1 - amount / 100) / math.sqrt(width)
    share = (0.5 - deviations) / (1 - deviations)
    common_D = torch.nn.functional.normalize(torch.randn(width, dtype=torch.float64, generator=generator), dim=0)
    own_ND = torch.nn.functional.normalize(emb_ND - (emb_ND @ common_D)[:, None] * common_D)
    return math.sqrt(width) * (math.sqrt(share) * common_D + math.sqrt(1 - share) * own_ND)
