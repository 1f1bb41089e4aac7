"""The loss references: calculus, precision, the edges of their contract, memory."""

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pmlkit.errors import PmlkitError
from pmlkit.losses import batch_hard_triplet, contrastive, mining, ntxent, proxy_anchor
from pmlkit.losses import rows as shared_rows

PAIR_OPS = ["contrastive", "batch_hard_triplet", "ntxent"]
OPS = [*PAIR_OPS, "proxy_anchor"]
CLASSES = 8  # proxies in the edge tests, whose labels stay below it


@pytest.fixture(autouse=True)
def one_thread():
    """One thread: the tests share their machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows(n, d, seed=0, dtype=torch.float64):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def clusters(width, dtype=torch.float64, n=128, d=128):
    """Four rows a class, `width` from their centre on the unit sphere, then five times as long."""
    centres = torch.nn.functional.normalize(rows(n // 4, d, 1))[torch.arange(n) // 4]
    return ((centres + rows(n, d, 2) * width / d**0.5) * 5).to(dtype)


def ours(op, emb, labels, **options):
    """Loss and gradients of the reference; proxies and reference rows are taken from the options."""
    proxies = [options.pop("proxies").detach().clone().requires_grad_()] if op == "proxy_anchor" else []
    leaves = [emb.detach().clone().requires_grad_(), *proxies]
    if "ref_emb_MD" in options:
        options["ref_emb_MD"] = options["ref_emb_MD"].detach().clone().requires_grad_()
        leaves.append(options["ref_emb_MD"])
    scale = options.pop("grad_output", 1.0)
    loss = import_module(f"pmlkit.losses.{op}").reference(leaves[0], labels, *proxies, **options)
    grads = torch.autograd.grad(loss, leaves, torch.tensor(scale, dtype=loss.dtype))
    return loss.detach(), [grad.double() / scale for grad in grads]


def assert_equal(got, wanted, tolerance=1e-10, floor=1e-13):
    """Norm of every difference against the norm of the reference; the floor is for gradients that vanish."""
    for value, reference in zip([got[0], *got[1]], [wanted[0], *wanted[1]], strict=True):
        error = (value.double() - reference.double()).norm()
        assert error <= tolerance * reference.double().norm() + floor, (value, reference)


def edge_case(op, emb, labels=None, **options):
    labels = torch.arange(len(emb)) // 3 % CLASSES if labels is None else labels
    if op == "proxy_anchor":
        options["proxies"] = rows(CLASSES, emb.shape[1], 5, torch.promote_types(emb.dtype, torch.float32))
    return ours(op, emb, labels, **options)


@pytest.mark.parametrize("make", [rows, lambda n, d: clusters(0.1, n=n, d=d)], ids=["far", "near"])
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op, make):
    """The gradient of every input is the derivative of the loss, for near pairs and for reference rows too."""
    emb, other, labels = make(8, 3).requires_grad_(), make(12, 3)[4:].clone().requires_grad_(), torch.arange(8) // 2
    reference = import_module(f"pmlkit.losses.{op}").reference
    if op == "proxy_anchor":
        assert torch.autograd.gradcheck(lambda x, q: reference(x, labels, q), (emb, other))
        return
    options: dict[str, Any] = {"margin": 2.5} if op == "batch_hard_triplet" else {}
    assert torch.autograd.gradcheck(lambda x: reference(x, labels, **options), (emb,))
    options["ref_labels_M"] = labels
    assert torch.autograd.gradcheck(lambda x, z: reference(x, labels, ref_emb_MD=z, **options), (emb, other))


@pytest.mark.parametrize("width", [None, 0.3, 0.03, 0.003], ids=["random", "trained", "tight", "collapsed"])
@pytest.mark.parametrize("op", OPS)
def test_precision_limits(op, width):
    """Loss and gradients of rounded inputs stay near float64: 2e-6 (collapsed 1e-5), 4e-3, 1e-3."""
    single = 1e-5 if width == 0.003 else 2e-6
    labels = torch.arange(128) // 4
    for dtype, limit in ((torch.float32, single), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)):
        emb = rows(128, 128, dtype=dtype) if width is None else clusters(width, dtype)
        options: dict[str, Any] = {"margin": 2.5} if op == "batch_hard_triplet" else {}
        wide = dict(options)
        if op == "proxy_anchor":
            options["proxies"] = rows(32, 128, 3, torch.float32)
            wide["proxies"] = options["proxies"].double()
        # Loss scaling: float16 has no digits left for gradients near 1e-6.
        loss, grads = ours(op, emb, labels, grad_output=1024.0, **options)
        exact = ours(op, emb.double(), labels, **wide)
        assert loss.dtype == torch.float32
        assert_equal((loss, []), (exact[0], []), 2e-6)
        assert_equal((loss, grads), exact, limit)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("op", OPS)
def test_labels_of_any_integer_type(op, dtype):
    """Labels are compared by value, whatever integer holds them."""
    labels = torch.arange(12) // 2
    assert_equal(edge_case(op, rows(12, 8), labels.to(dtype)), edge_case(op, rows(12, 8), labels), 0)


@pytest.mark.parametrize("op", OPS)
def test_strides_do_not_matter(op):
    """A transposed view gives the numbers of a contiguous batch, duplicates included."""
    emb = rows(20, 8)[torch.arange(40) % 20]
    assert_equal(edge_case(op, emb.T.contiguous().T), edge_case(op, emb), 1e-13)


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_batches_without_pairs(op, n):
    """No rows or one row: a zero that is still connected to every input, except the proxies' own pull."""
    loss, grads = edge_case(op, rows(n, 8))
    if op == "proxy_anchor" and n:
        assert loss > 0 and all(grad.norm() > 0 for grad in grads)
    else:
        assert loss == 0 and all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies", [12, 26], ids=["n24", "n52"])
