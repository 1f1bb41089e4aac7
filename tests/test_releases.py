"""Other releases by place: a folder, a wheel, another Python; the version is read there, and measured from there."""

import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from pmlkit import paths
from pmlkit.bench import runner
from pmlkit.campaign import Campaign, campaign, loss_case
from pmlkit.errors import PmlkitError
from pmlkit.protocol import Protocol
from pmlkit.registry import subject
from pmlkit.releases import prepare, release_at, with_releases
from pmlkit.run import read_run

PML = subject("pml-2.9.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a copy of the installed library that calls itself 3.0.1 and says so when it is used."""
    place = tmp_path / "release"
    files = metadata.distribution("pytorch-metric-learning").files or []
    for file in files:
        if file.suffix == ".py" or file.name == "METADATA":
            target = place / str(file).replace("2.9.0", "3.0.1")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), target)
    (head,) = place.glob("*.dist-info/METADATA")
    head.write_text(head.read_text().replace("Version: 2.9.0", "Version: 3.0.1"))
    losses = place / "pytorch_metric_learning" / "losses" / "__init__.py"
    losses.write_text('print("the other release is in use")\n' + losses.read_text())
    return place


def wheel(folder: Path) -> Path:
    path = folder.parent / "pytorch_metric_learning-3.0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.rglob("*"):
            archive.write(file, file.relative_to(folder))
    return path


@pytest.mark.parametrize("form", [lambda folder: folder, wheel], ids=["folder", "wheel"])
def test_a_release_is_measured_from_where_it_is(folder: Path, form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the installed 2.9.0 the copy runs as an arm of its own, under its own version, with its own code."""
    monkeypatch.setattr(paths, "runs", lambda: tmp_path / "runs")
    plan = Campaign(
        name="test",
        question="?",
        cases=(loss_case("contrastive", 32, "fp32"),),
        arms={"pml": PML},
        baseline="pml",
        protocol=Protocol(name="t", processes=1, most=1, blocks=1, block_s=0.001, warmup=1, warmup_s=0.0, timeout_s=60),
    )
    plan = with_releases(plan, [str(form(folder))])
    assert list(plan.arms) == ["pml", "pml-3.0.1"]
    records = {record.arm: record for record in read_run(runner.run_campaign(plan))[1].records}
    assert {arm: (r.status, r.version) for arm, r in records.items()} == {"pml": ("ok", "2.9.0"), "pml-3.0.1": ("ok", "3.0.1")}
    assert "the other release is in use" in records["pml-3.0.1"].log_tail
    assert "the other release" not in records["pml"].log_tail
    assert str(tmp_path) not in msgspec.json.encode(list(records.values())).decode()


def test_a_python_is_asked_for_its_version() -> None:
    """Another interpreter that has the package is a place too."""
    found = release_at(PML, sys.executable)
    assert (found.version, found.interpreter, found.path) == ("2.9.0", str(Path(sys.executable).absolute()), None)


def test_a_place_without_the_package_is_refused(tmp_path: Path) -> None:
    """An empty folder, a missing one and a Python without it say what to give instead."""
    for place in (str(tmp_path), str(tmp_path / "nowhere"), "/bin/true"):
        with pytest.raises(PmlkitError, match=r"no pytorch-metric-learning in .*pip install --no-deps --target"):
            release_at(PML, place)


def test_a_release_that_is_an_arm_already_is_refused() -> None:
    """The installed 2.9.0 is the baseline; naming it once more would be the A/A control under a misleading label."""
    with pytest.raises(PmlkitError, match=r"pytorch-metric-learning 2\.9\.0, an arm of losses-cpu already"):
        with_releases(campaign("losses-cpu"), [sys.executable])


def test_another_protocol() -> None:
    """A campaign can be run by the published page's protocol; one of another device is refused."""
    plan = prepare("losses-page", "pml-page")
    assert plan.protocol.name == "pml-page"
    assert plan.planned == 20 * 5 * 3
    with pytest.raises(PmlkitError, match="pml-page measures on cuda, campaign losses-cpu on cpu"):
        prepare("losses-cpu", "pml-page")
    with pytest.raises(PmlkitError, match="unknown protocol"):
        prepare("losses-cpu", "pml-pag")
