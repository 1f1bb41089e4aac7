"""One rank's work as measured, beside the published cases: rates, roofs, rivals, and the page."""

from pathlib import Path

import pytest

from pmlkit import paths
from pmlkit.errors import PmlkitError
from pmlkit.report.layers import beside_published, frame_layers, load_layers, published_layers, verdict_layers
from pmlkit.report.load import load_source
from pmlkit.report.plots.moe import plot_layers
from pmlkit.report.render import find_notebook, render
from pmlkit.report.tables.moe import table_layer_answers, table_layers
from tests import layer_run


def test_rates_stand_under_the_roof_of_their_math_path(tmp_path: Path) -> None:
    """bf16 under bf16, folded mxfp8 under fp8, decoded nvfp4 under bf16; the rate is useful work over the median time."""
    layers = frame_layers(load_layers([str(layer_run.write(tmp_path / "run"))]))
    assert len(layers) == 7
    own = {(row["precision"], row["mode"]): row for row in layers[layers["ours"]].to_dict("records")}
    flops = 6 * 2048 * 6 * 7168 * 3072
    bf16 = own["bf16", "inference"]
    assert bf16["tflops"] == pytest.approx(flops / 2.6e9, rel=2e-3) and bf16["share"] == pytest.approx(bf16["tflops"] / 989.4)
    assert bf16["ms"] == pytest.approx(2.6, rel=2e-3) and bf16["low_ms"] < bf16["high_ms"]
    training = own["bf16", "training"]
    assert training["tflops"] == pytest.approx(4 * 3 * flops / 31.0e9, rel=2e-3) and training["saved_mib"] == 1.0
    assert own["mxfp8", "inference"]["roof"] == "fp8" and own["nvfp4", "inference"]["roof"] == "bf16"
    failed = layers[layers["status"] == "oom"]
    assert list(failed["arm"]) == ["torch"] and failed["tflops"].isna().all()


def test_the_published_busiest_rank_stands_beside_the_same_work(tmp_path: Path) -> None:
    """EP 8 is 48 experts, imbalance 4 is 8,192 tokens; of two pipelines the faster; what was not published stays empty."""
    published = published_layers(load_source("gb300-moe", "moe").frame)
    table = beside_published(frame_layers(load_layers([str(layer_run.write(tmp_path / "run"))])), published)
    rows = {(row["precision"], row["mode"]): row for row in table.to_dict("records")}
    assert len(table) == 4
    assert rows["bf16", "inference"]["published_tflops"] == pytest.approx(1139.98, rel=1e-4)
    assert rows["bf16", "inference"]["published_share"] == pytest.approx(1139.98 / 2500, rel=1e-4)
    assert rows["bf16", "inference"]["lead"] == pytest.approx(2.73 / 2.6, rel=1e-3)
    source = load_source("gb300-moe", "moe").frame
    hot = source[(source["mode"] == "training") & (source["precision"] == "bf16") & (source["ep"] == 32)]
    hot = hot[hot["imbalance"] == 4].iloc[0]
    assert rows["bf16", "training"]["published_tflops"] == pytest.approx(4 * hot["useful_tflops"], rel=1e-6)
    assert rows["bf16", "training"]["rival"] != "torch"
    assert rows["nvfp4", "inference"]["published_tflops"] != rows["nvfp4", "inference"]["published_tflops"]
    assert "No run is named" in verdict_layers([], table).text


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    """Verdict, table, figure and answers from the run; on an unknown board there are rates and no shares."""
    runs = load_layers([str(layer_run.write(tmp_path / "run"))])
    published = published_layers(load_source("gb300-moe", "moe").frame)
    layers = frame_layers(runs)
    table = beside_published(layers, published)
    words = verdict_layers(runs, table).text
    assert "bf16 inference: 623 TFLOP/s, 63 % of the H200 SXM's bf16 peak" in words
    assert "torch against pmlkit's standard" in words and "no communication" in words
    assert "45.6%" in table_layers(table).text() and "3.00e-03" in table_layer_answers(layers).text()
    assert "published 45.6 %" in plot_layers(table).alt
    unknown = load_layers([str(layer_run.write(tmp_path / "other", "NVIDIA Nothing"))])
    without = beside_published(frame_layers(unknown), published)
    assert without["share"].isna().all() and without["tflops"].notna().any()
    assert plot_layers(without).alt.startswith("Of 4 measured layers none ran on a board")
    page = render(find_notebook("25_moe_one_gpu"), [f"runs={tmp_path / 'run'}"], tmp_path / "page")
    assert "63 % of the H200" in page.read_text()


def test_a_run_about_losses_is_refused() -> None:
    """The error names the run and what to name instead."""
    with pytest.raises(PmlkitError, match=r"is about .*contrastive.*: name runs of moe-one-gpu"):
        load_layers(["sample"])
    assert paths.notebooks().joinpath("25_moe_one_gpu.ipynb").is_file()
