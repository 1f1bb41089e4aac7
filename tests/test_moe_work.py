"""The work model of the expert layer: the published rates, hand-computed layers, and what it refuses."""

from typing import Any

import pytest

from pmlkit.errors import PmlkitError
from pmlkit.moe.work import layer_work
from pmlkit.release import PublishedRecord, read_published
from pmlkit.work import Work

REPORT: dict[str, Any] = {"tokens": 2048, "hidden": 7168, "width": 3072, "experts": 384, "top_k": 6}
SMALL: dict[str, Any] = {"tokens": 4, "hidden": 32, "width": 64, "experts": 4, "top_k": 2, "ep": 2}
ROW = 4 * 7168  # bytes of payload a route of the report's hidden width: BF16 out and BF16 back
EPS = 1e-12  # relative: the published rates are ours to the last bits of a double


def small(**changes: Any) -> Work:
    """Return the work of the small layer, changed as given."""
    return layer_work(**{**SMALL, "precision": "bf16", "mode": "inference", "imbalance": 1, **changes})


def record_work(record: PublishedRecord) -> Work:
    """Return the work of a published case."""
    assert record.ep and record.mode and record.imbalance
    names = {"tokens": "T", "hidden": "D", "width": "F", "experts": "E", "top_k": "K"}
    sizes: dict[str, Any] = {name: record.shape[letter] for name, letter in names.items()}
    return layer_work(**sizes, ep=record.ep, precision=record.precision, mode=record.mode, imbalance=record.imbalance)


@pytest.fixture(scope="module")
def published() -> list[PublishedRecord]:
    """The committed records of the report."""
    records = read_published("gb300-moe").records
    assert len(records) == 63
    return records


def test_published_rates(published: list[PublishedRecord]) -> None:
    """Work over published time is the published TFLOP/s and GB/s in all 63 cases."""
    for record in published:
        assert record.moe
        work = record_work(record)
        assert work.useful_flops / record.moe.layer_ms / 1e9 == pytest.approx(record.moe.useful_tflops, rel=EPS)
        assert work.hbm_bytes / record.moe.layer_ms / 1e6 == pytest.approx(record.moe.analytical_hbm_gbps, rel=EPS)


def test_published_payload(published: list[PublishedRecord]) -> None:
    """The estimated payload is within five routes of the published one, and zero exactly where that is zero."""
    for record in published:
        assert record.moe
        payload, known = record_work(record).payload_bytes_rank0, record.moe.payload_bytes_rank0
        assert payload is not None and payload % ROW == 0 and (payload == 0) == (known == 0)
        assert abs(payload - known) <= min(5 * ROW, 8.2e-4 * known), record.row


def test_published_example() -> None:
    """The one case whose byte buckets are published has exactly these, as whole numbers (EP 64, mxfp8, training)."""
    work = layer_work(**REPORT, ep=64, precision="mxfp8", mode="training", imbalance=1)
    assert work.buckets == {
        "inputs": 29_360_128,
        "routed_activations": 327_155_712,
        "routed_weights": 408_748_032,
        "routing_scores": 49_152,
        "shared_work": 0,
    }
    assert sum(work.buckets.values()) == 765_313_024 and work.bytes == {"hbm": 2_295_939_072}
    assert all(isinstance(value, int) for value in [*work.buckets.values(), *work.flops.values(), work.hbm_bytes])


def test_small_layer_by_hand() -> None:
    """8 routes of 32 to 64 and back: operations, each bucket, and half of rank 0's routes leaving it."""
    work = small()
    assert work.model == "moe-layer/1"
    assert work.flops == {"bf16": 8 * (2 * 32 * 128 + 2 * 64 * 32)}
    assert work.buckets == {
        "inputs": 4 * 32 * 2,
        "routed_activations": 8 * (32 + 128) * 2,
        "routed_weights": 2 * 3 * 32 * 64 * 2,
        "routing_scores": 8 * 4,
        "shared_work": 0,
    }
    assert work.payload_bytes_rank0 == 4 * 2 * 32 * 2


