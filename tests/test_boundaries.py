"""The shape of the package: who may import whom, how large a file may be, what must not be loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pmlkit"
FILES = sorted(PACKAGE.rglob("*.py"))
TORCH_FREE = {"losses/work.py", "moe/load.py", "moe/memory.py", "moe/regions.py", "moe/work.py"}
MAY_IMPORT = {
    "": set(),
    "losses": {"losses"},
    "moe": {"moe"},
    "bench": {"losses", "moe", "bench"},
    "published": {"published"},
    "report": {"report"},
}
BANNED_NAMES = {"utils", "helpers", "common", "misc", "core"}


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def imports(file: Path) -> set[str]:
    """Return every module that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("file", [f for f in FILES if f.name != "__main__.py"], ids=name_of)
def test_imports_flow_one_way(file: Path) -> None:
    """A module imports the root vocabulary, its own layer, the layers left of it, and torch-free work models."""
    layer = file.relative_to(PACKAGE).parts[0] if len(file.relative_to(PACKAGE).parts) > 1 else ""
    for module in imports(file):
        parts = module.split(".")
        if parts[0] != "pmlkit" or len(parts) < 2 or not (PACKAGE / parts[1]).is_dir():
            continue
        work_model = "/".join(parts[1:3]) + ".py" in TORCH_FREE or (len(parts) == 2)
        assert parts[1] in MAY_IMPORT[layer] or work_model, f"{name_of(file)} must not import {module}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_libraries_stay_on_their_side(file: Path) -> None:
    """report, published and the root load no torch; losses, moe and bench no pandas or matplotlib."""
    used = {module.split(".")[0] for module in imports(file)}
    layer = name_of(file).split("/")[0]
    if layer in ("losses", "moe", "bench") and name_of(file) not in TORCH_FREE:
        assert not used & {"pandas", "matplotlib"}
    else:
        assert not used & {"torch", "triton"}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_and_functions_stay_small(file: Path) -> None:
    """A file has at most 300 lines, a function 50, with kernels 400 and 80; names say what a file is about."""
    text = file.read_text()
    kernels = "@triton.jit" in text
    assert len(text.splitlines()) <= (400 if kernels else 300)
    assert file.stem not in BANNED_NAMES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            most = 80 if any("triton" in ast.unparse(one) for one in node.decorator_list) else 50
            assert node.end_lineno - node.lineno < most, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {module.split(".")[0] for module in done.stderr.split()}


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import pmlkit", {"torch", "pandas", "numpy"}),
        ("from pmlkit.__main__ import main; main(['list'])", {"torch", "pandas", "numpy"}),
        ("from pmlkit.__main__ import main; main(['plan'])", {"torch", "pandas", "numpy"}),
        ("import pmlkit.bench.worker", {"torch", "pandas", "numpy"}),
        ("import pmlkit.report.tables.run, pmlkit.report.plots.roofline, pmlkit.report.verdicts", {"torch", "triton"}),
        ("import pmlkit.losses.contrastive, pmlkit.bench.runner", {"pandas", "matplotlib"}),
    ],
)
def test_what_is_loaded(code: str, absent: set[str]) -> None:
    """Importing pmlkit and listing load neither torch nor pandas; drawing needs no torch; measuring no pandas."""
    assert not loaded_by(code) & absent


def test_nothing_private_is_committed() -> None:
    """No file names a path of somebody's machine."""
    root = PACKAGE.parent
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split("\0"):
        if name and name != "tests/test_boundaries.py" and (root / name).is_file():
            content = (root / name).read_bytes()
            assert b"/home/" not in content and b"/root/" not in content and b"/Users/" not in content, name
