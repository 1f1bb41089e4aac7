"""The fused losses against their float64 references: on a processor in Triton's interpreter, on a GPU as they are."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pmlkit import paths
from pmlkit.bench.check import check_answer
from pmlkit.campaign import loss_case
from pmlkit.errors import PmlkitError
from pmlkit.losses import arrange, batch_hard_triplet, fused, mining, tiling
from pmlkit.losses.batch_hard_triplet import BatchHardTripletLoss, batch_hard_triplet_loss
from pmlkit.losses.bind import make_inputs
from pmlkit.losses.contrastive import ContrastiveLoss, contrastive_loss
from pmlkit.losses.floor import bind_floor
from pmlkit.losses.fused import fusable
from pmlkit.losses.launch import Room
from pmlkit.losses.module import FusedLoss
from pmlkit.losses.ntxent import NTXentLoss, ntxent_loss
from pmlkit.losses.proxy_anchor import ProxyAnchorLoss, proxy_anchor_loss
from pmlkit.losses.tiling import Shape, parts, tiles

# The interpreter's arithmetic is numpy's, which warns where a GPU returns NaN or Inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Relative error of the value. Beside bfloat16 rows proxies are rounded to 11 digits.
VALUES = {torch.float32: 1e-6, torch.bfloat16: 4e-6, torch.float16: 4e-6}
# Norm of the difference over norm of the float64 gradient of the same rows: what the contract of the losses asks.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
PAIRWISE: dict[str, Callable[..., FusedLoss]] = {
    "contrastive": ContrastiveLoss,
    "batch_hard_triplet": BatchHardTripletLoss,
    "ntxent": NTXentLoss,
}
CLASSES, PROXY = 20, "proxy_anchor"
ALL = [*PAIRWISE, PROXY]


def module(name: str, width: int = 16, dtype: torch.dtype = torch.float32) -> FusedLoss:
    """Return a loss; the proxies, if it has any, are the same every time."""
    if name != PROXY:
        return PAIRWISE[name]()
    torch.manual_seed(3)
    return ProxyAnchorLoss(CLASSES, width).to(DEVICE)


def shape(n: int, m: int, width: int, dtype: torch.dtype, tf32: bool = False) -> Shape:
    """Return the shape of n rows against m reference rows, or without them against themselves."""
    return Shape(n, m or n, width, dtype, dtype, bool(m), (), tf32)


def value_limit(name: str, dtype: torch.dtype) -> float:
    """Return the largest relative error of a loss."""
    return 4e-5 if name == PROXY and dtype == torch.bfloat16 else VALUES[dtype]


@dataclass
class Seen:
    """A loss and its gradients, kernels' and float64's."""

    loss: Tensor
    grads: list[Tensor]
    exact_loss: Tensor
    exact_grads: list[Tensor]

    def errors(self) -> list[float]:
        """Return the relative error of the loss, then of every gradient; against 0.1 where the truth is smaller.

        Parallel rows, for example, are at distance 0 in float64 and 6e-8 apart in float32.
        """
        pairs = zip([self.loss, *self.grads], [self.exact_loss, *self.exact_grads], strict=True)
        return [float((got.double() - want).norm() / want.norm().clamp(min=0.1)) for got, want in pairs]


def rows(kind: str, n: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of a kind, four a class in random order, and their labels."""
    draw = torch.Generator().manual_seed(seed)
    labels = (torch.arange(n) // 4)[torch.randperm(n, generator=draw)]
    centres = torch.randn(n, width, generator=draw, dtype=torch.float64)[labels]
    noise = torch.randn(n, width, generator=draw, dtype=torch.float64)
    spread = {"random": 1e6, "trained": 0.5, "tight": 0.021}[kind]  # tight: distances of about 0.03 within a class
    return (centres + spread * noise).div(max(1.0, spread)).to(dtype).to(DEVICE), labels.to(DEVICE)


def see(
    name: str, emb: Tensor, labels: Tensor, ref: Tensor | None = None, ref_labels: Tensor | None = None, grad: float = 1.0
) -> Seen:
    """Evaluate a loss and its gradients by the kernels and by the reference in float64.

    Batch-hard is compared at its own triplets; that they are the hardest is a test of its own.
    """
    loss_of = module(name, emb.shape[1])
    leaves = [leaf.clone().requires_grad_() for leaf in (emb, ref) if leaf is not None]
    assert all(fusable(leaf) for leaf in leaves)
    loss = loss_of(leaves[0], labels, ref_emb=leaves[1] if ref is not None else None, ref_labels=ref_labels)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    reference = importlib.import_module(f"pmlkit.losses.{name}").reference
    if isinstance(loss_of, ProxyAnchorLoss):
        leaves.append(loss_of.proxies)
        wide.append(loss_of.proxies.detach().double().requires_grad_())
        exact = reference(wide[0], labels, wide[1])
    else:
        others = {"ref_emb_MD": wide[1] if ref is not None else None, "ref_labels_M": ref_labels}
        triplets = {"triplets": mining.mined(loss)} if name == "batch_hard_triplet" else {}
        exact = reference(wide[0], labels, **others, **triplets)
    grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, grad))
    exact_grads = torch.autograd.grad(exact, wide, torch.full_like(exact, grad))
    return Seen(loss.detach(), list(grads), exact.detach(), list(exact_grads))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("n", "width"), [(1, 3), (2, 3), (25, 64), (33, 100), (70, 16)])
