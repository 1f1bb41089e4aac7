"""The expert layer on a GPU against float64: run with `python -m pytest -m gpu` on a machine that has one."""

from typing import Literal

import msgspec
import pytest
import torch
from torch import Tensor

from pmlkit.bench.check_layer import check_layer
from pmlkit.bench.layer import BoundLayer, make_layer_inputs
from pmlkit.campaign import layer_case
from pmlkit.case import Case
from pmlkit.moe import formats, quantise
from pmlkit.moe.config import ExpertsConfig
from pmlkit.moe.experts import routed_experts
from pmlkit.moe.inference import prepared_experts
from pmlkit.moe.prepare import Format, prepare_weights
from pmlkit.moe.reference import exact, reference, reference_backward, to_mxfp8, to_nvfp4, to_trained_mxfp8
from pmlkit.moe.routing import check_status
from pmlkit.moe.swiglu import SwiGLU
from pmlkit.registry import resolve, subject

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]
ODD = {"T": 701, "D": 480, "E": 7, "K": 3, "F": 352}  # whole blocks of 32, no whole tiles
FEW = {"T": 5, "D": 1024, "E": 48, "K": 6, "F": 512}  # most experts have no row
OURS = ["moe-bf16", "moe-mxfp8", "moe-mxfp8-kept", "moe-mxfp8-mega", "moe-nvfp4"]
SUBJECTS = [*OURS, "torch-bf16", "torch-fp8", "torch-fp8-slow"]
TRAINED = {"moe-bf16", "moe-mxfp8", "moe-mxfp8-kept", "torch-bf16"}


