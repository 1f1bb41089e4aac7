"""The three lists of packages say the same thing."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONDA_NAMES = {"pytorch": "torch"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;\s]", text.strip(), maxsplit=1)[0] for text in requirements}


def versions(requirements: list[str]) -> dict[str, str]:
    return {next(iter(names([r]))): re.sub(r"[^\d.]", "", r.split("]")[-1]) for r in requirements if re.search(r"=\d", r)}


def conda() -> list[str]:
    lines = (ROOT / "environment.yml").read_text().split("dependencies:")[1].splitlines()
    found = [line.strip()[2:] for line in lines if line.strip().startswith("- ")]
    return [re.sub(r"^[a-z-]+", lambda m: CONDA_NAMES.get(m.group(), m.group()), text) for text in found]


def python() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    return [*project["dependencies"], *extras]


def test_both_environments_name_the_same_packages() -> None:
    """environment.yml and pyproject.toml, extras included, list the same packages."""
    assert names(conda()) - {"python"} == names(python())


def test_bounds_agree() -> None:
    """Where both give a version, it is the same version."""
    left, right = versions(conda()), versions(python())
    assert {k: left[k] for k in right} == right


def test_constraints_satisfy_the_bounds() -> None:
    """constraints.txt pins torch and triton at or above the supported minimum."""
    pins = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    least = versions(python())
    for package in ("torch", "triton"):
        assert tuple(map(int, pins[package].split("."))) >= tuple(map(int, least[package].split(".")))


def test_user_packages_are_there() -> None:
    """The packages that the workbook was asked to stand on are dependencies."""
    assert {"jupyterlab", "torch", "triton", "pandas", "matplotlib", "papermill"} <= names(python())