def test_against_float64(name: str, dtype: torch.dtype, n: int, width: int) -> None:
    """Value and gradient at sizes on and off the tiles."""
    errors = see(name, *rows("random", n, width, dtype)).errors()
    assert errors[0] <= value_limit(name, dtype)
    assert max(errors[1:]) <= LIMITS[dtype]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [2, 7])
def test_rows_of_one_number(name: str, n: int) -> None:
    """Such rows have only a direction, +1 or -1: the gradient is 0, and stays so but for rounding.

    Not so the contrastive loss: parallel rows that round apart are counted as positives at a distance of 6e-8.
    """
    seen = see(name, *rows("random", n, 1, torch.float32))
    assert name == "contrastive" or seen.errors()[0] <= 1e-6
    assert float(seen.grads[0].abs().max()) <= 2e-5


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["trained", "tight"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_clusters(name: str, kind: str, dtype: torch.dtype) -> None:
    """Where rows of a class lie close together the product has lost the digits that the gradient needs."""
    errors = see(name, *rows(kind, 48, 128, dtype)).errors()
    assert errors[0] <= max(1e-5, value_limit(name, dtype))
    assert errors[1] <= 2 * LIMITS[dtype] if kind == "tight" else LIMITS[dtype]


def test_negatives_far_on_the_other_side() -> None:
    """Where all negatives of an anchor point away, a column that is not there must not weigh: T = 0.01, labels not 0."""
    emb = torch.tensor([[1.0, 0.05, 0], [-1, 0.02, 0.1], [-1, 0.03, -0.1]], device=DEVICE)
    labels = torch.tensor([5, 5, 1], device=DEVICE)
    leaf, wide = emb.clone().requires_grad_(), emb.double().requires_grad_()
    (grad,) = torch.autograd.grad(NTXentLoss(0.01)(leaf, labels), leaf)
    exact = importlib.import_module("pmlkit.losses.ntxent").reference(wide, labels, temperature=0.01)
    (want,) = torch.autograd.grad(exact, wide)
    assert float((grad.double() - want).norm()) <= 2e-5 * float(want.norm())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("n", "m", "dtype"), [(270, 0, torch.float32), (100, 290, torch.bfloat16), (260, 0, torch.bfloat16)])
