"""The routing load: the published lists, its invariants at any number of ranks, and what the planners refuse."""

import math
import random
from itertools import pairwise

import pytest

from pmlkit.errors import PmlkitError
from pmlkit.moe import load
from pmlkit.moe.load import receive_rows
from pmlkit.release import PublishedRecord, read_published

# Not powers of two, which the published system cannot run, beside small and large ones that it can.
RANKS = (1, 2, 3, 6, 8, 12, 24, 48, 64, 96, 384, 512)


@pytest.fixture(scope="module")
def published() -> list[PublishedRecord]:
    """The committed records of the report."""
    return read_published("gb300-moe").records


def test_published_lists(published: list[PublishedRecord]) -> None:
    """Every rank of all 63 published cases receives exactly the published rows."""
    assert len(published) == 63
    for record in published:
        assert record.moe and record.ep and record.imbalance
        rows = receive_rows(record.ep, record.shape["T"], record.shape["K"], record.imbalance)
        assert rows == record.moe.receive_rows, record.row


def test_power_law() -> None:
    """The rows follow the power law whose exponents were fitted to three published lists, to within one row."""
    for ep, imbalance, exponent in ((8, 4, 1.4357930515), (32, 8, 1.0098843905), (64, 4, 0.4658379531)):
        weights = [(rank + 1) ** -exponent for rank in range(ep)]
        expected = [ep * 2048 * 6 * weight / sum(weights) for weight in weights]
        rows = receive_rows(ep, 2048, 6, imbalance)
        assert all(abs(got - wanted) < 1 for got, wanted in zip(rows, expected, strict=True))


def test_one_exponent_for_all_ranks() -> None:
    """Rank 0's exact share and the split of the rest name the same exponent, to nine digits of a very large load."""
    rows = receive_rows(96, 10**14, 1, 5.7)
    exponents = [math.log(rows[0] / rows[rank]) / math.log(rank + 1) for rank in (1, 2, 50, 95)]
    assert max(exponents) - min(exponents) < 1e-9


def test_small_load_by_hand() -> None:
    """Three ranks at imbalance 2: 2^-a + 3^-a = 1/2 at a = 1.6055, so 12 rows split 8, 2.63, 1.37."""
    assert receive_rows(3, 2, 2, 2) == [8, 3, 1]


def test_largest_remainder_by_hand() -> None:
    """Two ranks share 10 rows 7.5 to 2.5: the earlier rank gets the odd row, and the total holds."""
    assert receive_rows(2, 5, 1, 1.5) == [8, 2]


def test_ends_of_the_scale() -> None:
    """Imbalance 1 is equal; as many as ranks, or more, is everything on rank 0; one rank takes all it sends."""
    assert receive_rows(4, 5, 3, 1) == [15, 15, 15, 15]
    assert receive_rows(4, 5, 3, 4) == receive_rows(4, 5, 3, 1e300) == [60, 0, 0, 0]
    assert receive_rows(1, 5, 3, 1) == receive_rows(1, 5, 3, 7.5) == [15]


@pytest.mark.parametrize("ep", RANKS)
def test_invariants(ep: int) -> None:
    """The total holds, no rank has more than the one before it, and rank 0 has its share, at any imbalance."""
    draw = random.Random(ep)
    near = [1, math.nextafter(1, 2), 1 + 1e-9, math.nextafter(ep, 0), ep * (1 - 1e-9), ep]
    for imbalance in [*near, *(1 + (ep - 1) * draw.random() for _ in range(12))]:
        tokens, top_k = draw.choice((1, 3, 7, 2048, 100_003)), draw.choice((1, 2, 6, 8))
        rows = receive_rows(ep, tokens, top_k, max(imbalance, 1))
        assert len(rows) == ep and sum(rows) == ep * tokens * top_k and rows[-1] >= 0
        assert all(earlier >= later for earlier, later in pairwise(rows))
        assert abs(rows[0] - max(imbalance, 1) * tokens * top_k) <= 1


@pytest.mark.parametrize("ep", [3, 6, 12, 24, 48, 64, 96, 512])
@pytest.mark.parametrize("imbalance", [1, 1.25, 1.5, 2, 2.75])
def test_whole_head_is_exact(ep: int, imbalance: float) -> None:
    """Where imbalance times the balanced load is whole, rank 0 receives exactly that."""
    assert receive_rows(ep, 2048, 6, imbalance)[0] == imbalance * 2048 * 6


def test_more_imbalance_loads_the_head_more() -> None:
    """Rank 0 never loses and the last rank never gains when the imbalance grows."""
    lists = [receive_rows(12, 1000, 4, 1 + 11 * step / 50) for step in range(51)]
    assert all(b[0] >= a[0] and b[-1] <= a[-1] for a, b in pairwise(lists))


def test_split_even() -> None:
    """Local experts differ by one row at most and keep the sum, also when there are fewer rows than experts."""
    assert load.split_even(10, 4) == [3, 3, 2, 2]
    assert load.split_even(2, 3) == [1, 1, 0]
    assert load.split_even(0, 2) == [0, 0]


