"""The parameters cell: read without running it, filled strictly."""

from pathlib import Path

import nbformat
import pytest

from pmlkit.errors import PmlkitError
from pmlkit.report.parameters import fill, read_parameters

GOOD = """# a comment
run: str = "latest"  # which
batch: int = 512
rate: float = 1.5
flag: bool = False
names: list[str] = ["a", "b"]
odd: str = "a=b"
colour: str = "#fff"
"""


def notebook(folder: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]}) for source in sources]
    path = folder / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_defaults_are_read_whole(tmp_path: Path) -> None:
    """Values with an equals sign or a hash survive, which papermill's own inspection drops or cuts."""
    values = fill(read_parameters(notebook(tmp_path, GOOD)), [])
    assert values == {
        "run": "latest", "batch": 512, "rate": 1.5, "flag": False, "names": ["a", "b"], "odd": "a=b", "colour": "#fff",
    }  # fmt: skip


def test_text_becomes_the_declared_type(tmp_path: Path) -> None:
    """3.10 stays a string where a string is declared; hashes that look like numbers too; lists are split at commas."""
    given = ["run=3.10", "batch=-7", "rate=1e3", "flag=TRUE", "names=x,y", "odd=12e4567", "colour=0012345"]
    values = fill(read_parameters(notebook(tmp_path, GOOD)), given)
    assert values == {
        "run": "3.10", "batch": -7, "rate": 1000.0, "flag": True, "names": ["x", "y"], "odd": "12e4567", "colour": "0012345",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["rnu=x"], "unknown parameter 'rnu': did you mean 'run'"),
        (["batch=many"], "'batch': 'many' is not a int"),
        (["batch=1.0"], "'batch': '1.0' is not a int"),
        (["flag=no"], "'flag': 'no' is not a bool"),
        (["rate=fast"], "'rate': 'fast' is not a float"),
        (["run"], "write it as name=value"),
        (["run=a", "run=b"], "given twice"),
    ],
)
def test_bad_values_stop_before_any_work(tmp_path: Path, given: list[str], message: str) -> None:
    """A misspelt name, a wrong type, a missing value and a repetition are each one clear error."""
    with pytest.raises(PmlkitError, match=message):
        fill(read_parameters(notebook(tmp_path, GOOD)), given)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ((), "0 cells tagged 'parameters'"),
        ((GOOD, GOOD), "2 cells tagged 'parameters'"),
        (('run = "x"',), "line 1: only `name: type = literal`"),
        (("import os",), "only `name: type = literal`"),
        (("x: dict = {}",), "x has type dict; use one of"),
        (("x: int = 1\ny: int = 1 + x",), "line 2: y is not a literal"),
        (('x: int = "1"',), "x = '1' is not a int"),
        (("x: float = 1",), "x = 1 is not a float"),
        (("x: int = True",), "x = True is not a int"),
        (("x: list[str] = [1]",), "is not a list"),
    ],
)
def test_bad_cells_name_notebook_and_line(tmp_path: Path, sources: tuple[str, ...], message: str) -> None:
    """A parameters cell that is not plain annotated literals is refused with its place."""
    with pytest.raises(PmlkitError, match=message) as error:
        read_parameters(notebook(tmp_path, *sources))
    assert "n.ipynb" in str(error.value)
