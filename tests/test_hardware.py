"""The peaks ledger: sourced, dense, exactly matched."""

import itertools

import pytest

from pmlkit.errors import PmlkitError
from pmlkit.hardware import Gpu, gpus, match_gpu
from pmlkit.report.roofline import ridge

ALL = list(gpus().values())


@pytest.mark.parametrize("gpu", ALL, ids=lambda g: g.key)
def test_every_peak_has_source_and_date(gpu: Gpu) -> None:
    """Every value is positive, has a unit, a source and a date; disputes name their source and why they are not used."""
    assert "hbm" in gpu.peaks
    for peak in gpu.peaks.values():
        assert peak.value > 0
        assert peak.unit in ("TFLOP/s", "GB/s")
        assert len(peak.source) > 10
        assert peak.retrieved == "2026-11-30"
        assert all(d.source and d.note and d.value > 0 for d in peak.disputes)


def test_the_promised_boards_are_there() -> None:
    """A100, H100, H200, both B200 boards, GB300 and RTX 5090, and no other."""
    assert set(gpus()) == {
        "a100-sxm4-80gb",
        "h100-sxm5-80gb",
        "h200-sxm",
        "b200-hgx",
        "b200-gb200-nvl72",
        "gb300-nvl72",
        "rtx-5090",
    }


def test_known_values() -> None:
    """Dense values: half of the sparse data sheets, SI units."""
    assert match_gpu("NVIDIA H200").peak("bf16").value == 989.4  # type: ignore[union-attr]
    assert gpus()["a100-sxm4-80gb"].peak("hbm").value * 1e9 == 2.039e12
    assert [gpus()["gb300-nvl72"].peak(p).value for p in ("bf16", "mxfp8", "nvfp4")] == [2500, 5000, 15000]
    assert [gpus()[b].peak("bf16").value for b in ("b200-hgx", "b200-gb200-nvl72")] == [2250, 2500]
    assert gpus()["gb300-nvl72"].peak("nvlink").value == 900


def test_a_sparse_figure_is_never_the_value() -> None:
    """The figures known to be sparse stand only among the disputes."""
    for board, key, sparse in (("h100-sxm5-80gb", "bf16", 1979), ("gb300-nvl72", "mxfp8", 10000), ("rtx-5090", "nvfp4", 3352)):
        peak = gpus()[board].peak(key)
        assert peak.value != sparse
        assert sparse in [d.value for d in peak.disputes]


def test_match_is_exact() -> None:
    """A substring, a partitioned or a power-capped card gets no peaks; `GB300` is not `B300` and `GB200` not `B200`."""
    assert match_gpu("NVIDIA H200", 132, 700.0) is gpus()["h200-sxm"]
    for name in ("H200", "NVIDIA H200 NVL", "NVIDIA B300", "nvidia h200", "CPU: AMD EPYC", ""):
        assert match_gpu(name) is None, name
    assert match_gpu("NVIDIA H200", 16) is None
    assert match_gpu("NVIDIA H200", 132, 300.0) is None
    assert match_gpu("NVIDIA GB200") is not match_gpu("NVIDIA B200")


def test_names_belong_to_one_board() -> None:
    """No device name or published name stands for two boards."""
    for a, b in itertools.combinations(ALL, 2):
        assert not {*a.names, *a.published} & {*b.names, *b.published}


def test_missing_peak_says_so() -> None:
    """A board without a peak raises with its name: no other number is borrowed."""
    with pytest.raises(PmlkitError, match="A100-SXM4-80GB has no 'nvfp4' peak"):
        gpus()["a100-sxm4-80gb"].peak("nvfp4")


def test_ridge_points() -> None:
    """GB300's ridges are 312.5, 625 and 1,875 FLOP per byte."""
    assert [ridge(gpus()["gb300-nvl72"], p) for p in ("bf16", "mxfp8", "nvfp4")] == [312.5, 625, 1875]
