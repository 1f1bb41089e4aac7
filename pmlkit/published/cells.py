"""Tables in text copied from a web page: one cell a line, a row begins and every cell ends with '|'."""

import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import NamedTuple

from pmlkit.release import Printed

NUMBER = re.compile(r"(0|[1-9]\d{0,2}(,\d{3})+|[1-9]\d*)(\.\d+)?")


class Cell(NamedTuple):
    """A cell or a line of prose. line: counted from 1."""

    line: int
    text: str


class Table(NamedTuple):
    """A table under the last line of prose before it. rows: the header first."""

    title: Cell
    rows: list[list[Cell]]


class Unparsable(ValueError):
    """Text that is not what the format says: line, text, and what was expected."""

    def __init__(self, cell: Cell, expected: str) -> None:
        super().__init__(f"{cell.line}: {cell.text!r}: {expected}")


def texts(cells: Iterable[Cell]) -> list[str]:
    """Return the texts of cells in order."""
    return [cell.text for cell in cells]


def blocks(text: str) -> tuple[list[Cell], list[Table]]:
    """Return the lines of prose and the tables of a page. Raises Unparsable for a cell that belongs to no row."""
    prose: list[Cell] = []
    tables: list[Table] = []
    inside = False
    for number, raw in enumerate(text.split("\n"), start=1):
        line = " ".join(raw.split())  # also turns no-break spaces into spaces
        cell = Cell(number, line.strip("|").strip())
        if not line:
            continue
        if not line.endswith("|"):
            prose.append(Cell(number, line))
            inside = False
        elif line.startswith("|") and line != "|":  # a lone '|' ends an empty cell
            if not inside:
                tables.append(Table(prose[-1] if prose else Cell(number, ""), []))
            tables[-1].rows.append([cell])
            inside = True
        elif inside:
            tables[-1].rows[-1].append(cell)
        else:
            raise Unparsable(cell, "expected the first cell of a row, which begins with '|'")
    return prose, tables


def rows(table: Table, columns: dict[str, str]) -> Iterator[dict[str, Cell]]:
    """Yield the rows below the header as cells by field. columns: field by heading. Raises Unparsable."""
    header = table.rows[0]
    if missing := [column for column in columns if column not in texts(header)]:
        raise Unparsable(header[0], f"expected a table with the column {missing[0]!r}; its header lacks it")
    if len(header) != len(columns):
        raise Unparsable(header[0], f"expected a header of the {len(columns)} columns {', '.join(columns)}")
    for row in table.rows[1:]:
        if len(row) != len(header):
            raise Unparsable(row[0], f"expected a row of {len(header)} cells, found {len(row)}")
        yield {columns[head.text]: cell for head, cell in zip(header, row, strict=True)}


def whole(text: str) -> int:
    """Return a whole number printed with thousands separators."""
    return int(text.replace(",", ""))


def number(cell: Cell) -> Printed:
    """Return a number of three significant digits (whole from 1,000 on) and its half-width. Raises Unparsable."""
    if not NUMBER.fullmatch(cell.text):
        raise Unparsable(cell, "expected a number such as 5.15 or 2,118")
    value = Decimal(cell.text.replace(",", ""))
    # Trailing zeros are dropped: "2" was rounded to 2.00, so the unit follows from the size, not from the digits seen.
    unit = Decimal(1) if value >= 1000 else Decimal(10) ** (value.adjusted() - 2)
    if not value or value % unit:
        raise Unparsable(cell, "expected a positive number of three significant digits, whole from 1,000 on")
    return Printed(value=float(value), half_width=float(unit / 2))
