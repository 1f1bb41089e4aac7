"""The memory plan: all 63 published cases, layers computed by hand, any number of ranks, the account, the refusals."""

import math
import re
from typing import Any

import pytest

from pmlkit.errors import PmlkitError
from pmlkit.moe.load import receive_rows
from pmlkit.moe.memory import MemoryPlan, plan_memory
from pmlkit.release import read_published

REPORT: dict[str, Any] = {"tokens": 2048, "hidden": 7168, "width": 3072, "experts": 384, "top_k": 6}
SMALL: dict[str, Any] = {"tokens": 64, "hidden": 128, "width": 64, "experts": 4, "top_k": 2, "ep": 2}
FORMATS = [
    ("bf16", "standard", "inference"),
    ("bf16", "standard", "training"),
    *(("mxfp8", pipeline, mode) for pipeline in ("staged", "mega") for mode in ("inference", "training")),
    ("nvfp4", "staged", "inference"),
    ("nvfp4", "mega", "inference"),
]


def plan(formats: tuple[str, str, str], **sizes: Any) -> MemoryPlan:
    """Return the plan of (precision, pipeline, mode) for a shape."""
    precision, pipeline, mode = formats
    return plan_memory(**sizes, precision=precision, pipeline=pipeline, mode=mode)


def test_published_plans() -> None:
    """Every planned field of all 63 published cases is exactly the published one."""
    names = {"tokens": "T", "hidden": "D", "width": "F", "experts": "E", "top_k": "K"}
    records = read_published("gb300-moe").records
    assert len(records) == 63
    for record in records:
        assert record.moe and record.ep and record.pipeline and record.mode
        sizes = {name: record.shape[letter] for name, letter in names.items()}
        made = plan((record.precision, record.pipeline, record.mode), **sizes, ep=record.ep)
        for name in ("capacity_rows", "slot_bytes", "scratch_bytes", "arena_bytes", "input_bytes"):
            assert getattr(made, name) == getattr(record.moe, name), (record.row, name)
        rows = record.moe.receive_rows
        saved = [made.saved_bytes(count) for count in rows] if record.mode == "training" else []
        assert saved == record.moe.saved_bytes, record.row
        assert made.recompute(rows) == record.moe.recompute, record.row


def test_headline_plan() -> None:
    """EP 8, mxfp8, mega, inference at the report's shape: 104,320 rows in an arena of 2,485,255,680 bytes."""
    made = plan(("mxfp8", "mega", "inference"), **REPORT, ep=8)
    assert made.capacity_rows == 104_320 and made.arena_bytes == 2_485_255_680
    assert made.balanced_rows == 12_288 and made.device_rows == 98_304


def test_bf16_by_hand() -> None:
    """BF16 regions of a small layer: 256 rows of room, never padded, and the slot for twice the balanced state."""
    made = plan(("bf16", "standard", "training"), **SMALL)
    assert (made.balanced_rows, made.device_rows, made.capacity_rows) == (128, 256, 256)
    assert made.scratch_parts == {
        "gathered rows": 256 * 128 * 2,
        "pre-activation": 256 * 128 * 2,
        "pre-activation gradient": 256 * 128 * 2,
        "activation": 256 * 64 * 2,
        "gathered output gradient": 256 * 128 * 2,
    }
    full = 128 * (128 + 128) * 2 + 128 * 128 * 2
    assert made.saved_bytes(128) == full and made.input_bytes == 64 * 128 * 2
    assert made.slot_bytes == 2 * full - 64 * 128 * 2
    assert made.saved_bytes(0) == 128 * 128 * 2  # route outputs of the routes it sent
    equal = plan(("bf16", "standard", "training"), **{**SMALL, "width": 128})
    assert "gathered output gradient" not in equal.scratch_parts  # it fits another region


def test_slot_rounds_up() -> None:
    """Half a byte over a full 128 still takes the next 128: 6 + 1.25·(104 - 6) = 128.5."""
    sizes: dict[str, Any] = {"tokens": 1, "hidden": 3, "width": 23, "experts": 2, "top_k": 1, "ep": 2}
    made = plan_memory(**sizes, precision="bf16", pipeline="standard", mode="training", capacity_factor=1.25)
    assert made.saved_bytes(1) == 104 and made.slot_bytes == 256


