"""Runs a notebook through papermill, strictly: either a complete report comes out, or an error and no HTML."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import NoSuchKernel
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill import execute_notebook
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from pmlkit import paths
from pmlkit.errors import PmlkitError, nearest
from pmlkit.report.export import export_html, write_index
from pmlkit.report.page import SENTINEL
from pmlkit.report.parameters import fill, read_parameters

os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # the debugger's warning would land in every report


def render(notebook: Path, given: list[str], folder: Path | None = None, cell_timeout: int | None = None) -> Path:
    """Execute a notebook with `name=value` parameters and export it; return the HTML.

    The executed copy is `<name>.partial.ipynb` until it is complete. On any failure the partial copy stays for reading,
    an older HTML of the same report is removed, and PmlkitError names the cell and the cause.
    """
    folder = folder or paths.reports()
    folder.mkdir(parents=True, exist_ok=True)
    page, partial = folder / f"{notebook.stem}.html", folder / f"{notebook.stem}.partial.ipynb"
    page.unlink(missing_ok=True)
    try:
        values = settle_run(fill(read_parameters(notebook), given))
        execute(notebook, partial, values, cell_timeout)
        complete = sentinel(partial)
        executed = folder / f"{notebook.stem}.ipynb"
        strip_papermill(partial)
        partial.replace(executed)
        return export_html(executed, page, values, complete)
    finally:
        write_index(folder)


def find_notebook(name: str) -> Path:
    """Return a notebook by path, file name or stem. Raises PmlkitError for an unknown one."""
    known = {path.stem: path for path in sorted(paths.notebooks().glob("*.ipynb"))}
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return path.resolve()
    if path.stem in known and path.suffix in ("", ".ipynb"):
        return known[path.stem]
    raise PmlkitError(f"unknown notebook {name!r} in {paths.relative(paths.notebooks())}: {nearest(path.stem, list(known))}")


def report_notebooks() -> list[Path]:
    """Return the notebooks that only read: all but the campaigns, whose numbers are 10 to 19."""
    return [path for path in sorted(paths.notebooks().glob("*.ipynb")) if not re.match(r"1\d_", path.name)]


def settle_run(values: dict[str, Any]) -> dict[str, Any]:
    """Replace the parameter `run` by the name of the run it means now, so that a page names its data and no folder.

    `latest` becomes the run's id; a path of a known run its name. A folder elsewhere stays as it is for the notebook.
    """
    if "run" not in values:
        return values
    folder = paths.find_run(values["run"])
    names = [name for name, known in paths.run_folders().items() if known.resolve() == folder.resolve()]
    return values | {"run": names[0]} if names else values


def execute(notebook: Path, partial: Path, values: dict[str, Any], cell_timeout: int | None) -> None:
    """Run the notebook in a fresh kernel of this interpreter. Raises PmlkitError that names the failing cell."""
    os.environ.setdefault("PMLKIT_PROGRESS", "bar" if sys.stderr.isatty() else "lines")
    started: list[Any] = []  # papermill stamps cells completed that never ran, so note what did start
    try:
        execute_notebook(
            notebook,
            partial,
            parameters=values,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            stderr_file=sys.stderr,
            execution_timeout=cell_timeout,
            on_cell_start=lambda cell, cell_index: started.append(cell),
            config=Config({"KernelManager": {"transport": "ipc"}}),  # sockets that only this user can open
        )
    except PapermillExecutionError as error:
        cause = f"raised {error.ename}: {error.evalue}"
    except NoSuchKernel:
        cause = "found no kernel named python3; install ipykernel in this environment"
    except DeadKernelError:
        cause = "killed the kernel (out of memory, or a signal)"
    except CellTimeoutError:
        cause = f"ran longer than {cell_timeout} s; raise --cell-timeout"
    else:
        return
    raise PmlkitError(f"{place(notebook, started)} {cause}; see {paths.relative(partial)}")


def place(notebook: Path, started: list[Any]) -> str:
    """Return the last cell that started, by its number in the notebook as committed and its first line."""
    if not started:
        return notebook.name
    numbers = {cell.get("id"): n for n, cell in enumerate(nbformat.read(notebook, as_version=4).cells, start=1)}
    first = started[-1].source.partition("\n")[0]
    return f"{notebook.name}, cell {numbers.get(started[-1].get('id'), 'of injected parameters')} (`{first}`)"


def strip_papermill(notebook: Path) -> None:
    """Remove papermill's metadata, which holds paths of this machine and times."""
    document = nbformat.read(notebook, as_version=4)
    for part in (document, *document.cells):
        part.metadata.pop("papermill", None)
    nbformat.write(document, notebook)


def sentinel(executed: Path) -> dict[str, Any]:
    """Return the content of the sentinel that the last code cell showed.

    Raises PmlkitError if it is missing or counts other figures than the notebook holds: nothing else proves that every
    cell ran, since papermill reports success for cells that never started.
    """
    cells = [c for c in nbformat.read(executed, as_version=4).cells if c.cell_type == "code"]
    outputs = [output.get("data", {}) for output in cells[-1].outputs] if cells else []
    found = next((data[SENTINEL] for data in outputs if SENTINEL in data), None)
    if found is None:
        raise PmlkitError(f"{executed.name} is not complete: its last code cell must be `complete()`")
    figures = sum("image/svg+xml" in o.get("data", {}) for c in cells for o in c.outputs)
    if figures != found["figures"]:
        raise PmlkitError(f"{executed.name} shows {figures} figures but drew {found['figures']}: show each figure once")
    return found