def test_programs_that_share_a_block(name: str, n: int, m: int, dtype: torch.dtype) -> None:
    """Enough columns that several programs share a row block, forward and backward, on both sides."""
    emb, labels = rows("trained", n, 20, dtype)
    assert tiles(n, m or n, shape(n, m, 20, dtype)).splits > 1
    if name == PROXY:
        errors = see(name, emb, labels % CLASSES).errors()
    else:
        errors = see(name, emb, labels, *(rows("trained", m, 20, dtype, seed=1) if m else (None, None))).errors()
    assert max(errors) <= LIMITS[dtype]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_rows_of_length_one(name: str, dtype: torch.dtype) -> None:
    """Rows that were normalised before have fits just below 2, and pairs of two the largest weights there are."""
    emb = torch.nn.functional.normalize(rows("random", 64, 64, torch.float32)[0].double()).to(dtype)
    errors = see(name, emb, torch.arange(64, device=DEVICE) // 2 % CLASSES).errors()
    assert errors[0] <= value_limit(name, dtype)
    assert max(errors[1:]) <= LIMITS[dtype]
    pairs = see(name, emb[:38], torch.arange(38, device=DEVICE) // 2).errors()
    assert max(pairs[1:]) <= LIMITS[dtype]


def test_rows_that_are_not_there_push_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A margin beyond 1, a reference set, and rows that fill no block."""
    monkeypatch.setattr(tiling, "_BANDED", 64)
    fused._planned.cache_clear()
    (emb, labels), (ref, ref_labels) = rows("random", 35, 16, torch.float32), rows("random", 200, 16, torch.float32, seed=1)
    try:
        got = contrastive_loss(emb, labels, ref, ref_labels, neg_margin=1.2)
    finally:
        fused._planned.cache_clear()
    reference = importlib.import_module("pmlkit.losses.contrastive").reference
    want = reference(emb.double(), labels, neg_margin=1.2, ref_emb_MD=ref.double(), ref_labels_M=ref_labels)
    assert float(got) == pytest.approx(float(want), rel=1e-6)


def test_mining_against_the_batch_itself_with_other_labels() -> None:
    """A reference set at the batch's own address is one all the same."""
    emb, labels = rows("trained", 40, 16, torch.float32)
    others = {"ref_emb": emb[:30], "ref_labels": (labels[:30] + 1) % 10}
    picked = mining.mined(BatchHardTripletLoss()(emb.clone()[:].requires_grad_(), labels, **others))
    leaf = emb.requires_grad_()
    again = mining.mined(BatchHardTripletLoss()(leaf, labels, ref_emb=leaf[:30].detach(), ref_labels=others["ref_labels"]))
    assert all(torch.equal(one, other) for one, other in zip(picked, again, strict=True))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_longer_than_a_number_make_nan(name: str, dtype: torch.dtype) -> None:
    """A row of finite numbers whose length no float32 holds is no plausible value either."""
    emb, labels = rows("trained", 12, 16, dtype)
    emb[3] = 3e38
    leaf = emb.requires_grad_()
    loss = module(name)(leaf, labels)
    (grad,) = torch.autograd.grad(loss, leaf)
    assert bool(loss.isnan())
    assert bool(grad.isnan().all())


def test_a_temperature_divides() -> None:
    """Zero and negative temperatures are refused, by the module and by the function."""
    emb, labels = rows("random", 8, 4, torch.float32)
    for make in (lambda: NTXentLoss(0.0), lambda: ntxent_loss(emb, labels, temperature=-0.1)):
        with pytest.raises(PmlkitError, match="must be positive"):
            make()


@pytest.mark.parametrize("temperature", [0.5, 0.03, 0.028, 0.01])
@pytest.mark.parametrize("labels", [None, 0], ids=["four a class", "one class"])
def test_steep_and_flat_softmaxes(temperature: float, labels: int | None) -> None:
    """Above 0.0289 no exponential can overflow and no maximum is kept; both ways give float64's value and gradient."""
    emb, classes = rows("trained", 48, 32, torch.float32)
    classes = classes if labels is None else torch.zeros_like(classes)
    leaf, wide = emb.clone().requires_grad_(), emb.double().requires_grad_()
    loss = NTXentLoss(temperature)(leaf, classes)
    exact = importlib.import_module("pmlkit.losses.ntxent").reference(wide, classes, temperature=temperature)
    (grad,), (want,) = torch.autograd.grad(loss, leaf), torch.autograd.grad(exact, wide)
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=2e-6)
    assert float((grad.double() - want).norm()) <= 5e-6 * float(want.norm())


def test_the_floor_is_right() -> None:
    """The subject that costs as little as any fused loss can gives the first number of the rows and its gradient."""
    case = loss_case("contrastive", 48, "fp32")
    check = check_answer(case, inputs := make_inputs(case, DEVICE), bind_floor(case, inputs))
    assert check.rms_rel == 0
    assert check.reference == "its own value in float64"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [130, 300])
