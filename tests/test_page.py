"""What cells show: escaped tables, figures with alternative text, deterministic bytes."""

import xml.etree.ElementTree as ET

import pandas as pd
import pytest

from pmlkit.report.compare import compare
from pmlkit.report.figure import data_uri
from pmlkit.report.frames import cells_published
from pmlkit.report.health import verdict_health
from pmlkit.report.load import load_run, load_source, provenance
from pmlkit.report.page import Table, verdict
from pmlkit.report.plots.losses import Quantity, memory_cells, plot_ratios, plot_values
from pmlkit.report.plots.moe import plot_arena, plot_imbalance, plot_pipelines, plot_settling
from pmlkit.report.plots.roofline import plot_ceilings, plot_loss_roofline, plot_roofline, plot_shares
from pmlkit.report.plots.run import plot_order, plot_phases
from pmlkit.report.roofline import roofline_losses, roofline_moe
from pmlkit.report.tables.losses import table_published
from pmlkit.report.tables.moe import table_cases, table_peaks, table_repeats
from pmlkit.report.verdicts import (
    caveats_published_losses,
    host_bound_series,
    repeats,
    slowdowns,
    verdict_moe,
    verdict_roofline,
    verdict_run,
    verdict_run_roofs,
    verdict_versions,
)

PML, MOE, SAMPLE = load_source("pml-3.0.1", "losses"), load_source("gb300-moe", "moe"), load_run("sample")
JUDGED = compare(cells_published(PML.frame), "2.9.0", "3.0.1 code")


def test_cells_are_escaped_and_missing_values_are_dashes() -> None:
    """A log line with markup stays text; None and NaN print as a dash; the class follows the word."""
    frame = pd.DataFrame(
        {"text": ["<script>x</script>", None], "n": [1.5, float("nan")], "verdict": ["no difference", "faster"]}
    )
    table = Table(frame, "t", "a & b", {"n": ".2f"}, ("verdict",))
    markup = table.markup()
    assert "<script>" not in markup
    assert "&lt;script&gt;" in markup
    assert '<td class="num">—</td>' in markup
    assert 'class="is-no-difference"' in markup
    assert 'id="t"' in markup
    assert "a &amp; b" in markup
    assert table.cells() == [["<script>x</script>", "1.50", "no difference"], ["—", "—", "faster"]]


def test_long_tables_fold() -> None:
    """A table past the fold is a closed details element that says how many rows it has."""
    frame = pd.DataFrame({"a": range(30)})
    assert Table(frame, "t", "c").markup().startswith("<details")
    assert "(30 rows)" in Table(frame, "t", "c").markup()
    assert Table(frame, "t", "c", fold=50).markup().startswith("<div")


def test_the_published_table_prints_the_page_digits() -> None:
    """Every printed string of every record stands in the table, with display name and identifier."""
    cells = table_published(PML.frame).cells()
    assert len(cells) == 120
    for record, row in zip(PML.records, cells, strict=True):
        assert row[2:4] == [record.display_name, record.version]
        assert row[4] == record.status
        assert row[5:] == [record.printed[name] for name in ("total", "forward", "backward", "range", "peak")]


