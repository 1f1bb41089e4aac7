"""Layers as subjects: inputs, gate and binders, on a processor and in Triton's interpreter."""

from collections.abc import Callable

import msgspec
import pytest
import torch

from pmlkit.bench.check_layer import check_layer, distance
from pmlkit.bench.layer import BoundLayer, LayerInputs, bind_kept, bind_staged, bind_standard, bound_layer, make_layer_inputs
from pmlkit.bench.peers_layer import bind_grouped, bind_scaled
from pmlkit.case import Case
from pmlkit.errors import PmlkitError
from pmlkit.losses.bind import Bound
from pmlkit.moe.reference import exact, reference

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes, for the interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]
CASE = Case(op="moe_layer", precision="bf16", mode="training", shape={"T": 26, "D": 64, "E": 5, "K": 2, "F": 32})
SMALL = msgspec.structs.replace(CASE, mode="inference")


def test_routes_are_even_and_distinct() -> None:
    """Counts of experts differ by at most one, a token's experts differ, and the same seed gives the same."""
    first, second = make_layer_inputs(CASE), make_layer_inputs(CASE)
    counts = torch.bincount(first.ids.flatten(), minlength=5)
    assert int(counts.max() - counts.min()) <= 1 and int(counts.sum()) == 52
    assert all(len(set(row.tolist())) == 2 for row in first.ids)
    assert torch.equal(first.w13, second.w13) and torch.equal(first.ids, second.ids)
    assert [leaf.requires_grad for leaf in first.leaves] == [True] * 4 and make_layer_inputs(SMALL).leaves == ()


def test_shapes_no_layer_has() -> None:
    """A size that is missing, more experts of a token than there are."""
    with pytest.raises(PmlkitError, match="has no F, K: a layer's shape"):
        make_layer_inputs(msgspec.structs.replace(CASE, shape={"T": 4, "D": 8, "E": 2}))
    with pytest.raises(PmlkitError, match="K = 3 of E = 2"):
        make_layer_inputs(msgspec.structs.replace(CASE, shape={"T": 4, "D": 8, "E": 2, "K": 3, "F": 8}))


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_standard_layer_passes(mode: str) -> None:
    """Output and gradients; what is kept is the gathered rows, h1 and the routing tables."""
    case = msgspec.structs.replace(CASE, mode=mode)
    inputs = make_layer_inputs(case)
    bound = bind_standard(case, inputs)
    assert isinstance(bound, BoundLayer)
    check = check_layer(case, inputs, bound)
    assert check.passed and 1e-4 < (check.rms_rel or 0) < 1e-2
    if mode == "training":
        rows, routing = 52 * (64 + 2 * 32) * 2, 4 * (3 * 52 + 6 + 1)
        assert bound.saved_bytes is not None and rows + routing <= bound.saved_bytes <= rows + routing + 1024
    else:
        assert bound.saved_bytes is None


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_the_staged_layer_passes_as_its_format_does(precision: str) -> None:
    """The limit is what the exact format is away, times 1.05."""
    case = msgspec.structs.replace(SMALL, precision=precision)
    inputs = make_layer_inputs(case)
    check = check_layer(case, inputs, bind_staged(case, inputs))  # pyright: ignore[reportArgumentType]
    assert check.passed and check.rms_rel is not None
    assert check.limit / 1.1 < check.rms_rel and {"mxfp8": 0.02, "nvfp4": 0.1}[precision] < check.limit < 0.4
    assert f"exact {precision}" in check.reference


@pytest.mark.parametrize("bind", [bind_staged, bind_kept])
def test_mxfp8_training_passes_as_its_format_does(bind: Callable[[Case, LayerInputs], Bound]) -> None:
    """Output and all gradients; what is kept beside inputs and quantised weights is h1 and the routing tables."""
    case = msgspec.structs.replace(CASE, precision="mxfp8")
    inputs = make_layer_inputs(case)
    bound = bind(case, inputs)
    assert isinstance(bound, BoundLayer)
    check = check_layer(case, inputs, bound)
    assert check.passed and check.rms_rel is not None and check.limit / 1.1 < check.rms_rel
    weights, h1 = 2 * 5 * 3 * 64 * 32, 52 * 2 * 32 * 2
    assert bound.saved_bytes is not None and h1 + weights < bound.saved_bytes < h1 + 1.2 * weights + 2048


def test_what_no_pipeline_computes() -> None:
    """Formats and modes that a pipeline lacks are unsupported, not errors."""
    for case, bind in ((SMALL, bind_staged), (msgspec.structs.replace(SMALL, precision="mxfp8"), bind_standard)):
        with pytest.raises(NotImplementedError, match="pipeline"):
            bind(case, make_layer_inputs(case))


@pytest.mark.parametrize("wrong", ["scale", "nan", "no gradient", "graph"])
def test_wrong_answers_fail(wrong: str) -> None:
    """An output 3 % off, one NaN, a gradient that is missing, a graph that answers something else."""
    inputs = make_layer_inputs(CASE)

    def layer() -> torch.Tensor:
        x = inputs.x.detach() if wrong == "no gradient" else inputs.x
        out = reference(x, inputs.ids, inputs.scores, inputs.w13, inputs.w2, rounded=exact).bfloat16()
        return out * {"scale": 1.03, "nan": float("nan")}.get(wrong, 1.0)

    bound = bound_layer(layer, inputs)
    assert isinstance(bound, BoundLayer)
    if wrong == "graph":
        bound = BoundLayer(bound.forward, bound.leaves, grad=bound.grad, eager=(layer().detach() * 1.5,))
    check = check_layer(CASE, inputs, bound)
    assert not check.passed
    assert (check.rms_rel is None) == (wrong in ("nan", "no gradient")) and (check.graph_accepted is False) == (
        wrong == "graph"
    )


def test_distances() -> None:
    """Norms over all, the largest difference with its row, or of weights its expert; a zero wanted counts as it is."""
    wanted = torch.ones(3, 4, dtype=torch.float64)
    value = wanted.clone()
    value[2, 1] = 4.0
    assert distance(value, wanted) == pytest.approx((3 / 12**0.5, 3.0, 2))
    assert distance(value[:, None], wanted[:, None]) == pytest.approx((3 / 12**0.5, 3.0, 2))
    assert distance(value, 0 * wanted)[0] == pytest.approx(27**0.5)


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_torch_grouped_layers_pass(mode: str) -> None:
    """The rival in bf16, its gradients too, is the same layer."""
    case = msgspec.structs.replace(CASE, mode=mode)
    inputs = make_layer_inputs(case)
    assert check_layer(case, inputs, bind_grouped(case, inputs)).passed  # pyright: ignore[reportArgumentType]


def test_torch_scaled_layers_pass_with_their_coarser_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rival in E4M3 with a scale a row, whose product this machine lacks, so that it is written out here."""

    def product(rows, weights, scale, of_weights, offs, out_dtype, use_fast_accum):
        ends = offs[:-1].long()
        parts = zip(rows.float().tensor_split(ends), weights.float(), scale.tensor_split(ends), of_weights, strict=True)
        return torch.cat([(x @ w) * s[:, None] * t for x, w, s, t in parts]).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", product)
    case = msgspec.structs.replace(SMALL, precision="mxfp8")
    inputs = make_layer_inputs(case)
    check = check_layer(case, inputs, bind_scaled(case, inputs))  # pyright: ignore[reportArgumentType]
    assert check.passed and (check.rms_rel or 0) > check.limit / 4
    with pytest.raises(NotImplementedError, match="mxfp8 inference"):
        bind_scaled(SMALL, inputs)
