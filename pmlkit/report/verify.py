"""Rebuilds a report from its raw records and fails on any difference."""

import difflib
import tempfile
from pathlib import Path

from pmlkit import paths
from pmlkit.errors import PmlkitError
from pmlkit.report.export import as_text, read_manifest
from pmlkit.report.load import digest
from pmlkit.report.render import find_notebook, render, report_notebooks


def verify(page: Path) -> str:
    """Render the report again from the data named in its manifest and compare byte by byte; return what was verified.

    Raises PmlkitError if a data file has changed or is missing, or if the rebuilt page differs.
    """
    manifest = read_manifest(page)
    notebook = find_notebook(manifest["notebook"])
    if notebook.resolve() not in [path.resolve() for path in report_notebooks()]:
        raise PmlkitError(f"{page.name} comes from a campaign: verify a page that only reads, such as 90_run_health.html")
    for item in manifest["data"]:
        file = paths.root() / item["file"]
        if not file.is_file():
            raise PmlkitError(f"{page.name}: its data {item['file']} is missing: bring the run folder back")
        if digest(file) != item["sha256"]:
            raise PmlkitError(f"{page.name}: {item['file']} has changed since the report was made: render the report again")
    given = [f"{name}={as_text(value)}" for name, value in manifest["parameters"].items()]
    with tempfile.TemporaryDirectory() as folder:
        rebuilt = render(notebook, given, Path(folder)).read_text()
    original = page.read_text()
    if rebuilt != original:
        lines = difflib.unified_diff(original.splitlines(), rebuilt.splitlines(), "report", "rebuilt", lineterm="", n=0)
        first = next((line for line in lines if line[0] in "+-" and line[:3] not in ("---", "+++")), "")
        raise PmlkitError(f"{page.name} differs from what its data give, first at: {first[:200]}")
    return f"{page.name}: rebuilt from {len(manifest['data'])} data files, byte for byte the same"
