"""Work model of the expert layer, torch-free: what the published GB300 report divides by time, for one mean rank."""

from fractions import Fraction

from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.moe.load import check_format, check_sizes, receive_rows, row_limit
from pmlkit.precision import precision as storage
from pmlkit.work import Work

MODEL = "moe-layer/1"
TRAINING = 3  # the report's convention: a training step is three forward passes of operations and of bytes
SCORE_BYTES = 4  # routing scores are float32


def work_of(case: Case) -> Work:
    """Return the work of a layer's case: of the mean rank of `ep`, or of the one rank that its shape describes."""
    shape, mode = case.shape, case.mode or "inference"
    return layer_work(
        tokens=shape["T"], hidden=shape["D"], width=shape["F"], experts=shape["E"], top_k=shape["K"], ep=case.ep or 1,
        precision=case.precision, mode=mode, imbalance=case.imbalance or 1.0,
    )  # fmt: skip


def layer_work(
    *,
    tokens: int,
    hidden: int,
    width: int,
    experts: int,
    top_k: int,
    ep: int,
    precision: str,
    mode: str,
    imbalance: float,
) -> Work:
    """Return the work of one layer on the mean of `ep` ranks, as the published GB300 report models it.

    Operations: 2·(2F·D + D·F) a route for tokens·top_k routes, whatever the imbalance. Bytes: the input, each received
    row in BF16 with its pre-activation, the weights of every expert that has a row, the scores; idle ranks count in
    the mean. Not in it: route outputs, quantised copies, gradients.
    Payload of rank 0: routes that leave it, BF16 out and BF16 back, in every precision. Their number is estimated:
    rank 0's routes are taken to spread like everybody's (the report's own count differs by at most 5 routes).
    Raises PmlkitError for a size, ep, precision, mode or imbalance that no layer can have.
    """
    sizes = {"tokens": tokens, "hidden": hidden, "width": width, "experts": experts, "top_k": top_k, "ep": ep}
    check_sizes("layer_work", sizes)
    check_format("layer_work", precision, mode)
    rows = receive_rows(ep, tokens, top_k, imbalance)
    limit = row_limit(ep, tokens, top_k, experts)
    if rows[0] > limit:
        raise PmlkitError(
            f"imbalance {imbalance!r} in layer_work puts {rows[0]:,} rows on rank 0, but a token sends at most one row "
            f"to each of its {experts // ep} experts, {limit:,} in all: pass {limit // (tokens * top_k)} or less"
        )
    active = Fraction(sum(min(experts // ep, count) for count in rows), ep)
    dense = storage("bf16").nbytes
    routes = tokens * top_k
    buckets = {
        "inputs": dense(tokens * hidden),
        "routed_activations": dense(routes * (hidden + 2 * width)),
        "routed_weights": active * storage(precision).nbytes(3 * hidden * width),
        "routing_scores": Fraction(routes * SCORE_BYTES),
        "shared_work": Fraction(0),
    }
    passes = TRAINING if mode == "training" else 1
    leaving = routes - round(Fraction(rows[0], ep))
    return Work(
        model=MODEL,
        flops={precision: 6 * routes * hidden * width * passes},
        bytes={"hbm": _number(sum(buckets.values(), Fraction(0)) * passes)},
        payload_bytes_rank0=int(2 * dense(leaving * hidden)),
        buckets={name: _number(value) for name, value in buckets.items()},
    )


def _number(value: Fraction) -> int | float:
    """Return an int where the value is whole, else the nearest float."""
    return value.numerator if value.denominator == 1 else float(value)