def test_padding_by_hand() -> None:
    """Each expert fills its own tiles: one row over costs one tile, not one for every expert, and no row costs none."""
    assert load.padded_rows(3 * 128 + 1, 3, 128) == 4 * 128
    assert load.padded_rows(2, 3, 128) == 2 * 128
    assert load.padded_rows(0, 3, 128) == 0
    assert load.padded_rows(37, 3, 1) == 37


@pytest.mark.parametrize("experts", [1, 4, 6, 48])
def test_capacity_holds_every_load(experts: int) -> None:
    """No load that a plan accepts takes more rows than its capacity, and without tiles nothing is added."""
    draw = random.Random(experts)
    for rows in [0, 1, 127, 128, 129, *(draw.randrange(100_000) for _ in range(50))]:
        assert load.padded_rows(rows, experts, 128) <= load.padded_capacity(rows, experts, 128)
        assert load.padded_capacity(rows, experts, 1) == rows


def test_device_rows_by_hand() -> None:
    """Room grows with the factor, rounds half up, and stops at what the ranks and the local experts let through."""
    assert load.device_rows(8, 2048, 6, 384, 8.0) == 98_304
    assert load.device_rows(8, 3, 1, 16, 1.5) == 5
    assert load.device_rows(3, 2048, 6, 384, 8.0) == load.device_rows(3, 2048, 6, 384, 1e308) == 3 * 12_288
    assert load.device_rows(8, 10, 6, 8, 8.0) == load.row_limit(8, 10, 6, 8) == 80


def refusal(function: object, *arguments: object) -> str:
    """Return the message with which a call is refused."""
    assert callable(function)
    with pytest.raises(PmlkitError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("imbalance", [0.5, 0, -3.0, math.nan, math.inf])
def test_refused_imbalance(imbalance: float) -> None:
    """An imbalance that cannot be is named with its place and what to pass."""
    assert refusal(receive_rows, 8, 4, 2, imbalance) == (
        f"imbalance {imbalance!r} in receive_rows: rank 0 over the mean rank is a finite number of at least 1; "
        "pass 1 for an equal load"
    )


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8"])
def test_refused_sizes(bad: object) -> None:
    """A size that is not a positive whole number is named with its place, whichever it is."""
    rest = "is not a positive whole number: pass 1 or more"
    assert refusal(receive_rows, bad, 4, 2, 1) == f"ep {bad!r} in receive_rows {rest}"
    assert refusal(receive_rows, 8, bad, 2, 1) == f"tokens {bad!r} in receive_rows {rest}"
    assert refusal(receive_rows, 8, 4, bad, 1) == f"top_k {bad!r} in receive_rows {rest}"
    assert refusal(load.split_even, 4, bad) == f"experts {bad!r} in split_even {rest}"


def test_refused_shapes() -> None:
    """Sizes that do not fit together name the next ones that do."""
    assert refusal(load.split_even, -1, 2) == "rows -1 in split_even is negative: pass the rows that the rank received"
    for ep, remedy in ((7, "use 6 or 8"), (400, "use 384")):
        sizes = {"experts": 384, "top_k": 6, "ep": ep}
        assert refusal(load.check_sizes, "a plan", sizes) == f"ep {ep} in a plan does not divide 384 experts: {remedy}"
    assert refusal(load.check_sizes, "a plan", {"experts": 4, "top_k": 5, "ep": 2}) == (
        "top_k 5 in a plan is more than 4 experts: pass 4 or fewer"
    )
    assert refusal(load.check_blocks, "a plan", "mxfp8", {"width": 100}) == (
        "width 100 in a plan is no multiple of mxfp8's block, 32: use 128"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bf16", "train"), "unknown mode 'train' in a plan: did you mean 'training'?"),
        (("mxfp9", "training"), "unknown precision 'mxfp9': did you mean 'mxfp8'?"),
        (("fp16", "training"), "precision 'fp16' in a plan has no expert layer: use bf16 or mxfp8 or nvfp4"),
        (
            ("nvfp4", "training"),
            "precision 'nvfp4' in a plan is for inference only: use mode 'inference', or bf16 or mxfp8",
        ),
        (("mxfp8", "training", "stage"), "unknown pipeline 'stage' in a plan: did you mean 'staged'?"),
        (("mxfp8", "training", "standard"), "pipeline 'standard' in a plan does not take mxfp8: use staged or mega"),
        (("nvfp4", "inference", "standard"), "pipeline 'standard' in a plan does not take nvfp4: use staged or mega"),
        (("bf16", "inference", "mega"), "pipeline 'mega' in a plan does not take bf16: use standard"),
        (("bf16", "training", "staged"), "pipeline 'staged' in a plan does not take bf16: use standard"),
    ],
)
def test_refused_formats(arguments: tuple[str, ...], message: str) -> None:
    """Each combination of format, mode and pipeline that does not exist is refused with one that does."""
    assert refusal(load.check_format, "a plan", *arguments) == message


def test_accepted_formats() -> None:
    """Block formats are accepted in both of their pipelines, and where no pipeline matters."""
    for pipeline in ("staged", "mega", None):
        load.check_format("a plan", "mxfp8", "training", pipeline)
        load.check_format("a plan", "nvfp4", "inference", pipeline)
    load.check_format("a plan", "bf16", "training", "standard")
