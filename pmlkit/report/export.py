"""Turns an executed notebook into one self-contained HTML file, and keeps the index over all of them."""

import json
import re
import shlex
from contextlib import suppress
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import nbformat
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from pmlkit import __version__, paths
from pmlkit.errors import PmlkitError
from pmlkit.report.figure import data_uri
from pmlkit.report.page import RUN_KINDS

TEMPLATES = Path(str(files("pmlkit") / "report" / "template"))
LIMIT_BYTES = 3_000_000


def export_html(executed: Path, page: Path, values: dict[str, Any], complete: dict[str, Any]) -> Path:
    """Write the page for an executed notebook. Raises PmlkitError if it would exceed 3 MB.

    The page carries a manifest (notebook, parameters, digests of the data, verdict), from which it can be rebuilt.
    """
    notebook = nbformat.read(executed, as_version=4)
    title = next((line[2:] for c in notebook.cells for line in c.source.splitlines() if line.startswith("# ")), page.stem)
    loaded = next((item["name"] for item in complete["data"] if item["kind"] in RUN_KINDS), "")
    public = values | ({"run": loaded} if is_folder(values.get("run", "")) else {})
    manifest = {
        "notebook": page.stem,
        "title": title,
        "parameters": public,
        "data": complete["data"],
        "verdict": _verdict(notebook),
    }
    words = ["python", "-m", "pmlkit", "report", f"notebooks/{page.stem}.ipynb"]
    words += [word for name, value in public.items() for word in ("-p", f"{name}={as_text(value)}")]
    exporter = HTMLExporter(
        template_name="pmlkit",
        extra_template_basedirs=[str(TEMPLATES)],
        filters={"data_uri": data_uri, "prose": prose},
        exclude_input=True,
    )
    about = {
        "css": (TEMPLATES / "pmlkit" / "style.css").read_text(),
        "manifest": json.dumps(manifest, sort_keys=True),
        "title": f"{title} · pmlkit",
        "command": shlex.join(words),
        "version": __version__,
    }
    text, _ = exporter.from_notebook_node(notebook, resources={"pmlkit": about})
    if len(text.encode()) > LIMIT_BYTES:
        raise PmlkitError(f"{page.name} would be {len(text.encode()):,} bytes, limit {LIMIT_BYTES:,}: show fewer marks or rows")
    temporary = page.with_suffix(".html.tmp")
    temporary.write_text(text)
    temporary.replace(page)
    return page


def is_folder(value: str) -> bool:
    """Return whether a run was given as a folder of this machine, which no page may name."""
    return "/" in value and value not in paths.run_folders()


def prose(source: str) -> str:
    """Return Markdown as HTML. Raw HTML is escaped, and links to notebooks lead to their pages."""
    renderer = IPythonRenderer(escape=True, exclude_anchor_links=True)
    return re.sub(r'href="([\w./-]+)\.ipynb"', r'href="\1.html"', MarkdownWithMath(renderer=renderer).render(source))


def as_text(value: Any) -> str:
    """Return a parameter value as the command line takes it."""
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_manifest(page: Path) -> dict[str, Any]:
    """Return the manifest of an exported page. Raises PmlkitError for any other file."""
    finder = _ManifestFinder()
    if page.is_file():
        finder.feed(page.read_text())
    if finder.manifest is None:
        raise PmlkitError(f"{page} is not a report that pmlkit exported: give the path of an exported HTML file")
    return json.loads(finder.manifest)


class _ManifestFinder(HTMLParser):
    """Finds the content of the manifest's meta element."""

    manifest: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "meta" and attributes.get("name") == "pmlkit-manifest":
            self.manifest = attributes.get("content")


def write_index(folder: Path) -> Path:
    """Write `index.html` over all reports of a folder, each with its verdict; return its path."""
    pages = []
    for page in sorted(folder.glob("*.html")):
        with suppress(PmlkitError):  # somebody else's page
            pages.append({"name": page.stem} | read_manifest(page))
    template = jinja2.Environment(autoescape=True).from_string((TEMPLATES / "index_page.html.j2").read_text())
    index = folder / "index.html"
    index.write_text(template.render(pages=pages, css=(TEMPLATES / "pmlkit" / "style.css").read_text()))
    return index


def _verdict(notebook: Any) -> list[str]:
    """Return the lines of the first verdict that the notebook shows."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data and data["text/html"].startswith('<div class="verdict">'):
                return data["text/plain"].splitlines()
    return []
