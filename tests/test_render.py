"""Strict execution: whatever goes wrong leaves an error, the partial notebook, and no HTML."""

import json
from pathlib import Path

import nbformat
import pytest

from pmlkit import paths
from pmlkit.__main__ import main
from pmlkit.errors import PmlkitError
from pmlkit.report.export import read_manifest
from pmlkit.report.render import render
from pmlkit.report.verify import verify
from tests import sample_run

VERDICT = "from pmlkit.report.page import complete, verdict\nverdict('all is well: 1 of 1')"


def make(folder: Path, *cells: str, name: str = "small") -> Path:
    """Write a notebook: title, a parameters cell, then these code cells."""
    parameters = nbformat.v4.new_code_cell("# one\nn: int = 1", metadata={"tags": ["parameters"]})
    title = nbformat.v4.new_markdown_cell("# Small\n\n<script>x</script>\n\n[next](next.ipynb)")
    code = [nbformat.v4.new_code_cell(source) for source in cells]
    document = nbformat.v4.new_notebook(cells=[title, parameters, *code])
    document.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    path = folder / f"{name}.ipynb"
    nbformat.write(document, path)
    return path


def test_a_good_notebook_becomes_a_page(tmp_path: Path) -> None:
    """The page has title, verdict and command; raw HTML in prose is escaped; links lead to pages; no partial file stays."""
    out = tmp_path / "out"
    page = render(make(tmp_path, VERDICT, "complete()"), ["n=3"], out)
    text = page.read_text()
    assert "Small" in text
    assert "all is well: 1 of 1" in text
    assert "<script>" not in text
    assert 'href="next.html"' in text
    assert "-p n=3" in text
    assert not list(out.glob("*.partial.ipynb"))
    assert "all is well" in (out / "index.html").read_text()


FAILURES = {
    "raises": ("1 / 0", "raised ZeroDivisionError: division by zero"),
    "kernel killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "killed the kernel"),
    "too slow": ("import time\ntime.sleep(60)", "ran longer than 4 s"),
    "unknown run": ("from pmlkit.report.load import load_run\nload_run('sampl')", "did you mean 'sample'"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failing_cell_leaves_no_page(tmp_path: Path, kind: str) -> None:
    """The error names the cell and the cause, the partial notebook stays, an older page of the report is gone."""
    source, message = FAILURES[kind]
    out = tmp_path / "out"
    out.mkdir()
    older = out / "small.html"
    older.write_text("an older page")
    with pytest.raises(PmlkitError, match=message) as error:
        render(make(tmp_path, VERDICT, source, "complete()"), [], out, cell_timeout=4)
    assert f"small.ipynb, cell 4 (`{source.splitlines()[0]}`)" in str(error.value)
    assert (out / "small.partial.ipynb").is_file()
    assert not older.exists()
    assert not list(out.glob("small.html*"))


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ((VERDICT,), "not complete"),
        ((VERDICT, "complete()", "1"), "not complete"),
        ((VERDICT, "from pmlkit.report.page import count_shown\ncount_shown('figure')\ncomplete()"), "0 figures but drew 1"),
    ],
)
def test_a_notebook_without_sentinel_is_refused(tmp_path: Path, cells: tuple[str, ...], message: str) -> None:
    """papermill's success is no proof: the last cell must show the sentinel, and every figure drawn must be there."""
    with pytest.raises(PmlkitError, match=message):
        render(make(tmp_path, *cells), [], tmp_path / "out")
    assert not (tmp_path / "out" / "small.html").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rnu=x", "unknown parameter 'rnu': did you mean 'run'?"),
        ("precisions=", "no case has one of them"),
        ("run=nosuchrun", "unknown run 'nosuchrun'"),
        ("source=gb300", "did you mean 'gb300-moe'"),
    ],
)
def test_the_command_line_exits_non_zero(given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt, mistyped or unknown value ends the command with a status that is not zero and leaves no HTML."""
    assert main(["report", "notebooks/30_roofline.ipynb", "-p", given, "--output", str(tmp_path)]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "30_roofline.html").exists()


def test_a_foreign_page_does_not_matter(tmp_path: Path) -> None:
    """Somebody else's HTML in the folder neither fails a good report nor hides the error of a bad one."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.html").write_text("<p>mine</p>")
    notebook = make(tmp_path, VERDICT, "complete()")
    assert render(notebook, [], out).is_file()
    with pytest.raises(PmlkitError, match="unknown parameter 'm'"):
        render(notebook, ["m=1"], out)
    assert (out / "notes.html").read_text() == "<p>mine</p>"
    assert "notes" not in (out / "index.html").read_text()


def test_a_campaign_page_is_not_verified(tmp_path: Path) -> None:
    """Verifying never measures: a page of a campaign notebook is refused before anything runs."""
    page = render(make(tmp_path, VERDICT, "complete()", name="10_run_campaign"), [], tmp_path / "out")
    with pytest.raises(PmlkitError, match="comes from a campaign"):
        verify(page)


def test_no_page_or_notebook_names_a_folder(tmp_path: Path) -> None:
    """A run given as a folder is shown by its id in page, footer and manifest; the executed copy holds no paths."""
    sample_run.write(tmp_path / "secret-place")
    out = tmp_path / "out"
    for name in ("00_start_here", "90_run_health"):
        page = render(paths.notebooks() / f"{name}.ipynb", [f"run={tmp_path / 'secret-place'}"], out)
        assert "secret-place" not in page.read_text()
        assert read_manifest(page)["parameters"] == {"run": sample_run.RUN_ID}
    assert "papermill" not in json.loads((out / "90_run_health.ipynb").read_text())["metadata"]