def test_duplicates(copies, dtype):
    """Identical rows: distance 0, no positive term, gradient 0, first index in a tie, at every N and type."""
    emb, labels = rows(copies, 16, dtype=dtype).repeat(2, 1), (torch.arange(copies) // 2).repeat(2)
    distance = torch.nn.functional.normalize(emb.double()).unsqueeze(1)
    distance = (distance - distance.transpose(0, 1)).norm(dim=2)
    same = labels[:, None] == labels
    pull, push = distance[same & (distance > 0)], (1 - distance)[~same & (distance < 1)]
    loss, _ = ours("contrastive", emb, labels)
    wanted = pull.mean() + (push.mean() if len(push) else 0)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    anchor, positive, negative = mining.mine(emb, labels)
    assert anchor.tolist() == list(range(2 * copies)) and negative.max() < copies
    assert torch.equal(positive, distance.masked_fill(~same | torch.eye(2 * copies).bool(), -1).argmax(1))
    assert torch.equal(negative, distance.masked_fill(same, math.inf).argmin(1))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [12, 40])
def test_identical_rows(op, n):
    """A collapsed batch: the stuck values 1, margin and log(1 + negatives), with no gradient."""
    labels = torch.arange(n) // 4 % CLASSES
    for dtype in (torch.float64, torch.float32, torch.float16):
        loss, grads = edge_case(op, rows(1, 16, dtype=dtype).repeat(n, 1), labels)
        if op == "proxy_anchor":
            assert math.isfinite(loss) and all(grad.isfinite().all() for grad in grads)
            continue
        negatives = (labels[:, None] != labels).sum(1)
        positives = n - 1 - negatives
        log_mean = float((positives * (1 + negatives).double().log()).sum() / positives.sum())
        wanted = {"contrastive": 1.0, "batch_hard_triplet": 0.05, "ntxent": log_mean}[op]
        assert float(loss) == pytest.approx(wanted, rel=1e-6)
        assert grads[0].norm() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_zero_row(op, dtype):
    """A zero row is a constant: gradient 0, at distance 1 from all unit rows, which is not below the margin 1."""
    emb = rows(40, 16, dtype=dtype)
    emb[3] = 0
    loss, grads = edge_case(op, emb)
    assert_equal((loss, []), (edge_case(op, emb.double())[0], []), 2e-6)
    assert (grads[0][3] == 0).all() and all(grad.isfinite().all() and grad.norm() < 100 for grad in grads)
    if op == "contrastive":
        three = torch.tensor([[0, 0], [1, 0], [1, 1]], dtype=dtype)
        assert float(ours(op, three, torch.arange(3))[0]) == pytest.approx(1 - (2 - 2**0.5) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_not_finite_in_means_nan_out(op, dtype, bad):
    """One NaN or Inf makes the loss and every entry of every gradient NaN, wherever it is and whoever has pairs."""
    emb = rows(30, 8, dtype=dtype)
    for row, labels in ((0, None), (29, torch.arange(30) % CLASSES), (4, torch.zeros(30, dtype=torch.int64))):
        broken = emb.clone()
        broken[row, 2] = bad
        loss, grads = edge_case(op, broken, labels)
        assert loss.isnan() and all(grad.isnan().all() for grad in grads)
    others = {"proxies": broken} if op == "proxy_anchor" else {"ref_emb_MD": broken, "ref_labels_M": torch.ones(30)}
    loss, grads = ours(op, emb, torch.zeros(30, dtype=torch.int64), **others)
    assert loss.isnan() and all(grad.isnan().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_huge_rows(op, dtype):
    """Rows near 1e30, whose squares overflow float32, have the loss of their directions."""
    emb = rows(40, 16).to(dtype)
    plain = edge_case(op, emb)
    for scale in (2.0**66, 2.0**100):
        loss, grads = edge_case(op, emb * scale)
        grads[0] *= scale
        assert_equal((loss, grads), plain, 4e-3 if dtype == torch.bfloat16 else 1e-6)


class LargestOutput(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(out) if torch.is_tensor(leaf))])
        return out


@pytest.mark.parametrize("op", PAIR_OPS)
def test_memory_stays_quadratic(op, monkeypatch):
    """Even when every pair is near, nothing larger than a list of all pairs is made, and few matrices are kept."""
    monkeypatch.setattr(shared_rows, "_CHUNK", 1)
    n, kept = 96, {}
    emb, labels = clusters(0.03, n=4, d=64).repeat(n // 4, 1), torch.arange(n) // 8
    emb = (emb[0] + 0.01 * rows(n, 64)).requires_grad_()

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    largest = LargestOutput()
    with largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        import_module(f"pmlkit.losses.{op}").reference(emb, labels).backward()
    assert largest.elements <= 2 * n * n
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) <= 12 * n * n * 8


def test_bad_arguments_are_refused():
    """Labels that do not fit, half a reference set, labels without a proxy: an error that says so."""
    emb, labels = rows(4, 3), torch.arange(4)
    for module in (contrastive, batch_hard_triplet, ntxent):
        with pytest.raises(PmlkitError, match="one label a row"):
            module.reference(emb, labels[:1])
        with pytest.raises(PmlkitError, match="both or neither"):
            module.reference(emb, labels, ref_emb_MD=emb)
    with pytest.raises(PmlkitError, match="one label a row"):
        proxy_anchor.reference(emb, labels[:1], emb)
    for outside in (labels, labels - 1):
        with pytest.raises(PmlkitError, match=r"outside 0\.\.2"):
            proxy_anchor.reference(emb, outside, emb[:3])
