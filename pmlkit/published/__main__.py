"""Command `python -m pmlkit.published SOURCE FILE`: import a source into `data/published/SOURCE.jsonl` and `.csv`."""

import csv
import io
import json
import sys
from collections import Counter
from pathlib import Path

import msgspec

from pmlkit.errors import PmlkitError, nearest
from pmlkit.paths import data, relative
from pmlkit.registry import SOURCES, resolve
from pmlkit.release import PublishedRecord

IDENTIFIERS = (
    "source", "file", "row", "gpu", "op", "subject", "version", "display_name", "mode", "precision", "pipeline", "ep",
    "imbalance", "category", "status",
)  # fmt: skip


def import_file(source: str, path: Path) -> list[PublishedRecord]:
    """Return the records of a file. Raises PmlkitError for an unknown source or a file that cannot be used."""
    if source not in SOURCES:
        raise PmlkitError(f"unknown source {source!r}: {nearest(source, list(SOURCES))}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PmlkitError(f"{path}: {error}: pass the file as published, in UTF-8") from None
    return resolve(SOURCES[source].importer)(text, str(path))


def write_source(records: list[PublishedRecord], folder: Path) -> list[Path]:
    """Write the records of one source as `<source>.jsonl` and `<source>.csv`, the same bytes for the same records.

    Raises PmlkitError for records of no source or of several, and for a row that stands twice.
    """
    sources = {record.source for record in records}
    if len(sources) != 1:
        raise PmlkitError(f"records of the sources {sorted(sources)} in write_source: pass those of one source")
    row, count = Counter(record.row for record in records).most_common(1)[0]
    if count > 1:
        raise PmlkitError(f"row {row!r} stands {count} times in write_source: a row needs an id of its own")
    lines = [json.dumps(msgspec.to_builtins(record), allow_nan=False, ensure_ascii=False) for record in records]
    files = {folder / f"{records[0].source}.jsonl": "\n".join(lines) + "\n"}
    files[folder / f"{records[0].source}.csv"] = _csv(records)
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        path.write_text(text, encoding="utf-8", newline="\n")
    return list(files)


def _csv(records: list[PublishedRecord]) -> str:
    """Return the table: identifiers and status, sizes, then the strings as printed."""
    fullest = sorted(records, key=lambda record: -len(record.printed))  # its keys are in the order of the source
    sizes = list(dict.fromkeys(name for record in records for name in record.shape))
    printed = list(dict.fromkeys(name for record in fullest for name in record.printed))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*IDENTIFIERS, *(f"shape_{name}" for name in sizes), *(f"printed_{name}" for name in printed)])
    for record in records:
        identity = [getattr(record, name) for name in IDENTIFIERS]  # None is written as an empty cell
        shape, figures = map(record.shape.get, sizes), map(record.printed.get, printed)
        table.writerow([*identity, *shape, *figures])
    return text.getvalue()


def main(arguments: list[str]) -> int:
    """Import a source into the data folder and print the counts by status. Return 2 on bad input, else 0."""
    if len(arguments) != 2:
        print(f"usage: python -m pmlkit.published {{{','.join(SOURCES)}}} FILE", file=sys.stderr)
        return 2
    try:
        records = import_file(arguments[0], Path(arguments[1]))
        files = write_source(records, data() / "published")
    except PmlkitError as error:
        print(error, file=sys.stderr)
        return 2
    counts = Counter(record.status for record in records)
    print(f"{len(records)} records:", ", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    print("wrote", ", ".join(map(relative, files)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
