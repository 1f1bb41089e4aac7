"""Work models of the losses, torch-free: operations and least memory traffic of one forward and backward pair.

Counts use no symmetry of the similarity matrix. Traffic is what a kernel that keeps O(N) state must move: it reads the
rows in each pass, writes the gradient, and touches labels (8 bytes) and saved statistics once each way.
"""

from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.precision import precision
from pmlkit.work import Work

MODEL = "loss-pair/1"


def work_of(case: Case) -> Work:
    """Return the work of a loss case."""
    return loss_work(case.op, case.shape, case.precision)


def loss_work(op: str, shape: dict[str, int], precision_key: str) -> Work:
    """Return the work of one pair of `op` for shape N (rows), D (width) and, for proxies, C (classes).

    Similarities cost 2·N·M·D operations a product: contrastive and NT-Xent need three products (S, S again, W·Y),
    batch-hard one (its backward is O(N·D)), ProxyAnchor four over N·C (S twice, W·Q, Wᵀ·Y).
    Proxies are float32 in every precision. Raises PmlkitError for an unknown op.
    """
    rows, width, classes = shape["N"], shape["D"], shape.get("C", 0)
    if op not in _PRODUCTS:
        raise PmlkitError(f"no work model for op {op!r} in losses/work.py: add it to _PRODUCTS")
    products, row_passes, statistics = _PRODUCTS[op]
    others = classes or rows
    row_bytes = int(precision(precision_key).nbytes(rows * width))
    proxy_bytes = 3 * classes * width * 4 + 2 * classes * 8  # read twice, gradient written; U and V saved and read
    traffic = row_passes * row_bytes + 2 * rows * (8 + statistics) + proxy_bytes
    return Work(model=MODEL, flops={precision_key: 2 * products * rows * others * width}, bytes={"hbm": traffic})


# op -> matrix products a pair, passes over the rows (gradient included), bytes of saved statistics a row.
# Batch-hard gathers the mined rows: its backward reads three rows an anchor and updates two more.
_PRODUCTS = {
    "contrastive": (3, 3, 4),
    "batch_hard_triplet": (1, 6, 16),
    "ntxent": (3, 3, 12),
    "proxy_anchor": (4, 3, 4),
}
