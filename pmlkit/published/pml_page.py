"""Importer of the timing and memory page that accompanies pytorch-metric-learning 3.0.1 (source `pml-3.0.1`).

Measured: a loss alone, forward and backward, in three new processes per configuration and version. A process averages
three blocks of a hundred pairs; `total` is the mean of the processes, `range` their lowest and highest. Peak memory is
what the PyTorch allocator handed out, in MiB.
Limits: no samples and no middle process value (it has to be rebuilt from mean and range); three digits; forward and
backward are averages of their own and do not add up to the total; correctness was not part of it; 3.0.1 stands for a
commit that was measured before the release.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

from pmlkit.errors import PmlkitError, nearest
from pmlkit.losses.work import loss_work
from pmlkit.published.cells import Cell, Table, Unparsable, blocks, number, rows, texts, whole
from pmlkit.record import Status
from pmlkit.release import LossValues, PublishedRecord

T = TypeVar("T")

SOURCE = "pml-3.0.1"
LOSSES = {
    "Batch-hard + Triplet": "batch_hard_triplet",
    "Contrastive": "contrastive",
    "NT-Xent": "ntxent",
    "ProxyAnchor": "proxy_anchor",
}
PROXY_LOSSES = ("proxy_anchor",)
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
STATUSES: dict[str, Status] = {"ok": "ok", "oom": "oom"}
HARDWARE = {
    "GPU": "gpu",
    "GPU memory (GiB)": "gpu_memory_gib",
    "Host CPU": "host_cpu",
    "PyTorch": "pytorch",
    "CUDA": "cuda",
}
FIGURES = {
    "Total": "total",
    "Forward": "forward",
    "Backward": "backward",
    "Process range": "range",
    "Peak MiB": "peak",
}
TIMINGS = {"GPU": "gpu", "Version": "version", "Status": "status", **FIGURES}
ABSENT = "—"
EN_DASH = "\N{EN DASH}"  # between the ends of a range
CATEGORY = re.compile(
    r"(\w+): ([1-9][\d,]*) dimensions, ([1-9][\d,]*) samples per class for pair/triplet losses, "
    r"([1-9][\d,]*) classes for proxy losses\."
)
RELEASE = re.compile(r"\d+(\.\d+)+((a|b|rc)\d+)?")
ALIAS = re.compile(r"The (\d\S* \w+) rows .*? original (\S+) identifier")


class _Page(NamedTuple):
    """What the page says once. environments: by GPU. sizes: D, per class, C by category. aliases: ids by name."""

    file: str
    environments: dict[str, dict[str, str]]
    sizes: dict[str, tuple[int, int, int]]
    aliases: dict[str, str]


def import_page(text: str, file: str) -> list[PublishedRecord]:
    """Return one record a table row, in page order. Raises PmlkitError with file, line and what was expected."""
    try:
        prose, tables = blocks(text)
        timings = [table for table in tables if not _is_hardware(table)]
        if not timings:
            raise Unparsable(Cell(1, text[:40]), f"expected a table with the columns {', '.join(TIMINGS)}; found none")
        page = _Page(
            Path(file).name,
            environments=_environments(table for table in tables if _is_hardware(table)),
            sizes={m[1]: (whole(m[2]), whole(m[3]), whole(m[4])) for m in map(CATEGORY.fullmatch, texts(prose)) if m},
            aliases=dict(ALIAS.findall(" ".join(texts(prose)))),
        )
        _check_titles(prose, timings)
        records = [record for table in timings for record in _records(page, table)]
        _check_complete(timings, list(page.environments))
    except Unparsable as error:
        raise PmlkitError(f"{file}:{error}") from None
    return records


def _is_hardware(table: Table) -> bool:
    """Whether the header has more of the hardware columns than of the timing columns."""
    header = set(texts(table.rows[0]))
    return len(header & HARDWARE.keys()) > len(header & TIMINGS.keys())


def _environments(tables: Iterable[Table]) -> dict[str, dict[str, str]]:
    """Return the hardware table as fields by GPU."""
    found: dict[str, dict[str, str]] = {}
    for cells in (cells for table in tables for cells in rows(table, HARDWARE)):
        gpu = cells.pop("gpu")
        if gpu.text in found:
            raise Unparsable(gpu, "expected each GPU once in the hardware table; it stands twice")
        found[gpu.text] = {field: cell.text for field, cell in cells.items()}
    return found


def _check_titles(prose: list[Cell], timings: list[Table]) -> None:
    """Refuse a title that has lost its table, and a configuration that has two."""
    titles = [table.title for table in timings]
    for cell in prose:
        if cell.text.count(" · ") == 3 and cell not in titles:
            raise Unparsable(cell, "expected a table below this title")
    for index, cell in enumerate(titles):
        if cell.text in texts(titles[:index]):
            raise Unparsable(cell, "expected one table a configuration; this title stands twice")


def _check_complete(timings: list[Table], gpus: list[str]) -> None:
    """Refuse a table without a row for each GPU and version of the page: a truncated copy must not pass."""
    pairs = [{(cells["gpu"].text, cells["version"].text) for cells in rows(table, TIMINGS)} for table in timings]
    versions = {version for table in pairs for _, version in table}
    for table, present in zip(timings, pairs, strict=True):
        if missing := sorted(set(product(gpus, versions)) - present):
            raise Unparsable(table.title, f"expected a row for {' and version '.join(missing[0])} below; there is none")


def _records(page: _Page, table: Table) -> Iterator[PublishedRecord]:
    op, category, precision, shape = _configuration(page, table.title)
    work = loss_work(op, shape, precision)
    seen: set[tuple[str, str]] = set()
    for cells in rows(table, TIMINGS):
        environment = _known(cells["gpu"], page.environments, "GPU of the hardware table")
        gpu, version = cells["gpu"].text, _identifier(page, cells["version"])
        if (gpu, version) in seen:
            raise Unparsable(cells["version"], f"expected each version once for {gpu} in a table; it stands twice")
        seen.add((gpu, version))
        parts = (gpu.lower().replace(" ", "-"), op, category, precision, f"n{shape['N']}", version)
        yield PublishedRecord(
            source=SOURCE, file=page.file, row="/".join(parts), url=None, retrieved=None, gpu=gpu, op=op,
            subject="pytorch-metric-learning", version=version, display_name=cells["version"].text, mode=None,
            precision=precision, pipeline=None, ep=None, imbalance=None, category=category, shape=shape,
            environment=environment, status=_known(cells["status"], STATUSES, "status"),
            printed={field: cells[field].text for field in FIGURES.values()},
            loss=_values(cells), moe=None, work=work,
        )  # fmt: skip


def _configuration(page: _Page, title: Cell) -> tuple[str, str, str, dict[str, int]]:
    """Return op, category, precision and shape of a title 'LOSS · CATEGORY · DTYPE · batch N'."""
    parts = [Cell(title.line, part) for part in title.text.split(" · ")]
    if len(parts) != 4 or not (batch := re.fullmatch(r"batch ([1-9][\d,]*)", parts[3].text)):
        raise Unparsable(title, "expected the title of a timing table, 'LOSS · CATEGORY · DTYPE · batch N'")
    op = _known(parts[0], LOSSES, "loss title")
    width, per_class, classes = _known(parts[1], page.sizes, "category with a line 'NAME: N dimensions, ...'")
    precision = _known(parts[2], DTYPES, "dtype")
    last = {"C": classes} if op in PROXY_LOSSES else {"per_class": per_class}
    return op, parts[1].text, precision, {"N": whole(batch[1]), "D": width, **last}


def _known(cell: Cell, known: dict[str, T], what: str) -> T:
    """Return what a cell stands for. Raises Unparsable with the nearest known text."""
    if cell.text not in known:
        raise Unparsable(cell, f"expected a known {what}; {nearest(cell.text, list(known))}")
    return known[cell.text]


def _identifier(page: _Page, name: Cell) -> str:
    """Return the technical identifier of a version: the name itself for a release, else what the text says."""
    if not RELEASE.fullmatch(name.text) and name.text not in page.aliases:
        raise Unparsable(name, "expected a release number, or 'The NAME rows ... original ID identifier' in the text")
    return page.aliases.get(name.text, name.text)


def _values(cells: dict[str, Cell]) -> LossValues:
    """Return the figures of a row: all of them where the status is ok, none elsewhere."""
    status = cells["status"].text
    wanted = "a number" if status == "ok" else ABSENT
    for field in FIGURES.values():
        if (cells[field].text == ABSENT) == (status == "ok"):
            raise Unparsable(cells[field], f"expected {wanted} beside status {status}")
    if status != "ok":
        return LossValues(**dict.fromkeys(LossValues.__struct_fields__))
    total, forward, backward, peak = (number(cells[field]) for field in ("total", "forward", "backward", "peak"))
    ends = [Cell(cells["range"].line, end) for end in cells["range"].text.split(EN_DASH)]
    if len(ends) != 2:
        raise Unparsable(cells["range"], f"expected a range LOW{EN_DASH}HIGH with an en dash")
    low, high = map(number, ends)
    slack = total.half_width + low.half_width + high.half_width
    if not low.value <= high.value or not low.value - slack <= total.value <= high.value + slack:
        raise Unparsable(cells["range"], f"expected low and high around the total {cells['total'].text}")
    return LossValues(total_ms=total, forward_ms=forward, backward_ms=backward, low_ms=low, high_ms=high, peak_mib=peak)
