"""Where things are. Every path of the project is spelled here and nowhere else."""

import json
import os
import re
from pathlib import Path

from pmlkit.errors import PmlkitError, nearest


def root() -> Path:
    """Return the project folder (the one that holds `notebooks` and `data`), or `$PMLKIT_HOME`."""
    return Path(os.environ.get("PMLKIT_HOME") or Path(__file__).resolve().parent.parent)


def data() -> Path:
    """Return the data folder: `published`, `h200` and `sample` are committed, `runs` and `reports` are not."""
    return root() / "data"


def runs() -> Path:
    """Return the folder that live campaigns write to."""
    return data() / "runs"


def reports() -> Path:
    """Return the folder that exported HTML goes to."""
    return data() / "reports"


def notebooks() -> Path:
    """Return the folder of the notebooks."""
    return root() / "notebooks"


def run_folders() -> dict[str, Path]:
    """Return every run on this machine by name: live ones by id, committed ones as `h200/<id>`, and `sample`."""
    found = {p.name: p for p in sorted(runs().glob("*")) if (p / "run.json").is_file()}
    found |= {f"h200/{p.name}": p for p in sorted((data() / "h200").glob("*")) if (p / "run.json").is_file()}
    if (data() / "sample" / "run.json").is_file():
        found["sample"] = data() / "sample"
    return found


def find_run(name: str) -> Path:
    """Return the folder of a run.

    `name` is a run id, `h200/<id>`, `sample`, a path, `latest`: the newest live run, else the sample run; or
    `h200/<campaign>`: the newest committed run of that campaign.
    Raises PmlkitError for an unknown run.
    """
    found = run_folders()
    if name == "latest":
        live = [n for n in found if n != "sample" and not n.startswith("h200/")]
        if not live and "sample" not in found:
            raise PmlkitError(f"no run in {relative(runs())}: start one with `python -m pmlkit run losses-cpu`")
        return max((found[n] for n in live), key=started) if live else found["sample"]
    if name in found:
        return found[name]
    campaign = name.removeprefix("h200/")  # a run id is time, campaign, six digits of the host
    committed = [n for n in found if re.fullmatch(rf"h200/[^-]+-{re.escape(campaign)}-[^-]+", n)]
    if name.startswith("h200/") and committed:
        return max((found[n] for n in committed), key=started)
    if (Path(name) / "run.json").is_file():
        return Path(name)
    raise PmlkitError(f"unknown run {name!r} in {relative(data())}: {nearest(name, [*found, 'latest'])}")


def started(folder: Path) -> str:
    """Return when a run began, as its head says; an unreadable head counts as the oldest."""
    try:
        return str(json.loads((folder / "run.json").read_text())["started_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def relative(path: Path) -> str:
    """Return a path relative to the project folder where it lies inside it, for messages and records."""
    try:
        return path.resolve().relative_to(root().resolve()).as_posix()
    except ValueError:
        return path.as_posix()