def test_rows_wider_than_a_program_keeps(name: str, width: int) -> None:
    """Several programs share the gradient's columns; each builds the similarities again."""
    assert max(see(name, *rows("trained", 20, width, torch.float32)).errors()) <= 2e-6


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("copies", [True, False])
def test_paths_of_large_batches(name: str, dtype: torch.dtype, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a large batch gets, on one that the interpreter can bear: its tiles, loops, order and, or not, ready copies."""
    monkeypatch.setattr(tiling, "_LARGE", 100)
    monkeypatch.setattr(tiling, "_BANDED", 100)
    monkeypatch.setattr(arrange, "_MOST_RANKED", 100)
    monkeypatch.setattr(batch_hard_triplet, "_LATE", 100)
    if not copies:
        monkeypatch.setattr(arrange, "_BYTES", -(2**24))
    fused._planned.cache_clear()
    emb, labels = rows("trained", 210, 32, dtype)
    try:
        errors = see(name, emb, labels % CLASSES if name == PROXY else labels).errors()
    finally:
        fused._planned.cache_clear()
    assert errors[0] <= value_limit(name, dtype)
    assert max(errors[1:]) <= LIMITS[dtype]


@pytest.mark.parametrize("name", ["contrastive", "batch_hard_triplet"])
def test_near_and_equal_rows_of_a_large_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in several classes: near negatives get their second look, and equal distances their first index."""
    monkeypatch.setattr(tiling, "_LARGE", 100)
    monkeypatch.setattr(tiling, "_BANDED", 100)
    monkeypatch.setattr(batch_hard_triplet, "_LATE", 100)
    fused._planned.cache_clear()
    emb, labels = rows("trained", 170, 32, torch.float32)
    emb[100:130] = emb[:3].repeat(10, 1)
    try:
        seen = see(name, emb, labels)
        if name == "batch_hard_triplet":
            picked = mining.mined(BatchHardTripletLoss()(emb.clone().requires_grad_(), labels))
            exact = mining.mine(emb.double(), labels)  # equal columns may round apart on a processor
            assert torch.equal(picked[0], exact[0])
            assert all(torch.equal(emb[got], emb[want]) for got, want in zip(picked[1:], exact[1:], strict=True))
    finally:
        fused._planned.cache_clear()
    assert max(seen.errors()) <= 4e-6


@pytest.mark.parametrize("most", [0, 4096], ids=["sorted", "ranked"])
@pytest.mark.parametrize(("n", "m"), [(1, 0), (77, 0), (70, 200), (140, 5)])
def test_rows_in_the_order_of_their_labels(most: int, n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, rank and class ranges of both sides are torch's stable sort and search, whoever sorts."""
    monkeypatch.setattr(arrange, "_MOST_RANKED", most)
    monkeypatch.setattr(arrange, "_blocks", lambda rows: (8, 128))
    draw = torch.Generator().manual_seed(n)
    labels = [torch.randint(-9, 9, (count,), generator=draw).to(DEVICE) * 2**33 for count in (n, m) if count]
    room = Room()
    arranged = arrange.arrange(shape(n, m, 16, torch.float32), room, own=0)
    buffer = torch.full((room.words + 16,), -1.0, dtype=torch.float64, device=DEVICE)
    given = [arrange.in_label_order(one) if arranged.sort else one for one in labels]
    emb = [torch.ones(len(one), 16, device=DEVICE) for one in labels]
    arranged.launch(room.words, 16)(emb[0], given[0], emb[-1], given[-1], buffer, buffer)
    for rows_labels, other, place in ((labels[0], labels[-1], arranged.at_x), (labels[-1], labels[0], arranged.at_z)):
        count, stride = len(rows_labels), arrange.padded(len(rows_labels))
        kept = buffer[place:].view(torch.int32)
        order, begin, end, rank = (kept[what * stride :][:count].long() for what in (3, 4, 5, 6))
        values, want = rows_labels.sort(stable=True)
        ordered = other.sort().values
        assert torch.equal(order, want)
        assert torch.equal(rank[want], torch.arange(count, device=DEVICE))
        assert torch.equal(begin, torch.searchsorted(ordered, values))
        assert torch.equal(end, torch.searchsorted(ordered, values, right=True))
    assert bool((buffer[room.words :].view(torch.int32)[:16] == 0).all())


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "m"), [(30, 50), (1, 2), (40, 5)])
def test_a_reference_set(name: str, dtype: torch.dtype, n: int, m: int) -> None:
    """Against other rows, of which the first share labels: gradients of both sides, (i, i) is a pair."""
    emb, labels = rows("trained", n, 64, dtype)
    ref, ref_labels = rows("trained", m, 64, dtype, seed=1)
    errors = see(name, emb, labels, ref, ref_labels).errors()
    assert max(errors) <= LIMITS[dtype]


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize(
    "labels",
    [[7] * 12, list(range(12)), [-5, 2**40] * 6, [0] * 11 + [1], [3, 3, *range(10, 20)]],
    ids=["one class", "all different", "two odd labels", "one stranger", "one pair"],
)
def test_label_layouts(name: str, labels: list[int]) -> None:
    """No positives, no negatives, a lone pair, labels that are no indices."""
    emb, _ = rows("trained", 12, 16, torch.float32)
    seen = see(name, emb, torch.tensor(labels, device=DEVICE))
    assert bool(torch.isfinite(seen.grads[0]).all())
    assert max(seen.errors()) <= 3e-6 or float(seen.exact_grads[0].norm()) == float(seen.grads[0].norm()) == 0


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_copies_and_a_zero_row(name: str, dtype: torch.dtype) -> None:
    """Copies are at distance 0 with gradient 0; a zero row gets gradient 0, where 2.9.0 gives 1e12."""
    emb, labels = rows("trained", 40, 64, dtype)
    emb[1], emb[2], emb[9] = emb[0], emb[0], 0
    labels[1] = labels[0]
    seen = see(name, emb, labels)
    assert float(seen.grads[0][9].abs().max()) == 0
    assert seen.errors()[1] <= 2 * LIMITS[dtype]


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_and_inf_reach_loss_and_every_gradient(name: str, bad: float, side: int) -> None:
    """One bad number anywhere makes everything NaN, never a plausible value."""
    emb, labels = rows("trained", 20, 16, torch.float32)
    ref, ref_labels = rows("trained", 30, 16, torch.float32, seed=1)
    (emb, ref)[side][3, 5] = bad
    seen = see(name, emb, labels, ref, ref_labels)
    assert bool(seen.loss.isnan())
    assert all(bool(grad.isnan().all()) for grad in seen.grads)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e30, 1e-9])