def test_mxfp8_by_hand() -> None:
    """Block-scaled state: values and scales by column, the pre-activation in BF16, two tiles for two experts."""
    made = plan(("mxfp8", "staged", "training"), **SMALL)
    assert made.capacity_rows == (256 + 2 * 127) // 128 * 128 == 384
    columns, outputs = 256 * 128 + 128 * 8 + 256 * 64 + 64 * 8, 128 * 128 * 2
    assert made.saved_bytes(128) == columns + 256 * 128 * 2 + outputs
    assert made.saved_bytes(129) == made.saved_bytes(256) == made.saved_bytes(128)
    assert made.saved_bytes(1) == 128 * 128 + 128 * 4 + 128 * 64 + 64 * 4 + 128 * 128 * 2 + outputs


def test_one_row_over_costs_one_tile() -> None:
    """One row past full tiles adds one tile for one expert, not one for each."""
    made = plan(("mxfp8", "staged", "training"), **{**SMALL, "ep": 1, "tokens": 300})
    tile = 128 * (128 + 64) + (128 + 64) * 4 + 128 * 2 * 64 * 2
    assert made.saved_bytes(4 * 128 + 1) - made.saved_bytes(4 * 128) == tile


def test_nvfp4_by_hand() -> None:
    """nvfp4 row operands: half a byte a value, scales of 16 values paged four times, four bytes a row for its scale."""
    staged = plan(("nvfp4", "staged", "inference"), **SMALL)
    wide, narrow = 384 * 64 + 384 * (4 * 8 + 4), 384 * 32 + 384 * (4 * 4 + 4)
    assert staged.scratch_parts == {"row operands": wide, "pre-activation, bf16": 384 * 128 * 2}
    mega = plan(("nvfp4", "mega", "inference"), **SMALL).scratch_parts
    assert mega["row operands"] == wide + narrow
    assert mega["column tile, input"] == 128 * 64 + 128 * 8 and mega["zero row"] == 128 * 2
    assert mega["progress counters"] == math.ceil(4 * (3 * 24 + 2 * 1 + 4 + 1) / 128) * 128
    assert mega["tensor maps"] == 152 * 10 * 128
    tight = plan(("nvfp4", "mega", "inference"), tokens=1, hidden=640, width=64, experts=4, top_k=1, ep=1)
    assert tight.capacity_rows == 384  # 72 + 20 + 4 counters fill 384 bytes; the one that makes pairs takes 128 more
    assert tight.scratch_parts["progress counters"] == 512


def test_fused_holds_both_row_operands() -> None:
    """In training too, the fused pipeline differs from the staged one by its row operands alone."""
    staged, mega = (plan(("mxfp8", pipeline, "training"), **REPORT, ep=8) for pipeline in ("staged", "mega"))
    assert mega.slot_bytes == staged.slot_bytes
    assert {name for name, size in mega.scratch_parts.items() if size != staged.scratch_parts[name]} == {"row operands"}


