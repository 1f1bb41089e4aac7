"""Roofline numbers, by hand and on the published cases."""

import pytest

from pmlkit.hardware import gpus
from pmlkit.report.load import load_source
from pmlkit.report.plots.roofline import plot_ceilings, plot_roofline, plot_shares
from pmlkit.report.roofline import least_seconds, roofline_losses, roofline_moe
from pmlkit.report.tables.moe import table_shares
from pmlkit.report.verdicts import verdict_roofline
from pmlkit.work import Work

GB300 = gpus()["gb300-nvl72"]


@pytest.fixture(scope="module")
def moe():
    return roofline_moe(load_source("gb300-moe", "moe").frame)


def test_least_times_by_hand() -> None:
    """2,500 T of bf16 work takes a second, 4,000 GB half a second."""
    work = Work(model="m", flops={"bf16": 2500e12}, bytes={"hbm": 4000e9})
    assert least_seconds(work, GB300) == pytest.approx({"compute": 1.0, "hbm": 0.5})


def test_mixed_precisions_use_each_their_own_peak() -> None:
    """Operations of two precisions are never summed against one roof: their times add."""
    work = Work(model="m", flops={"bf16": 2500e12, "mxfp8": 5000e12}, bytes={"hbm": 1.0})
    assert least_seconds(work, GB300)["compute"] == pytest.approx(2.0)


def test_published_shares(moe) -> None:
    """Nearest roof: NVLink 33, compute 24, HBM 6; best share median 38 %, maximum 58.8 %."""
    assert len(moe) == 63
    assert moe["nearest"].value_counts().to_dict() == {"nvlink": 33, "compute": 24, "hbm": 6}
    assert moe["best_share"].median() == pytest.approx(0.383, abs=5e-4)
    assert moe["best_share"].max() == pytest.approx(0.588, abs=5e-4)


def test_sum_of_shares_at_balance(moe) -> None:
    """At imbalance 1 the three shares sum to a median of 0.99, 0.85 and 0.95."""
    sums = moe[moe["imbalance"] == 1].groupby("precision")["overlap"].median()
    assert sums.round(2).to_dict() == {"bf16": 0.99, "mxfp8": 0.85, "nvfp4": 0.95}


def test_balance_adjusted_ceiling(moe) -> None:
    """EP8 at imbalance 8 in bf16: 185.7 TFLOP/s is 7.4 % of peak and 59 % of the 312.5 that imbalance leaves."""
    case = moe.set_index("row").loc["inference-ep8-bf16-standard-single_layer-F3072-i8"]
    assert case["ceiling_tflops"] == pytest.approx(312.5)
    assert case["useful_tflops"] == pytest.approx(185.74, abs=0.01)
    assert case["compute_share"] == pytest.approx(0.0743, abs=1e-4)
    assert case["ceiling_share"] == pytest.approx(0.594, abs=1e-3)


def test_nothing_is_above_a_roof(moe) -> None:
    """A share above one would be a diagnosis, not a win."""
    assert (moe["best_share"] < 1).all()
    assert (moe["ceiling_share"] < 1).all()


def test_cases_that_send_nothing_have_no_link_intensity(moe) -> None:
    """The four EP8 cases with everything on rank 0 have no link intensity; all others have one."""
    assert moe["wire_intensity"].isna().sum() == 4


def test_published_losses_are_far_from_any_roof() -> None:
    """The 116 rows that ran have a share, none above 4 % of its nearest roof."""
    frame = roofline_losses(load_source("pml-3.0.1", "losses").records)
    assert len(frame) == 116
    assert 0 < frame["share"].min() < frame["share"].max() < 0.04


def test_an_unknown_board_has_no_percentage() -> None:
    """Cases of a board that the ledger does not know keep their rates; shares are missing, figures and tables say why."""
    frame = roofline_moe(load_source("gb300-moe", "moe").frame.assign(gpu="NVIDIA HGX B300"))
    assert frame["compute_share"].isna().all()
    assert frame["useful_tflops"].notna().all()
    assert "no percentage" in verdict_roofline(frame).text
    assert table_shares(frame).cells()[0][8:11] == ["—", "—", "—"]
    for figure in (plot_roofline(frame, ["bf16"]), plot_shares(frame, "x"), plot_ceilings(frame)):
        assert "the peaks ledger does not know this board" in figure.alt
        assert "%" not in figure.alt
        assert figure.svg()


def test_half_of_the_peaks_known() -> None:
    """A board without an NVLink peak has its other shares, and no nearest roof is claimed."""
    frame = roofline_moe(load_source("gb300-moe", "moe").frame.assign(gpu="RTX 5090"))
    assert frame["compute_share"].notna().all()
    assert frame["nvlink_share"].isna().all()
    assert frame["nearest"].isna().all()