FIGURES = {
    "ratios": (lambda: plot_ratios(JUDGED, 0.02), ["8 faster, 5 slower, 5 inconclusive of 18", "0.0352"]),
    "own ratios": (lambda: plot_ratios(SAMPLE.comparisons, SAMPLE.margin), ["reference over pml"]),
    "values": (
        lambda: plot_values(
            Quantity(cells_published(PML.frame), "total", "ms"),
            Quantity(memory_cells(PML.frame, "peak_mib"), "peak memory", "MiB"),
        ),
        ["NT-Xent bfloat16 2,048: 2.9.0 oom, 3.0.0 8.53", "3.45e+03"],
    ),
    "imbalance": (lambda: plot_imbalance(MOE.frame), ["inference-ep8-bf16-standard-single_layer-F3072-i8 186"]),
    "pipelines": (lambda: plot_pipelines(MOE.frame), ["inference-ep16-nvfp4-mega-width-F6144-i1 4,265"]),
    "arena": (lambda: plot_arena(MOE.frame), ["scratch 2.31"]),
    "settling": (lambda: plot_settling(MOE.frame), ["first window fastest in 50 of 63", "mean Kendall tau +0.41"]),
    "roofline": (
        lambda: plot_roofline(roofline_moe(MOE.frame), ["bf16", "mxfp8", "nvfp4"]),
        ["bf16 2,500 TFLOP/s (ridge 312.5 FLOP/byte)", "nvlink 900 GB/s per direction"],
    ),
    "shares": (lambda: plot_shares(roofline_moe(MOE.frame), "All"), ["nvlink in 33, compute in 24, hbm in 6", "58.8 %"]),
    "ceilings": (lambda: plot_ceilings(roofline_moe(MOE.frame)), ["186 of 312 TFLOP/s (59 %)"]),
    "loss roofline": (lambda: plot_loss_roofline(roofline_losses(PML.records)), ["RTX 5090 batch 128"]),
    "order": (lambda: plot_order(SAMPLE.frame), ["134 ok processes", "10 not ok"]),
    "phases": (lambda: plot_phases(SAMPLE.frame), ["NT-Xent float32 128, pml"]),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_state_their_numbers_and_are_stable(name: str) -> None:
    """Two drawings are equal bytes without a date; the SVG is well formed; the alternative text has the key numbers."""
    make, words = FIGURES[name]
    first, second = make(), make()
    svg = first.svg()
    assert svg == second.svg()
    assert "<dc:date>" not in svg
    ET.fromstring(svg.encode())
    assert all(word in first.alt for word in words), first.alt
    bundle, metadata = first._repr_mimebundle_()
    assert metadata["image/svg+xml"]["alt"] == bundle["text/plain"] == first.alt


def test_an_image_cannot_reach_the_network() -> None:
    """A figure is embedded as data; its address holds no link."""
    assert data_uri("<svg/>") == "data:image/svg+xml;base64,PHN2Zy8+"


def test_opening_sentences() -> None:
    """Each report opens with its verdict in numbers."""
    assert "on RTX 5090: 8 faster, 5 slower, 5 inconclusive of 18" in verdict_versions(JUDGED).text
    assert "Nearest roof: nvlink in 33, compute in 24, hbm in 6 of 63 cases" in verdict_roofline(roofline_moe(MOE.frame)).text
    assert "7 configurations were measured twice and differ by -1.5 to +0.8 %" in verdict_moe(MOE).text
    assert "144 planned, 144 recorded, 134 ok, 1 unsteady, 1 below_resolution" in verdict_run(SAMPLE).text
    assert "0 false alarms in 16 comparisons" in verdict_health(SAMPLE).text
    assert "no percentage is given" in verdict_run_roofs(SAMPLE).text
    assert verdict("a", "", "b").text == "a\nb"


def test_what_the_page_cannot_carry() -> None:
    """21 of 46 series grow by less than 1.2 times; half ranges are 7.0 and 1.0 % in the median."""
    assert host_bound_series(PML.frame) == (21, 46)
    assert "A100-SXM4-80GB 7.0 %, RTX 5090 1.0 %" in caveats_published_losses(PML.frame).text


def test_repeats_and_slowdowns() -> None:
    """Seven configurations occur twice, never collapsed; imbalance 8 costs 4.8 to 7.1 times the balanced time."""
    assert len(repeats(MOE.frame)) == 7
    assert len(table_repeats(MOE.frame).cells()) == 7
    assert len(table_cases(MOE.frame).cells()) == 63
    worst = slowdowns(MOE.frame).query("imbalance == 8")["slowdown"]
    assert (worst.min(), worst.max()) == pytest.approx((4.815, 7.15), abs=0.01)


def test_provenance_says_what_kind_of_data() -> None:
    """Sample, published and measured data are told apart at the top of a page, with digests and counts."""
    assert provenance(SAMPLE).text.startswith("[SAMPLE DATA]")
    assert provenance(PML).text.startswith("[PUBLISHED DATA]")
    assert "116 ok, 4 oom" in provenance(PML).text
    assert "sha256 " in provenance(SAMPLE).text


def test_the_ledger_is_shown_with_its_disputes() -> None:
    """Every peak stands in the table with its source, disputes beside it."""
    cells = table_peaks().cells()
    nvfp4 = next(row for row in cells if row[0].startswith("GB300") and row[1] == "nvfp4")
    assert nvfp4[2] == "15,000"
    assert "15,300" in nvfp4[5]
    assert "14,000" in nvfp4[5]