def away(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def drawn(shape: dict[str, int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x, ids that crowd some experts, scores, w13 and w2, the floating ones as leaves."""
    inputs = make_layer_inputs(Case(op="moe_layer", precision="bf16", mode="training", shape=shape), "cuda")
    T, E, K = shape["T"], shape["E"], shape["K"]
    crowd = (
        torch.rand(T, E, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        .pow(torch.arange(1, E + 1, device="cuda"))
        .argsort(1)[:, -K:]
        .int()
    )
    return inputs.x, crowd.contiguous(), inputs.scores, inputs.w13, inputs.w2


@pytest.mark.parametrize("key", SUBJECTS)
@pytest.mark.parametrize("shape", [ODD, FEW], ids=["odd", "few"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_every_subject_passes_its_gate_as_a_graph(key: str, shape: dict[str, int], mode: str) -> None:
    """Answers, and a replay bit by bit; what a subject does not compute is unsupported."""
    one = subject(key)
    case = Case(op="moe_layer", precision=one.precisions[0], mode=mode, shape=shape)
    inputs = make_layer_inputs(case, "cuda")
    if (mode == "training" and key not in TRAINED) or (mode == "inference" and key == "moe-mxfp8-kept"):
        with pytest.raises(NotImplementedError):
            resolve(one.bind)(case, inputs)
        return
    bound = resolve(one.bind)(case, inputs)
    assert isinstance(bound, BoundLayer) and bound.replay is not None
    check = check_layer(case, inputs, bound)
    assert check.passed and check.graph_accepted, check


@pytest.mark.parametrize("format", ["bf16", "mxfp8"])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_crowded_experts(limit: float | None, format: Literal["bf16", "mxfp8"]) -> None:
    """Output and all gradients near the reference with the same roundings, bit by bit the same in 20 runs."""
    given, operands = drawn(ODD), to_trained_mxfp8 if format == "mxfp8" else None
    leaves = [tensor for tensor in given if tensor.requires_grad]
    grad = torch.randn_like(given[0])
    runs = []
    for _ in range(20):
        for leaf in leaves:
            leaf.grad = None
        out = routed_experts(*given, ExpertsConfig(SwiGLU(limit), format=format))
        out.backward(grad)
        runs.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for run in runs[1:]:
        assert all(torch.equal(one, first) for one, first in zip(run, runs[0], strict=True))
    x, ids, scores, w13, w2 = (tensor.detach() for tensor in given)
    plain = x, ids, scores, w13, w2
    found = reference_backward(grad, *plain, SwiGLU(limit), operands=operands)
    wanted = [reference(*plain, SwiGLU(limit), operands=operands), found.x_TD, found.scores_TK, found.w13, found.w2]
    for ours, value in zip(runs[0], wanted, strict=True):
        assert value is not None and away(ours, value) < (2e-2 if operands else 5e-3)


@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_block_scaled_layers_are_their_references(format: Format, limit: float | None, promote: bool) -> None:
    """Near the reference with the same roundings, and no further from float64 than that is; 20 runs are one."""
    x, ids, scores, w13, w2 = (tensor.detach() for tensor in drawn(ODD))
    weights, config = prepare_weights(w13, w2, format), ExpertsConfig(SwiGLU(limit), promote=promote)
    out, status = prepared_experts(x, ids, scores, weights, config, return_status=True)
    check_status(status, ODD["E"])
    assert all(torch.equal(prepared_experts(x, ids, scores, weights, config), out) for _ in range(20))
    rounding = to_mxfp8 if format == "mxfp8" else to_nvfp4
    wanted = reference(x, ids, scores, w13, w2, SwiGLU(limit), operands=rounding)
    unquantised = reference(x, ids, scores, w13, w2, SwiGLU(limit), exact)
    assert away(out, wanted) < 2e-2
    assert away(out, unquantised) <= 1.05 * away(wanted, unquantised)


@pytest.mark.parametrize("size", [1.0, 1e-6, 3e4, 1e-38])
def test_formats_agree_bit_by_bit(size: float) -> None:
    """Kernels of the quantisers and plain torch on the same device."""
    x = (torch.randn(300, 416, device="cuda") * size).bfloat16()
    x[3, :40], x[5, 70], x[6, 1] = 0.0, float("nan"), float("inf")
    ours, twin = quantise.quantise_mxfp8(x), formats.mxfp8(x.float())
    assert torch.equal(ours.codes, twin.codes) and torch.equal(ours.values.view(torch.uint8), twin.values.view(torch.uint8))
    folded, plain = quantise.quantise_folded(x), formats.fold(twin)
    assert torch.equal(folded.values.view(torch.uint8), plain.values.view(torch.uint8))
    four, other = quantise.quantise_nvfp4(x), formats.nvfp4(x.float())
    assert torch.equal(four.values, other.values) and torch.equal(four.scales.view(torch.uint8), other.scales.view(torch.uint8))


def test_the_layers_compile_whole() -> None:
    """torch.compile(fullgraph=True), gradients too, gives what eager mode gives."""
    first = drawn(ODD)
    second = drawn(ODD)
    routed_experts(*first).sum().backward()
    torch.compile(routed_experts, fullgraph=True)(*second).sum().backward()
    for one, other in zip(first, second, strict=True):
        if one.requires_grad:
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    x, ids, scores, w13, w2 = (tensor.detach() for tensor in first)
    weights = prepare_weights(w13, w2, "mxfp8")
    whole = torch.compile(prepared_experts, fullgraph=True)
    assert torch.equal(whole(x, ids, scores, weights), prepared_experts(x, ids, scores, weights))


@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "nvfp4"])
def test_a_published_rank_passes(precision: str) -> None:
    """The balanced rank of EP 64, and the busiest at imbalance 4."""
    for tokens in (2048, 8192):
        case = layer_case(precision, "inference", 6, 1536, tokens)
        inputs = make_layer_inputs(case, "cuda")
        check = check_layer(case, inputs, resolve(subject(f"moe-{precision}").bind)(case, inputs))
        assert check.passed and check.graph_accepted, check
    training = msgspec.structs.replace(layer_case("bf16", "training", 6, 1536))
    inputs = make_layer_inputs(training, "cuda")
    assert check_layer(training, inputs, resolve(subject("moe-bf16").bind)(training, inputs)).passed
