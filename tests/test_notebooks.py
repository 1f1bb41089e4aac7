"""The committed notebooks: thin, stripped, and each of them renders to a safe, stable page."""

import ast
import html.parser
import json
import re
import shutil
from pathlib import Path

import pytest

from pmlkit import paths
from pmlkit.errors import PmlkitError
from pmlkit.report.export import LIMIT_BYTES, read_manifest
from pmlkit.report.parameters import read_parameters
from pmlkit.report.render import find_notebook, render, report_notebooks
from pmlkit.report.verify import verify

NOTEBOOKS = sorted(paths.notebooks().glob("*.ipynb"))
REPORTS = report_notebooks()
ALLOWED = {"pmlkit", "pandas", "matplotlib"}
BANNED = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.With, ast.comprehension, ast.AsyncFunctionDef)


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_promised_notebooks_exist() -> None:
    """One notebook a question; the campaign is the only one that measures."""
    names = {path.stem for path in NOTEBOOKS}
    assert {"00_start_here", "10_run_campaign", "20_loss_versions", "21_moe_pipelines"} <= names
    assert {"22_loss_gradients", "23_loss_capacity", "24_loss_pace", "30_roofline", "90_run_health"} <= names
    assert {path.stem for path in NOTEBOOKS} - {path.stem for path in REPORTS} == {"10_run_campaign"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_stripped(path: Path) -> None:
    """No outputs, counts or papermill metadata; the portable kernel name; format 4.5 with cell ids."""
    document = json.loads(path.read_text())
    assert document["metadata"]["kernelspec"]["name"] == "python3"
    assert "papermill" not in json.dumps(document["metadata"])
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    for cell in document["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        assert set(cell["metadata"]) <= {"tags"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_thin(path: Path) -> None:
    """Title, parameters, imports; at most 12 code cells of 8 lines; no logic, no path, no magic, one shown object a cell."""
    document = json.loads(path.read_text())
    assert [cell["cell_type"] for cell in document["cells"][:3]] == ["markdown", "code", "code"]
    assert "".join(document["cells"][0]["source"]).startswith("# ")
    assert read_parameters(path)
    cells = code_cells(path)
    assert len(cells) <= 12
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        tree = ast.parse(source)
        assert len(source.splitlines()) <= (12 if number == 1 else 8)
        assert not any(isinstance(node, BANNED) for node in ast.walk(tree))
        assert "open(" not in source
        assert not re.search(r"[\"'](\.{0,2}/|~)", source)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {(n.module or "") if isinstance(n, ast.ImportFrom) else n.names[0].name for n in imports}
        assert {module.split(".")[0] for module in modules} <= ALLOWED
        assert bool(imports) == (number == 1)
        assert len(re.findall(r"\b(?:table|plot)_\w+\(", source)) <= 1
    assert "".join(cells[-1]["source"]) == "complete()"


class Page(html.parser.HTMLParser):
    """Collects what a page could load, its ids, its headings and its figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "srcset", "data")]
        if tag == "link":
            self.loads.append(attributes.get("href") or "")
        if "id" in attributes:
            self.ids.append(attributes["id"] or "")
        if tag == "img":
            self.images.append(attributes)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Render every report once on the sample run and the published data."""
    folder = tmp_path_factory.mktemp("reports")
    return {path.stem: render(path, on_sample(path), folder) for path in REPORTS}


def on_sample(path: Path) -> list[str]:
    return ["run=sample"] if "run" in read_parameters(path) else []


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.stem)
def test_pages_are_self_contained(path: Path, pages: dict[str, Path]) -> None:
    """No script, nothing loaded from anywhere, unique ids, under 3 MB, verdict first, every figure with a long alt text."""
    text = pages[path.stem].read_text()
    page = Page(text)
    assert len(text.encode()) < LIMIT_BYTES
    assert not {"script", "iframe", "object", "embed", "svg"} & set(page.tags)
    assert all(load.startswith("data:image/") for load in page.loads)
    assert "@import" not in text
    assert "url(" not in text
    assert len(set(page.ids)) == len(page.ids)
    assert page.tags.count("h1") == 1
    assert text.index('<div class="verdict">') < text.index('<div class="provenance">')
    assert len(page.images) == sum("plot_" in "".join(cell["source"]) for cell in code_cells(path)[2:])
    for image in page.images:
        assert re.search(r"\d", image["alt"] or "")
        assert len(image["alt"] or "") > 60
    assert "report complete" in text


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.stem)
def test_pages_rebuild_byte_for_byte(path: Path, pages: dict[str, Path]) -> None:
    """`verify` renders the page again from the data in its manifest and finds not one byte different."""
    assert "byte for byte the same" in verify(pages[path.stem])


def test_verify_finds_an_edited_number(pages: dict[str, Path], tmp_path: Path) -> None:
    """A page whose digits were changed by hand does not verify, nor does any other file."""
    page = tmp_path / "21_moe_pipelines.html"
    page.write_text(pages["21_moe_pipelines"].read_text().replace("1.424", "1.324"))
    with pytest.raises(PmlkitError, match="differs from what its data give"):
        verify(page)
    page.write_text("<html></html>")
    with pytest.raises(PmlkitError, match="not a report"):
        verify(page)


def test_the_index_lists_every_report_with_its_verdict(pages: dict[str, Path]) -> None:
    """index.html links every page and repeats its verdict; it loads nothing."""
    text = (pages["30_roofline"].parent / "index.html").read_text()
    page = Page(text)
    assert not page.loads
    assert "script" not in page.tags
    for name, path in pages.items():
        assert f'href="{name}.html"' in text
        assert read_manifest(path)["verdict"]
    assert "8 faster, 5 slower, 5 inconclusive of 18" in text
    assert len(set(page.ids)) == len(page.ids)


def test_pages_open_from_an_empty_folder(pages: dict[str, Path], tmp_path: Path) -> None:
    """A page needs no file beside it."""
    copy = shutil.copy(pages["20_loss_versions"], tmp_path / "alone.html")
    assert all(load.startswith("data:") for load in Page(Path(copy).read_text()).loads)


def test_find_notebook() -> None:
    """A notebook is found by path, file name and stem; another name is an error with the nearest."""
    path = (paths.notebooks() / "30_roofline.ipynb").resolve()
    assert find_notebook(str(path)) == find_notebook("30_roofline").resolve() == path
    with pytest.raises(PmlkitError, match="30_roofline"):
        find_notebook("30_rooflin")
