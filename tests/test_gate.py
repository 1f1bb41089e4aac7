"""The gate for continuous integration, and the doctor."""

import json

import pytest

from pmlkit.__main__ import main
from pmlkit.bench.doctor import examine
from pmlkit.errors import PmlkitError
from pmlkit.report.gate import gate, read_margin


def run(*words: str) -> int:
    return main(["compare", "pml", "reference", "--run", "sample", *words])


def test_exit_status_follows_fail_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The sample's reference is faster: nothing fails on `slower`, something on `faster`, `wrong` and `broken`."""
    assert run() == 0
    assert run("--fail-on", "slower") == 0
    assert run("--fail-on", "slower,faster") == 1
    assert run("--fail-on", "wrong") == 1
    assert run("--fail-on", "broken") == 1
    assert "FAILS on 10" in capsys.readouterr().out.splitlines()[-18]


def test_wrong_is_one_and_broken_are_ten() -> None:
    """Of the ten failures of the sample one is a wrong answer; all ten ran in the base."""
    assert len(gate("sample", "pml", "reference", None, ["wrong"]).failing) == 1
    assert len(gate("sample", "pml", "reference", None, ["broken"]).failing) == 10
    assert len(gate("sample", "reference", "pml", None, ["broken"]).failing) == 0


def test_json_is_complete_and_strict(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has every case with numbers or null, and says which rows fail."""
    assert run("--format", "json", "--fail-on", "broken") == 1
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (document["base"], document["candidate"], document["failing"]) == ("pml", "reference", 10)
    assert len(document["rows"]) == 16
    measured = [row for row in document["rows"] if row["ratio"] is not None]
    assert len(measured) == 6
    assert all(row["low"] < row["ratio"] < row["high"] for row in measured)
    assert sum(row["fails"] for row in document["rows"]) == 10


def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Markdown opens with the verdict and has one line a case."""
    run("--format", "markdown")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("**reference against pml in ")
    assert len([line for line in lines if line.startswith("| ")]) == 2 + 16


def test_margin() -> None:
    """Within a wide margin the same code shows no difference anywhere; percent and fraction mean the same."""
    assert read_margin("2%") == read_margin("0.02") == 0.02
    assert read_margin(None) is None
    undecided = [len(gate("sample", "pml", "pml-again", margin, ["inconclusive"]).failing) for margin in (None, 0.9)]
    assert undecided[0] > undecided[1] == 0


@pytest.mark.parametrize("text", ["two", "-1%", "0", "100%", "1"])
def test_a_bad_margin_is_refused(text: str) -> None:
    """A margin outside 0 to 100 % is one clear error."""
    with pytest.raises(PmlkitError, match="is not a margin"):
        read_margin(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fail-on", "slow"], "did you mean 'slower'"),
        (["--run", "sampel"], "did you mean 'sample'"),
        (["--margin", "x"], "is not a margin"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt verdict, run or margin ends with status 2."""
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_the_doctor_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """Every registered subject is examined; what cannot be done has its reason."""
    findings = {finding.thing: finding for finding in examine()}
    assert {"Python", "torch", "CUDA", "pml-2.9.0", "reference", "disk", "kernel"} <= set(findings)
    assert findings["pml-2.9.0"].able
    assert all(finding.detail for finding in findings.values())
    assert main(["doctor"]) == 0
    assert "pml-2.9.0" in capsys.readouterr().out
