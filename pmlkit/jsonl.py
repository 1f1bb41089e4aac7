"""Strict JSON lines: durable appends, and a reader that names file and line and keeps the good lines."""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from pmlkit.errors import PmlkitError
from pmlkit.paths import relative

T = TypeVar("T")


class Problem(msgspec.Struct, frozen=True):
    """A line that could not be used."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


class Lines(msgspec.Struct, Generic[T]):
    """The usable records of a file in order, and one problem for each line that is not."""

    records: list[T]
    problems: list[Problem]


def parse_strict(text: str) -> Any:
    """Parse one JSON document. Raises ValueError for a duplicate key, NaN, Infinity or broken JSON.

    msgspec alone keeps the last of two equal keys, so the standard parser looks first.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!r}")
            seen[key] = value
        return seen

    def no_constant(token: str) -> float:
        raise ValueError(f"{token} is not JSON; write null and a reason")

    return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)


def check_schema(document: Any, expected: str) -> None:
    """Raise ValueError unless `document['schema']` has the name and the major version of `expected`."""
    found = document.get("schema") if isinstance(document, dict) else None
    if found != expected:
        raise ValueError(f"schema is {found!r}, this pmlkit reads {expected!r}: use the release that wrote the file")


def read_lines(path: Path, kind: type[T], schema: str) -> Lines[T]:
    """Read a JSON-lines file of `kind`. Bad lines become problems; a torn last line (no newline) is one too.

    A file without any fault is decoded whole; only a suspicious one is parsed strictly, line by line, to name the fault.
    """
    raw = path.read_bytes()
    with uncollected():
        records = _decode_whole(raw, kind, schema)
    return Lines(records, []) if records is not None else _read_each(path, raw, kind, schema)


def _decode_whole(raw: bytes, kind: type[T], schema: str) -> list[T] | None:
    """Return the records of a file if nothing about it is odd, else None.

    msgspec refuses unknown fields and NaN but keeps the last of two equal keys. So each record is written again: as
    many keys must come out as went in.
    """
    chunks = raw.split(b"\n")
    if chunks.pop() or not all(chunks):
        return None
    decoder, encode = msgspec.json.Decoder(kind), msgspec.json.encode
    try:
        records = decoder.decode_lines(raw)
    except (msgspec.DecodeError, ValueError):
        return None
    same = all(encode(record).count(b'":') == chunk.count(b'":') for record, chunk in zip(records, chunks, strict=True))
    return records if same and all(getattr(record, "schema", None) == schema for record in records) else None


def _read_each(path: Path, raw: bytes, kind: type[T], schema: str) -> Lines[T]:
    lines: Lines[T] = Lines([], [])
    last = raw.count(b"\n") + 1
    for number, chunk in enumerate(raw.split(b"\n"), start=1):
        if not chunk.strip():
            continue
        try:
            document = parse_strict(chunk.decode())
            check_schema(document, schema)
            lines.records.append(msgspec.convert(document, kind))
        except (ValueError, msgspec.ValidationError) as error:
            message = f"torn last line, skipped ({error})" if number == last else str(error)
            lines.problems.append(Problem(relative(path), number, message))
    return lines


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector off, and later from what was made inside: records form no cycles, but there are many."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def append_line(path: Path, record: Any) -> None:
    """Append one record as one write of a whole line and flush it to the disk.

    A line torn by an earlier crash is closed first, so that it cannot swallow this one. Raises ValueError for NaN, and
    PmlkitError if the disk takes no whole line: then the file is as it was before.
    """
    text = json.dumps(msgspec.to_builtins(record), allow_nan=False, ensure_ascii=False)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        line = (("\n" if torn else "") + text + "\n").encode()
        try:
            whole = os.write(fd, line) == len(line)
            os.fsync(fd)
        except OSError as error:
            os.ftruncate(fd, size)
            raise PmlkitError(f"cannot write {relative(path)}: {error.strerror}; make room, then resume the run") from None
        if not whole:
            os.ftruncate(fd, size)
            raise PmlkitError(f"cannot write {relative(path)}: no space for a whole line; make room, then resume the run")
    finally:
        os.close(fd)
