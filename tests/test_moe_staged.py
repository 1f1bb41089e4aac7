"""The block-scaled layers in Triton's interpreter against float64 on the same quantised numbers."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from pmlkit import paths
from pmlkit.errors import PmlkitError
from pmlkit.moe import decoded, folded, formats, staged
from pmlkit.moe.combine import gather
from pmlkit.moe.prepare import Format, prepare_weights
from pmlkit.moe.quantise import quantise_folded
from pmlkit.moe.reference import exact, reference, to_bf16, to_mxfp8, to_nvfp4
from pmlkit.moe.routing import LOST, route
from pmlkit.moe.swiglu import SwiGLU
from tests.test_moe_layer import away, made

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes, for the interpreter"),
    # Rows that are not there hold what memory held; a product takes them along, and nothing reads its result.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


def plain(T: int, K: int, E: int, D: int, F: int) -> list[Tensor]:
    """Return x, ids, scores, w13 and w2 without gradients."""
    return [t.detach() for t in made(T, K, E, D, F)]


ROUNDING = {"mxfp8": to_mxfp8, "nvfp4": to_nvfp4}
# An activation next to a tie of its format moves by a step when its float32 sum was added in another order.
LIMITS: dict[Format, float] = {"mxfp8": 5e-3, "nvfp4": 5e-3}


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("sizes", [(40, 2, 5, 160, 96), (30, 3, 4, 128, 288)], ids=str)
def test_a_layer_is_its_reference(format: Format, limit: float | None, sizes: tuple[int, ...]) -> None:
    """Near the reference with the same roundings, and no further from unquantised float64 than that reference is."""
    x, ids, scores, w13, w2 = plain(*sizes)
    activation = SwiGLU(limit)
    out = staged.forward(x, scores, prepare_weights(w13, w2, format), route(ids, sizes[2], tile=64), activation)
    wanted = reference(x, ids, scores, w13, w2, activation, operands=ROUNDING[format])
    unquantised = reference(x, ids, scores, w13, w2, activation, exact)
    assert away(out, wanted) <= LIMITS[format]
    assert away(out, unquantised) <= 1.05 * away(wanted, unquantised)


def test_products_are_exact_but_for_their_sum() -> None:
    """One projection of each format, rounded once to bf16."""
    x, ids, _, w13, w2 = plain(30, 2, 3, 160, 96)
    routing = route(ids, 3, tile=64)
    source, expert = routing.source_R.long(), ids.flatten()[routing.route_R.long()].long()

    def check(found: Tensor, rows: Tensor, weights: Tensor) -> None:
        wanted = torch.einsum("rc,rnc->rn", rows.double(), weights.double()[expert])
        assert away(found, to_bf16(wanted)) <= 1e-3

    eight = prepare_weights(w2.transpose(1, 2).contiguous().repeat(1, 2, 1), w13[:, :160, :96].contiguous()).w13
    assert isinstance(eight, formats.Folded)
    rows = quantise_folded(x)
    gathered = gather(rows.values.view(torch.bfloat16), routing).view(torch.float8_e4m3fn)
    mine = formats.Folded(gathered, rows.scale[source], rows.lost)
    check(folded.project(mine, eight, routing, False), to_mxfp8(x)[source], formats.from_folded(eight))
    four = prepare_weights(w13, w2, "nvfp4").w13
    assert isinstance(four, formats.NVFP4)
    rows, amax = decoded.decoded_rows(x)
    found = decoded.project(gather(rows, routing), amax, routing.source_R, four, routing)
    check(found, to_nvfp4(x)[source], to_nvfp4(w13))


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_prepared_weights_are_refilled_in_place(format: Format) -> None:
    """The same tensors then hold the new weights; other sizes and formats are refused."""
    _, _, _, w13, w2 = plain(1, 1, 2, 64, 96)
    kept, new = prepare_weights(w13, w2, format), prepare_weights(2 * w13, w2.flip(0), format)
    before = [tensor.data_ptr() for tensor in kept.storage]
    assert prepare_weights(2 * w13, w2.flip(0), format, out=kept) is kept
    assert [tensor.data_ptr() for tensor in kept.storage] == before
    for found, wanted in zip(kept.storage, new.storage, strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    with pytest.raises(PmlkitError, match="out holds"):
        prepare_weights(w13[:1], w2[:1], format, out=kept)


def test_weights_that_no_format_holds() -> None:
    """Widths that blocks do not divide, shapes that do not fit, a format without kernels."""
    _, _, _, w13, w2 = plain(1, 1, 2, 64, 40)
    with pytest.raises(PmlkitError, match=r"32 must divide D and F of w2 \(2, 64, 40\)"):
        prepare_weights(w13, w2)
    with pytest.raises(PmlkitError, match="need w13"):
        prepare_weights(w2, w13)
    with pytest.raises(PmlkitError, match="no format"):
        prepare_weights(w13, w2, "mxfp4")  # pyright: ignore[reportArgumentType]


def test_values_lost_to_folding_are_counted() -> None:
    """Tokens whose blocks differ by 2^24 lose digits, and the status word says how many values did."""
    x, ids, scores, w13, w2 = plain(20, 2, 3, 64, 64)
    x[:, 32:] *= 2.0**-24
    routing = route(ids, 3, tile=64)
    staged.forward(x, scores, prepare_weights(w13, w2), routing, SwiGLU())
    assert int(routing.status[LOST.value]) >= int(formats.fold(formats.mxfp8(x)).lost) > 500


def test_every_kernel_compiles_for_hopper() -> None:
    """Ahead of time, without a GPU, as launched at 12,288 and 192 routes: shared memory fits, and nearly all registers do."""
    command, environment = [sys.executable, "-m", "tests.compile_moe", "90"], os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=paths.root(), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len({line[0] for line in lines}) >= 13 and len(lines) >= 40
    assert max(int(line[3]) for line in lines) <= 227 * 1024
    assert max(int(line[4]) for line in lines) <= 256  # bytes of a thread's numbers that lie in memory