def test_rows_of_extreme_length(name: str, dtype: torch.dtype, size: float) -> None:
    """Lengths whose squares leave float32 change neither loss nor, over the length, the gradient."""
    emb, labels = rows("random", 24, 32, dtype)
    emb[5:9] *= size
    seen = see(name, emb, labels)
    assert seen.errors()[0] <= value_limit(name, dtype)
    for part in (slice(5, 9), slice(9, None)):
        got, want = seen.grads[0][part].double(), seen.exact_grads[0][part]
        assert float((got - want).norm() / want.norm()) <= 2 * LIMITS[dtype]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("dtype", "grad"), [(torch.float16, 65536.0), (torch.float32, 0.0), (torch.bfloat16, -3.0)], ids=str)
def test_the_gradient_of_the_loss_is_honoured(name: str, dtype: torch.dtype, grad: float) -> None:
    """Loss scaling, sign and zero."""
    seen = see(name, *rows("trained", 24, 32, dtype), grad=grad)
    assert seen.errors()[1] <= LIMITS[dtype] if grad else float(seen.grads[0].abs().max()) == 0


@pytest.mark.parametrize("name", ALL)
def test_twice_the_same_bits(name: str) -> None:
    """Deterministic over calls and over repeated backward passes; without gradients the value is the same."""
    emb, labels = rows("trained", 70, 16, torch.float32)
    leaf = emb.clone().requires_grad_()
    loss = module(name)(leaf, labels)
    once, again = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    other = module(name)(leaf, labels)
    assert torch.equal(once, again)
    assert torch.equal(loss, other)
    assert torch.equal(once, torch.autograd.grad(other, leaf)[0])
    with torch.no_grad():
        assert torch.equal(module(name)(emb, labels), loss)