def test_recompute_where_the_slot_is_too_small() -> None:
    """A slot for one and a half rows does not hold two: one verdict for all ranks, and none in inference."""
    sizes: dict[str, Any] = {"tokens": 1, "hidden": 64, "width": 64, "experts": 2, "top_k": 1, "ep": 2}
    formats: dict[str, Any] = {"precision": "bf16", "pipeline": "standard", "capacity_factor": 1.5}
    made = plan_memory(**sizes, **formats, mode="training")
    assert (made.saved_bytes(2), made.slot_bytes) == (896, 768)
    assert made.recompute([2, 0]) == [True] and made.recompute([1, 1]) == [False]
    assert "more than the slot: recompute" in made.explain()
    assert plan_memory(**sizes, **formats, mode="inference").recompute([2, 0]) == []


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("ep", [1, 3, 6, 8, 12, 24, 48, 96, 384])
def test_any_number_of_ranks(formats: tuple[str, str, str], ep: int) -> None:
    """Any number of ranks that divides the experts is planned: the parts add up and no load that fits is too big."""
    made = plan(formats, **REPORT, ep=ep)
    assert made.device_rows == 12_288 * min(ep, 8)
    assert made.scratch_bytes == sum(made.scratch_parts.values())
    assert made.arena_bytes == made.slot_bytes + made.scratch_bytes
    rows = receive_rows(ep, 2048, 6, min(ep, 8))
    assert made.recompute(rows) == ([False] if made.mode == "training" else [])
    assert (made.slot_bytes == 0) == (made.saved_bytes(rows[0]) == 0) == (made.mode == "inference")


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_account(formats: tuple[str, str, str]) -> None:
    """The account names every part with bytes and MiB, in aligned columns, and says what it leaves out."""
    made = plan(formats, **REPORT, ep=6)
    text = made.explain()
    for name, size in [*made.scratch_parts.items(), ("slot", made.slot_bytes), ("arena", made.arena_bytes)]:
        assert re.search(rf"^  {re.escape(name)} +{size:,} +{size / 2**20:,.2f} MiB", text, re.MULTILINE), name
    sized = [line for line in text.splitlines() if " MiB" in line]
    assert len({line.index(" MiB") for line in sized}) == 1
    assert f"{made.capacity_rows:,}" in text and "capacity factor 8: all that can reach a rank" in text
    for omitted in ("symmetric buffers", "352,321,536", "pointer tables", "weights", "launch workspaces"):
        assert omitted in text.split("Not in the plan")[1]
    assert f"{(3 if made.mode == 'training' else 2) * 384 * 2048 * 8:,}" in text
    assert ("fits the slot: no recompute" in text) == (made.mode == "training")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": 3}, "ep 3 in plan_memory does not divide 4 experts: use 2 or 4"),
        ({"hidden": 100}, "hidden 100 in plan_memory is no multiple of mxfp8's block, 32: use 128"),
        ({"width": 8}, "width 8 in plan_memory is no multiple of mxfp8's block, 32: use 32"),
        ({"pipeline": "xyz"}, "unknown pipeline 'xyz' in plan_memory: known: mega, staged, standard"),
        ({"pipeline": "standard"}, "pipeline 'standard' in plan_memory does not take mxfp8: use staged or mega"),
        ({"precision": "bf16"}, "pipeline 'mega' in plan_memory does not take bf16: use standard"),
        (
            {"precision": "nvfp4"},
            "precision 'nvfp4' in plan_memory is for inference only: use mode 'inference', or bf16 or mxfp8",
        ),
        *(
            ({"capacity_factor": bad}, f"capacity_factor {bad!r} in plan_memory: pass a finite number of at least 1")
            for bad in (0.5, -1.0, math.nan, math.inf)
        ),
    ],
)
def test_refused_plans(changes: dict[str, Any], message: str) -> None:
    """A layer that cannot be planned is refused with the value, the place and what to pass."""
    with pytest.raises(PmlkitError) as caught:
        plan_memory(**{**SMALL, "precision": "mxfp8", "pipeline": "mega", "mode": "training", **changes})
    assert str(caught.value) == message


def test_refused_loads() -> None:
    """Rows that no rank can receive, or that the plan has no room for, are refused with what would do."""
    formats: dict[str, Any] = {"precision": "mxfp8", "pipeline": "mega", "mode": "training"}
    made = plan_memory(**REPORT, **formats, ep=64, capacity_factor=2.5)
    for rows in (-1, 786_433):
        with pytest.raises(PmlkitError, match=f"rows {rows} in saved_bytes cannot be on one rank: pass 0 to 786432"):
            made.saved_bytes(rows)
    assert made.device_rows == 30_720 < made.capacity_rows
    with pytest.raises(PmlkitError, match=r"rows 30721 in saved_bytes: capacity_factor 2\.5 has room for 30720; plan"):
        made.saved_bytes(30_721)
    with pytest.raises(PmlkitError, match="plan with a factor of 16"):
        made.recompute(receive_rows(64, 2048, 6, 16))
    with pytest.raises(PmlkitError, match="rows_per_rank in recompute has 8 entries for 64 ranks: pass one a rank, as"):
        made.recompute([12_288] * 8)