def test_payload_rounds_to_nearest() -> None:
    """11 of 32 rows on rank 0 make 2.75 of its 8 routes its own: 3 stay, 5 leave."""
    assert small(ep=4, imbalance=1.375).payload_bytes_rank0 == 5 * 2 * 32 * 2


def test_training_is_three_forwards() -> None:
    """Training triples operations and bytes; buckets and payload stay those of one forward pass."""
    forward, step = small(), small(mode="training")
    assert step.useful_flops == 3 * forward.useful_flops and step.hbm_bytes == 3 * forward.hbm_bytes
    assert step.buckets == forward.buckets and step.payload_bytes_rank0 == forward.payload_bytes_rank0


@pytest.mark.parametrize(("key", "bits"), [("bf16", 16), ("mxfp8", 8 + 8 / 32), ("nvfp4", 4 + 8 / 16)])
def test_weights_take_the_format(key: str, bits: float) -> None:
    """Only the weights take the format's size, block scales included; activations count as BF16 in every format."""
    work = small(precision=key)
    assert work.buckets["routed_weights"] == 2 * 3 * 32 * 64 * bits / 8
    assert work.buckets["routed_activations"] == small().buckets["routed_activations"]
    assert list(work.flops) == [key]


def test_idle_ranks_count_in_the_mean() -> None:
    """With everything on rank 0 only its experts are read, so the mean rank reads half; nothing leaves rank 0."""
    work = small(imbalance=2)
    assert work.buckets["routed_weights"] == 3 * 32 * 64 * 2
    assert work.payload_bytes_rank0 == 0
    assert work.flops == small().flops and work.buckets["routed_activations"] == small().buckets["routed_activations"]


def test_fewer_rows_than_experts() -> None:
    """A rank with fewer rows than experts reads only as many experts; a mean that is not whole is a float."""
    work = small(tokens=1, experts=12, ep=3, imbalance=2)
    # 4, 1 and 1 rows on ranks of 4 experts: 6 experts in all, 2 on the mean rank.
    assert work.buckets["routed_weights"] == 2 * 3 * 32 * 64 * 2
    odd = small(tokens=1, hidden=1, width=1, experts=3, top_k=1, ep=3, imbalance=3)
    assert odd.buckets["routed_weights"] == 3 * 1 * 1 * 2 / 3


@pytest.mark.parametrize("ep", [1, 3, 6, 12, 24, 48, 96])
def test_ranks_that_are_no_power_of_two(ep: int) -> None:
    """Any number of ranks that divides the experts has work; balanced, each sends all but its own share of routes."""
    work = layer_work(**REPORT, ep=ep, precision="mxfp8", mode="training", imbalance=1)
    assert work.payload_bytes_rank0 == (12_288 - 12_288 // ep) * ROW
    assert work.buckets["routed_weights"] == 384 // ep * 3 * 7168 * 3072 * 33 // 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": 3}, "ep 3 in layer_work does not divide 4 experts: use 2 or 4"),
        ({"tokens": 0}, "tokens 0 in layer_work is not a positive whole number: pass 1 or more"),
        ({"top_k": 5}, "top_k 5 in layer_work is more than 4 experts: pass 4 or fewer"),
        ({"mode": "infer"}, "unknown mode 'infer' in layer_work: did you mean 'inference'?"),
        ({"precision": "fp32"}, "precision 'fp32' in layer_work has no expert layer: use bf16 or mxfp8 or nvfp4"),
        (
            {"precision": "nvfp4", "mode": "training"},
            "precision 'nvfp4' in layer_work is for inference only: use mode 'inference', or bf16 or mxfp8",
        ),
        (
            {"imbalance": 0.5},
            "imbalance 0.5 in receive_rows: rank 0 over the mean rank is a finite number of at least 1; "
            "pass 1 for an equal load",
        ),
        (
            {"ep": 4, "imbalance": 4},
            "imbalance 4 in layer_work puts 32 rows on rank 0, but a token sends at most one row to each of its "
            "1 experts, 16 in all: pass 2 or less",
        ),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    """A layer that cannot be is refused with the value, the place and what to pass."""
    with pytest.raises(PmlkitError) as caught:
        small(**changes)
    assert str(caught.value) == message
