"""A campaign as the user wants it: another protocol, and other releases of a measured library, wherever they are."""

import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import msgspec

from pmlkit.campaign import Campaign, campaign
from pmlkit.errors import PmlkitError
from pmlkit.protocol import protocol
from pmlkit.registry import Subject, subject

_ASK = "import sys; from importlib import metadata; print(metadata.version(sys.argv[1]))"


def prepare(name: str, protocol_name: str = "", places: Iterable[str] = ()) -> Campaign:
    """Return a campaign by name, with another protocol and further releases of pytorch-metric-learning if any are given.

    Raises PmlkitError for an unknown name, for a protocol of another device, and as `with_releases` does.
    """
    plan = campaign(name)
    if protocol_name:
        other = protocol(protocol_name)
        if other.device != plan.protocol.device:
            raise PmlkitError(
                f"protocol {other.name} measures on {other.device}, campaign {name} on {plan.protocol.device}: choose"
                f" one for {plan.protocol.device} from `python -m pmlkit list`"
            )
        plan = msgspec.structs.replace(plan, protocol=other)
    return with_releases(plan, places)


def with_releases(plan: Campaign, places: Iterable[str], like: str = "pml-2.9.0") -> Campaign:
    """Return the campaign with one more arm, `pml-3.0.1`, for the release of `like`'s package at each of `places`.

    Raises PmlkitError if a place holds no such package, or a release that is an arm already.
    """
    arms = dict(plan.arms)
    for place in places:
        release = release_at(subject(like), place)
        if any((arm.name, arm.version) == (release.name, release.version) for arm in arms.values()):
            raise PmlkitError(f"{place} holds {release.name} {release.version}, an arm of {plan.name} already: name another")
        arms[release.key] = release
    return msgspec.structs.replace(plan, arms=arms)


def release_at(known: Subject, place: str) -> Subject:
    """Return the subject `known` as the release that is found at `place`: its version is read there, never assumed.

    place: a folder or wheel that holds the package with its metadata, as `pip install --target` leaves it, or a Python
    interpreter that has the package and pmlkit's needs installed. Raises PmlkitError if there is none.
    """
    assert known.package is not None, f"{known.key} belongs to no package"
    path = Path(place).expanduser().absolute()
    interpreter = path.is_file() and path.suffix != ".whl"
    if interpreter:
        asked = subprocess.run([str(path), "-c", _ASK, known.package], capture_output=True, text=True, check=False)
        version = asked.stdout.strip()
    else:
        version = next((found.version for found in metadata.distributions(name=known.package, path=[str(path)])), "")
    if not version:
        raise PmlkitError(
            f"no {known.package} in {place}: give a wheel, a Python that has it, or the folder of"
            f" `pip install --no-deps --target FOLDER {known.package}==VERSION`"
        )
    where = {"interpreter": str(path)} if interpreter else {"path": str(path)}
    return msgspec.structs.replace(known, key=f"{known.key.partition('-')[0]}-{version}", version=version, **where)
