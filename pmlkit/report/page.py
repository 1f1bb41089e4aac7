"""What a notebook cell shows: a table, a sentence, a banner, and the sentinel that says the report is complete.

Each object describes itself as HTML and as plain text, so that one notebook serves JupyterLab, batch runs and export.
"""

import html
from collections import Counter
from typing import Any

import pandas as pd

SENTINEL = "application/vnd.pmlkit.complete+json"

# Kinds of data that the run parameter can mean: measured, and invented.
RUN_KINDS = ("measured data", "sample data")

_shown: Counter[str] = Counter()
_data: dict[str, dict[str, str]] = {}


def note_data(kind: str, name: str, file: str, sha256: str) -> None:
    """Note which data a page is made from, for the page's manifest; the first note of a file stands."""
    _data.setdefault(file, {"kind": kind, "name": name, "file": file, "sha256": sha256})


def count_shown(kind: str) -> None:
    """Note that a figure or a table was put on the page, for the sentinel."""
    _shown[kind] += 1


class Html:
    """A piece of page: escaped HTML and its plain-text twin."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup, self.text = markup, text

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.markup, "text/plain": self.text}


class Table:
    """A data frame as a page table: column titles, number formats, a class per cell from `classes`.

    key: unique id on the page. formats: column -> format string. classes: column whose text becomes the CSS
    class of its own cell (verdicts, statuses). More than `fold` rows are folded behind the caption.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        key: str,
        caption: str,
        formats: dict[str, str] | None = None,
        classes: tuple[str, ...] = (),
        fold: int = 25,
    ) -> None:
        self.frame, self.key, self.caption, self.fold = frame, key, caption, fold
        self.formats, self.classes = formats or {}, classes

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        count_shown("table")
        return {"text/html": self.markup(), "text/plain": self.text()}

    def cells(self) -> list[list[str]]:
        """Return every cell as printed; a missing value is an em dash."""
        columns = [[self._format(column, value) for value in self.frame[column]] for column in self.frame.columns]
        return [list(row) for row in zip(*columns, strict=True)]

    def markup(self) -> str:
        """Return the table as HTML."""
        numeric = [pd.api.types.is_numeric_dtype(self.frame[c]) or c in self.formats for c in self.frame.columns]
        head = "".join(f'<th scope="col">{html.escape(str(c))}</th>' for c in self.frame.columns)
        body = []
        for row in self.cells():
            tags = []
            for column, number, cell in zip(self.frame.columns, numeric, row, strict=True):
                kind = f"is-{cell.replace(' ', '-')}" if column in self.classes else "num" if number else "text"
                tags.append(f'<td class="{html.escape(kind)}">{html.escape(cell)}</td>')
            body.append(f"<tr>{''.join(tags)}</tr>")
        rows = "".join(body) or f'<tr><td colspan="{len(numeric)}">none</td></tr>'
        table = f'<table id="{self.key}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        caption = html.escape(self.caption)
        if len(body) > self.fold:
            return f'<details class="table"><summary>{caption} ({len(body)} rows)</summary>{table}</details>'
        return f'<div class="table"><p class="caption">{caption}</p>{table}</div>'

    def text(self) -> str:
        """Return the table as aligned plain text."""
        return f"{self.caption}\n{pd.DataFrame(self.cells(), columns=self.frame.columns).to_string(index=False)}"

    def _format(self, column: str, value: Any) -> str:
        if value is None or value is pd.NA or (isinstance(value, float) and pd.isna(value)):
            return "—"
        form = self.formats.get(column)
        return format(value, form) if form else str(value)


def verdict(*sentences: str) -> Html:
    """Return the opening of a report: what was found, with numbers, in plain sentences."""
    lines = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences if sentence)
    return Html(f'<div class="verdict">{lines}</div>', "\n".join(s for s in sentences if s))


def note(title: str, *sentences: str) -> Html:
    """Return a boxed note, such as what must not be concluded."""
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences if sentence)
    text = "\n".join([f"{title}:", *(f"- {s}" for s in sentences if s)])
    return Html(f'<div class="note"><p class="caption">{html.escape(title)}</p><ul>{items}</ul></div>', text)


class Complete:
    """The sentinel: shown by the last cell, it proves that every cell before it ran."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        content = {"report_complete": True, "figures": _shown["figure"], "tables": _shown["table"], "data": [*_data.values()]}
        return {SENTINEL: content, "text/plain": f"report complete: {content['figures']} figures, {content['tables']} tables"}


def complete() -> Complete:
    """Return the sentinel. The exporter refuses a notebook whose last code cell does not show one."""
    return Complete()
