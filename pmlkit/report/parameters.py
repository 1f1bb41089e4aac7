"""The parameters cell of a notebook: read without running it, and filled strictly from text.

papermill's own inspection drops `s: str = "a=b"`, cuts `"#fff"`, casts by appearance and only warns about unknown
names; a report with a silently defaulted parameter would answer another question.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from pmlkit.errors import PmlkitError, nearest

TYPES = ("str", "int", "float", "bool", "list[str]")


@dataclass(frozen=True)
class Parameter:
    """One annotated literal of the parameters cell."""

    name: str
    kind: str
    default: Any


def read_parameters(notebook: Path) -> dict[str, Parameter]:
    """Return the parameters of a notebook by name.

    Raises PmlkitError unless there is exactly one cell tagged `parameters` that holds annotated literals only.
    """
    cells = [c for c in nbformat.read(notebook, as_version=4).cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise PmlkitError(f"{notebook.name} has {len(cells)} cells tagged 'parameters': tag exactly one")
    found = {}
    for statement in ast.parse(cells[0].source).body:
        place = f"{notebook.name}, parameters cell, line {statement.lineno}"
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name) or statement.value is None:
            raise PmlkitError(f"{place}: only `name: type = literal` may stand here")
        name, kind = statement.target.id, ast.unparse(statement.annotation)
        if kind not in TYPES:
            raise PmlkitError(f"{place}: {name} has type {kind}; use one of {', '.join(TYPES)}")
        try:
            default = ast.literal_eval(statement.value)
        except ValueError:
            raise PmlkitError(f"{place}: {name} is not a literal; move the computation into the package") from None
        if not _fits(default, kind):
            raise PmlkitError(f"{place}: {name} = {default!r} is not a {kind}; change the value or the type")
        found[name] = Parameter(name, kind, default)
    return found


def fill(parameters: dict[str, Parameter], given: list[str]) -> dict[str, Any]:
    """Return every parameter's value: the default, or the text of `name=value` read as the declared type.

    A list is written `a,b,c`, a bool `true` or `false`. Raises PmlkitError for an unknown name, one given twice, or text
    that is not of the type.
    """
    values = {name: parameter.default for name, parameter in parameters.items()}
    seen = set()
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise PmlkitError(f"parameter {text!r}: write it as name=value")
        if name not in parameters:
            raise PmlkitError(f"unknown parameter {name!r}: {nearest(name, list(parameters))}")
        if name in seen:
            raise PmlkitError(f"parameter {name!r} is given twice: give it once")
        seen.add(name)
        values[name] = _read(name, value, parameters[name].kind)
    return values


def _read(name: str, text: str, kind: str) -> Any:
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "list[str]":
            return [item for item in text.split(",") if item]
        return {"str": str, "int": int, "float": float}[kind](text)
    except (ValueError, KeyError):
        raise PmlkitError(f"parameter {name!r}: {text!r} is not a {kind}; give a {kind}") from None


def _fits(value: Any, kind: str) -> bool:
    if kind == "list[str]":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return type(value).__name__ == kind
