"""The command line."""

import pytest

from pmlkit import registry
from pmlkit.__main__ import main
from pmlkit.campaign import CAMPAIGNS


def test_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Every campaign, subject, op and source is listed."""
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in [*CAMPAIGNS, *registry.SUBJECTS, *registry.OPS, *registry.SOURCES]:
        assert name in text


def test_plan_states_the_published_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """EP8 mxfp8 mega inference: capacity rows 104,320, arena 2,485,255,680 bytes."""
    assert main(["plan", "--ep", "8", "--precision", "mxfp8", "--pipeline", "mega", "--mode", "inference"]) == 0
    text = capsys.readouterr().out
    assert "104,320" in text
    assert "2,485,255,680" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "loses-cpu"], "did you mean 'losses-cpu'"),
        (["run", "losses-cpu", "--budget", "soon"], "not a duration"),
        (["report"], "name one notebook, or give --all"),
        (["report", "99_nothing"], "unknown notebook '99_nothing'"),
        (["report", "--all", "-p", "run=sample"], "-p belongs to one notebook"),
        (["plan", "--ep", "7"], "7"),
        (["plan", "--precision", "nvfp4", "--pipeline", "mega", "--mode", "training"], "nvfp4"),
        (["verify", "README.md"], "not a report"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the value and the remedy; nothing is printed as a traceback."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("pmlkit: ")
    assert message in error
    assert len(error.splitlines()) == 1
