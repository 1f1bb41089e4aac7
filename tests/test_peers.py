"""Bound subjects: pytorch-metric-learning and the references agree, with each other and with the exact answer."""

import math
from importlib import import_module

import pytest
import torch
from pytorch_metric_learning import losses, miners

from pmlkit.bench.peers import bind_pml
from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.losses.bind import LossInputs, bind_reference, exact, make_inputs
from pmlkit.precision import precision
from tests.test_losses import OPS, PAIR_OPS, assert_equal, clusters, one_thread, rows

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def labels_of(layout, n):
    index = torch.arange(n)
    return {
        "same": index * 0,
        "different": index,
        "pairs": index // 2,
        "imbalanced": (index - n // 3).clamp(min=0),
        "fours": index // 4,
        "random": torch.randint(max(2, n // 3), (n,), generator=torch.Generator().manual_seed(n)),
    }[layout]


def case_of(op, n, d, precision_key="fp64", **options):
    classes = {"C": n // 2 + 3} if op == "proxy_anchor" else {"per_class": 4}
    return Case(op=op, precision=precision_key, shape={"N": n, "D": d, **classes}, options=options)


def pair(bound):
    loss = bound.forward()
    return loss.detach(), list(torch.autograd.grad(loss, bound.leaves))


def assert_same(op, emb, labels, **options):
    """Both subjects give one loss and one set of gradients for these rows."""
    case = case_of(op, *emb.shape, **options)
    proxies = rows(int(labels.max()) + 3, emb.shape[1], 9).requires_grad_() if op == "proxy_anchor" else None
    inputs = LossInputs(emb.requires_grad_(), labels, proxies)
    assert_equal(pair(bind_reference(case, inputs)), pair(bind_pml(case, inputs)))


def with_references(op, emb, labels, ref, ref_labels):
    """Loss and gradients of rows and reference rows: ours, then those of pytorch-metric-learning."""
    emb, ref = emb.requires_grad_(), ref.requires_grad_()
    loss = import_module(f"pmlkit.losses.{op}").reference(emb, labels, ref_emb_MD=ref, ref_labels_M=ref_labels)
    refs = {"ref_emb": ref, "ref_labels": ref_labels}
    if op == "batch_hard_triplet":
        peer = losses.TripletMarginLoss()(emb, labels, miners.BatchHardMiner()(emb, labels, **refs), **refs)
    else:
        peer = {"contrastive": losses.ContrastiveLoss, "ntxent": losses.NTXentLoss}[op]()(emb, labels, **refs)
    return [(value.detach(), list(torch.autograd.grad(value, (emb, ref), materialize_grads=True))) for value in (loss, peer)]


@pytest.mark.parametrize("layout", ["same", "different", "pairs", "imbalanced", "fours", "random"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [2, 3, 25, 26, 64, 97])
def test_reference_equals_pml(op, n, layout):
    """Loss and every gradient are equal in float64, either side of PML's change of distance path at 25 rows."""
    for d in (1, 3, 16, 128):
        assert_same(op, rows(n, d), labels_of(layout, n))


@pytest.mark.parametrize("op", PAIR_OPS)
@pytest.mark.parametrize(("n", "m"), [(3, 5), (10, 40), (40, 17)])
def test_reference_rows_equal_pml(op, n, m):
    """With reference rows both gradients are equal too, and (i, i) is an ordinary pair."""
    ours, theirs = with_references(op, rows(n, 16), torch.arange(n) // 2, rows(m, 16, 1), torch.arange(m) // 2)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("contrastive", {"pos_margin": 0.9, "neg_margin": 1.6}),
        ("batch_hard_triplet", {"margin": 0.7}),
        ("ntxent", {"temperature": 0.5}),
        ("proxy_anchor", {"margin": 0.3, "alpha": 8}),
    ],
)
def test_options_equal_pml(op, options):
    """Margins, temperature and alpha of a case reach both subjects and mean the same."""
    assert_same(op, rows(40, 16), torch.arange(40) // 4, **options)


@pytest.mark.parametrize(("op", "options"), [("contrastive", {"neg_margin": 1.5}), ("batch_hard_triplet", {"margin": 2.5})])
def test_near_rows_equal_pml(op, options):
    """Clusters 0.03 wide, whose distances are computed again: still equal. Copies too, up to 25 rows."""
    assert_same(op, clusters(0.03, n=64, d=16), torch.arange(64) // 4, **options)
    assert_same(op, rows(12, 16).repeat(2, 1), torch.arange(24) % 12 // 2, **options)


@pytest.mark.parametrize("op", PAIR_OPS)
def test_one_query_with_two_references(op):
    """One positive and one negative pair: ours is the formula's value, where 2.9.0 gives 0 for two losses."""
    query, refs = rows(1, 8), rows(2, 8, 3).flip(0)
    cos = torch.nn.functional.cosine_similarity(query, refs)
    near, far = (2 - 2 * cos).sqrt().tolist()
    wanted = {
        "contrastive": near + max(0, 1 - far),
        "batch_hard_triplet": max(0, near - far + 0.05),
        "ntxent": math.log1p(math.exp(float(cos[1] - cos[0]) / 0.07)),
    }[op]
    ours, theirs = with_references(op, query, torch.zeros(1, dtype=torch.int64), refs, torch.arange(2))
    assert float(ours[0]) == pytest.approx(wanted, rel=1e-12) and wanted > 0
    assert float(theirs[0]) == (pytest.approx(wanted) if op == "batch_hard_triplet" else 0)


@pytest.mark.parametrize("op", OPS)
def test_tiny_rows(op):
    """Rows near 1e-20 have PML's loss, but the gradient 0 of a constant where PML's is 1e5 to 1e13."""
    case = case_of(op, 16, 8)
    plain = make_inputs(case)
    inputs = LossInputs((plain.emb_ND.detach() * 1e-20).requires_grad_(), plain.labels_N, plain.proxies_CD)
    (loss, grads), (peer_loss, peer_grads) = pair(bind_reference(case, inputs)), pair(bind_pml(case, inputs))
    assert float(loss) == pytest.approx(float(peer_loss), rel=1e-10) and loss > 0
    assert (grads[0] == 0).all() and peer_grads[0].norm() > 1e4


@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("key", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_subjects_pass_their_check(op, key, n):
    """Each subject is within its precision's tolerance of the exact answer, PML's miner at its own triplets."""
    case, tolerance = case_of(op, n, 128, key), precision(key).tolerance
    inputs = make_inputs(case)
    ours, theirs = bind_reference(case, inputs), bind_pml(case, inputs)
    assert_equal(pair(ours), exact(case, inputs), tolerance)
    assert_equal(pair(theirs), exact(case, inputs, theirs.mined and theirs.mined()), tolerance)
    assert ours.mined is None or all(torch.equal(a, b) for a, b in zip(ours.mined(), ours.mined(), strict=True))
    assert (ours.mined is not None) == (theirs.mined is not None) == (op == "batch_hard_triplet")


@pytest.mark.parametrize("key", ["fp32", "bf16", "fp16"])
def test_only_pml_changes_the_type_of_proxies(key):
    """Its parameter becomes the rows' type and its gradient can be read there; ours stays float32, as do the inputs."""
    case = case_of("proxy_anchor", 64, 16, key)
    inputs = make_inputs(case)
    ours, theirs = bind_reference(case, inputs), bind_pml(case, inputs)
    for bound, dtype in ((ours, torch.float32), (theirs, inputs.emb_ND.dtype), (theirs, inputs.emb_ND.dtype)):
        for leaf in bound.leaves:
            leaf.grad = None
        bound.forward().backward()
        emb, proxies = bound.leaves
        assert emb is inputs.emb_ND and emb.grad is not None and emb.grad.dtype == inputs.emb_ND.dtype
        assert proxies.grad is not None and proxies.dtype == proxies.grad.dtype == dtype
    assert inputs.proxies_CD is not None and inputs.proxies_CD.dtype == torch.float32


def test_inputs_are_reproducible():
    """A case fixes its inputs: the seed matters, the precision only rounds, labels and proxies are as described."""
    for op in ("ntxent", "proxy_anchor"):
        case = case_of(op, 64, 16)
        one, two, low = make_inputs(case), make_inputs(case), make_inputs(case_of(op, 64, 16, "bf16"))
        assert torch.equal(one.emb_ND, two.emb_ND) and torch.equal(one.labels_N, two.labels_N)
        assert torch.equal(one.emb_ND.bfloat16(), low.emb_ND) and torch.equal(one.labels_N, low.labels_N)
        other = Case(op=op, precision="fp64", shape=case.shape, seed=1)
        assert not torch.equal(make_inputs(other).emb_ND, one.emb_ND)
        assert one.labels_N.dtype == torch.int64 and all(leaf.is_leaf and leaf.requires_grad for leaf in low.leaves)
    assert one.proxies_CD is not None and low.proxies_CD is not None
    assert torch.equal(one.proxies_CD.float(), low.proxies_CD) and one.proxies_CD.dtype == torch.float64
    assert one.proxies_CD.std().item() == pytest.approx((2 / 35) ** 0.5, rel=0.1)
    labels = make_inputs(case_of("ntxent", 64, 16)).labels_N
    assert labels.bincount().tolist() == [4] * 16 and not torch.equal(labels, labels.sort().values)


def test_impossible_cases_are_refused():
    """Unknown losses, shapes without classes, block formats and missing proxies: an error that names the remedy."""
    good = case_of("ntxent", 8, 4)
    inputs = make_inputs(good)
    for op in ("ntxnt", "work", "moe_layer"):
        with pytest.raises(PmlkitError, match="file of its name"):
            bind_reference(Case(op=op, precision="fp32", shape=good.shape), inputs)
        with pytest.raises(PmlkitError, match="add a case"):
            bind_pml(Case(op=op, precision="fp32", shape=good.shape), inputs)
    with pytest.raises(PmlkitError, match="needs proxies"):
        bind_pml(case_of("proxy_anchor", 8, 4), inputs)
    for shape in ({"N": 8, "D": 4}, {"N": 8, "D": 4, "C": 2, "per_class": 2}, {"N": 8, "per_class": 2}):
        with pytest.raises(PmlkitError, match="exactly one of C and per_class"):
            make_inputs(Case(op="ntxent", precision="fp32", shape=shape))
    with pytest.raises(PmlkitError, match="no inputs in 'mxfp8'"):
        make_inputs(Case(op="ntxent", precision="mxfp8", shape=good.shape))