@pytest.mark.parametrize("name", ALL)
def test_compiled_whole(name: str) -> None:
    """`torch.compile(fullgraph=True)` keeps the kernels as operators, forward and backward, and the same bits."""
    emb, labels = rows("trained", 24, 16, torch.float32)
    loss, leaf = module(name), emb.clone().requires_grad_()
    compiled = torch.compile(lambda x, y: 2 * loss(x, y), fullgraph=True, backend="aot_eager")
    compiled(leaf, labels).backward()
    got, leaf.grad = leaf.grad, None
    (2 * loss(leaf, labels)).backward()
    assert torch.equal(got, leaf.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALL)
def test_rows_that_are_not_contiguous(name: str) -> None:
    """A transposed view gives what its copy gives, before that has been seen and after."""
    emb, labels = rows("trained", 24, 16, torch.float32)
    view = emb.T.contiguous().T
    assert not view.is_contiguous()
    loss = module(name)
    assert torch.equal(loss(view, labels), loss(emb, labels))
    assert torch.equal(loss(view, labels), loss(emb, labels))


@pytest.mark.parametrize("name", ALL)
def test_tensors_like_earlier_ones_are_read_anew(name: str) -> None:
    """Other rows, labels and settings of the same sizes have their own loss, and one of 32-bit labels."""
    emb, labels = rows("trained", 24, 16, torch.float32)
    loss = module(name)
    first = loss(emb, labels)
    assert not torch.equal(loss(emb.flip(1) * 2 + 1, labels), first)
    assert not torch.equal(loss(emb, labels.flip(0)), first)
    assert torch.equal(loss(emb, labels.int()), first)
    if name != PROXY:
        assert not torch.equal(PAIRWISE[name](0.3)(emb, labels), first)
    assert torch.equal(loss(emb, labels), first)


@pytest.mark.parametrize("name", ALL)
def test_other_rows_go_to_the_reference(name: str) -> None:
    """float64, an empty batch and rows wider than the kernels take have the reference's value, in the graph."""
    for n, width, dtype in ((12, 16, torch.float64), (0, 16, torch.float32), (4, 1025, torch.float32)):
        emb, labels = rows("trained", n, width, dtype)
        emb.requires_grad_()
        assert not fusable(emb)
        module(name, width).to(dtype)(emb, labels).backward()
        assert emb.grad is not None
        assert bool(torch.isfinite(emb.grad).all())


@pytest.mark.parametrize("name", ALL)
def test_bad_input_is_refused(name: str) -> None:
    """What the kernels do not cover names what to use instead; what no loss takes names the place."""
    emb, labels = rows("random", 8, 4, torch.float32)
    loss = module(name, 4)
    loss(emb, labels)  # tensors that look like ones that were right are not checked again
    for arguments, message in (
        ((emb, labels, (labels, labels, labels)), r"indices_tuple is not fused.*pytorch_metric_learning\.losses"),
        ((emb, labels[:5]), r"one label a row, got labels \(5,\) for rows \(8, 4\)"),
        ((emb, labels.float()), "labels must be integers"),
        ((emb[0], labels), r"need floating-point rows \[N, D\]"),
        ((emb, labels, None, emb), "give both or neither|no ref_emb"),
    ):
        with pytest.raises(PmlkitError, match=message):
            loss(*arguments)
    with pytest.raises(PmlkitError, match=r"distance='cosine' is not fused: use pytorch_metric_learning\.losses"):
        PAIRWISE[name](distance="cosine") if name != PROXY else ProxyAnchorLoss(8, 4, distance="cosine")
    leaf = emb.clone().requires_grad_()
    with pytest.raises(PmlkitError, match="differentiable once"):
        torch.autograd.grad(loss(leaf, labels), leaf, create_graph=True)


