"""Case identity."""

import msgspec

from pmlkit.campaign import loss_case
from pmlkit.case import Case


def test_golden_id() -> None:
    """The id of a known case never changes: records refer to it."""
    assert loss_case("ntxent", 512, "bf16").case_id == "ntxent-bf16-n512-d128-perclass4-610ba7d4"


def test_id_depends_on_every_field() -> None:
    """Changing any field changes the id; equal cases share it, whatever the order of their shape."""
    case = Case(
        op="moe_layer", precision="bf16", shape={"T": 4, "D": 8}, mode="training", pipeline="standard", ep=8, imbalance=1.0
    )
    changes = {
        "op": "ntxent", "precision": "fp32", "shape": {"T": 4, "D": 9}, "seed": 1, "mode": "inference", "pipeline": "mega",
        "ep": 16, "imbalance": 4.0, "options": {"margin": 0.5},
    }  # fmt: skip
    assert set(changes) == set(Case.__struct_fields__)
    ids = {msgspec.structs.replace(case, **{name: value}).case_id for name, value in changes.items()}
    assert len(ids | {case.case_id}) == len(changes) + 1
    assert msgspec.structs.replace(case, shape={"D": 8, "T": 4}).case_id.split("-")[-1] == case.case_id.split("-")[-1]


def test_slug_reads_well() -> None:
    """The slug names op, precision, the axes that are set, and the sizes."""
    case = Case(
        op="moe_layer", precision="mxfp8", shape={"T": 4, "D": 8}, mode="training", pipeline="mega", ep=8, imbalance=4.0
    )
    assert case.slug == "moe-layer-mxfp8-training-mega-ep8-i4-t4-d8"