def test_kernels_compile_for_every_architecture() -> None:
    """Ahead of time, without a GPU: Ampere, Hopper, datacentre and consumer Blackwell; shared memory fits each.

    Wide and narrow rows, every type; no thread keeps more than 3 KiB outside its registers.
    """

    def compiled(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.compile_kernels", name, "80", "90", "100", "120"]
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        return subprocess.run(command, cwd=paths.root(), env=environment, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a minute each
        for done in pool.map(compiled, ALL):
            assert done.returncode == 0, done.stderr[-2000:]
            lines = [line.split() for line in done.stdout.splitlines()]
            assert {line[3] for line in lines} == {"80", "90", "100", "120"}
            largest = {"80": 163, "90": 227, "100": 227, "120": 99}  # KiB of shared memory that a block may have
            assert all(int(line[4]) <= largest[line[3]] * 1024 for line in lines)
            assert max(int(line[5]) for line in lines) <= 3072  # ptxas can run out of registers long before it must


@pytest.mark.parametrize("n", [1, 33, 512, 2048, 4096, 32768, 2**20])
@pytest.mark.parametrize("width", [1, 64, 128, 1024])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_tiles_are_sensible(n: int, width: int, dtype: torch.dtype) -> None:
    """Powers of two that Triton takes; splits only where each has columns; memory beyond 16 MiB stays under 64 bytes a row."""
    t = tiles(n, n, shape(n, 0, width, dtype))
    assert all(size & (size - 1) == 0 for size in (t.BM, t.BN, t.BK, t.DC, t.splits))
    assert min(t.BM, t.BN, t.BK, t.DC) >= 16
    assert t.splits == 1 or t.splits * t.BN <= 2 * n
    assert width <= t.W
    assert t.W % t.BK == t.W % t.DC == 0
    assert 4 * t.partial(n) <= 64 * n + 16 * 2**20


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("reference_set", [False, True])
def test_the_mined_triplets_are_the_hardest(dtype: torch.dtype, reference_set: bool) -> None:
    """Anchors are exactly those that have both; distances are float64's hardest, but for differences no format can tell."""
    emb, labels = rows("trained", 70, 32, dtype)
    ref, ref_labels = rows("trained", 50, 32, dtype, seed=1) if reference_set else (emb, labels)
    others = {"ref_emb": ref, "ref_labels": ref_labels} if reference_set else {}
    a, p, n = mining.mined(BatchHardTripletLoss()(emb.clone().requires_grad_(), labels, **others))
    wide = {"ref_emb_MD": ref.double(), "ref_labels_M": ref_labels} if reference_set else {}
    exact = mining.mine(emb.double(), labels, **wide)
    unit, units = (torch.nn.functional.normalize(one.double()) for one in (emb, ref))
    assert torch.equal(a, exact[0])
    assert bool((labels[a] == ref_labels[p]).all() and (labels[a] != ref_labels[n]).all())
    for got, want in ((p, exact[1]), (n, exact[2])):
        squares = [(unit[a] - units[j]).square().sum(1) for j in (got, want)]
        assert float((squares[0] - squares[1]).abs().max()) <= 2e-6


def test_proxies_keep_their_type() -> None:
    """A half-precision batch leaves the proxies and their gradient in float32; one outside the classes makes all NaN."""
    emb, labels = rows("trained", 24, 16, torch.bfloat16)
    loss = ProxyAnchorLoss(CLASSES, 16).to(DEVICE)
    before = loss.proxies.detach().clone()
    loss(emb.requires_grad_(), labels).backward()
    assert loss.proxies.dtype == loss.proxies.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert torch.equal(loss.proxies, before)
    for stranger in (-1, CLASSES, 2**40):
        labels[3] = stranger
        assert bool(loss(emb, labels).isnan())


def test_tf32_is_a_choice() -> None:
    """The switch reaches the kernels' arithmetic, and the default is the exact one."""
    emb, labels = rows("random", 24, 32, torch.float32)
    assert parts(shape(24, 0, 32, torch.float32)) == 2
    assert parts(shape(24, 0, 32, torch.float32, tf32=True)) == 1
    assert float(ContrastiveLoss(tf32=True)(emb, labels)) == pytest.approx(float(ContrastiveLoss()(emb, labels)), rel=1e-3)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [512, 2048, 8192, 32768, 2**20])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_memory_beyond_the_rows(name: str, n: int, dtype: torch.dtype) -> None:
    """What a call keeps, what programs hand each other and sorted labels: at most 64 bytes a row or proxy and 16 MiB."""
    others = 1024 if name == PROXY else n
    other_type, settings = (
        (torch.float32, (0.1, 32.0)) if name == PROXY else (dtype, (0.05, 1.0)[: 1 + (name == "contrastive")])
    )
    plan = fused.plan_of(name, Shape(n, others, 128, dtype, other_type, name == PROXY, settings))
    assert 8 * plan.room + 16 * n * plan.sort <= 64 * (n + others * (name == PROXY)) + 16 * 2**20


def test_labels_may_be_a_view() -> None:
    """Every other label of a longer list is what its copy is."""
    emb, labels = rows("trained", 24, 16, torch.float32)
    wide, loss = torch.stack([labels, labels + 100], 1), ContrastiveLoss()
    wanted = loss(emb, labels)
    assert torch.equal(loss(emb, wide[:, 0]), wanted)


def test_steep_proxies_of_a_batch_of_one_class() -> None:
    """alpha = 100 with one class and columns that fill no tile: everything stays finite and right."""
    emb, _ = rows("trained", 10, 16, torch.float32)
    labels = torch.zeros(10, dtype=torch.int64, device=DEVICE)
    loss = ProxyAnchorLoss(3, 16, alpha=100).to(DEVICE)
    value = loss(emb, labels)
    (grad,) = torch.autograd.grad(value, loss.proxies)
    wide = loss.proxies.detach().double().requires_grad_()
    exact = importlib.import_module("pmlkit.losses.proxy_anchor").reference(emb.double(), labels, wide, alpha=100)
    (want,) = torch.autograd.grad(exact, wide)
    assert float((grad.double() - want).norm() / want.norm()) <= 5e-6


def test_classes_whose_pull_vanishes_are_in_the_batch() -> None:
    """Proxies that their rows lie on pull by less than float64 holds, at alpha = 1000: they count in the mean."""
    draw = torch.Generator().manual_seed(0)
    proxies = torch.nn.functional.normalize(torch.randn(3, 16, generator=draw)).to(DEVICE)
    emb = torch.cat([proxies[:2], torch.randn(1, 16, generator=draw).to(DEVICE)])
    labels = torch.arange(3, device=DEVICE)
    want = importlib.import_module("pmlkit.losses.proxy_anchor").reference(emb.double(), labels, proxies.double(), alpha=1000)
    assert float(proxy_anchor_loss(emb, labels, proxies, alpha=1000)) == pytest.approx(float(want), rel=1e-5)


def test_functions_are_their_modules() -> None:
    """Without a module, the same numbers, settings included."""
    emb, labels = rows("trained", 24, 16, torch.float32)
    proxies = torch.randn(CLASSES, 16, device=DEVICE)
    module_of = ProxyAnchorLoss(CLASSES, 16, margin=0.2, alpha=16).to(DEVICE)
    with torch.no_grad():
        module_of.proxies.copy_(proxies)
    for got, want in (
        (contrastive_loss(emb, labels, pos_margin=0.1, neg_margin=0.9), ContrastiveLoss(0.1, 0.9)(emb, labels)),
        (batch_hard_triplet_loss(emb, labels, margin=0.3), BatchHardTripletLoss(0.3)(emb, labels)),
        (ntxent_loss(emb, labels, temperature=0.2), NTXentLoss(0.2)(emb, labels)),
        (proxy_anchor_loss(emb, labels, proxies, margin=0.2, alpha=16), module_of(emb, labels)),
    ):
        assert torch.equal(got, want)
        assert float(got) > 0
