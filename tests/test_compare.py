"""Verdicts on hand-made cells and on the published page."""

import pandas as pd
import pytest

from pmlkit.errors import PmlkitError
from pmlkit.report.compare import compare, compare_all, count_sentence, counts, floor_of, overall
from pmlkit.report.frames import cells_published
from pmlkit.report.load import load_source

TIGHT = (0.999, 1.0, 1.001)


def cell(
    op: str, label: str, scale: float = 1.0, spread: tuple[float, ...] = TIGHT, status: str = "ok", gpu: str = "g"
) -> dict:
    values = [scale * s for s in spread] if status == "ok" else []
    return {
        "gpu": gpu,
        "case": op,
        "op": op,
        "precision": "fp32",
        "N": 1,
        "label": label,
        "status": status,
        "values": values,
        "rounding": 0.0,
    }


def made() -> pd.DataFrame:
    """Return one case per verdict: base a, candidate b."""
    cells = [cell(op, "a") for op in ("faster", "slower", "same", "noisy", "within")]
    cells += [cell("faster", "b", 0.8), cell("slower", "b", 1.3), cell("same", "b"), cell("noisy", "b", 0.9, (0.5, 1.0, 1.8))]
    cells += [cell("within", "b", 1.015), cell("fits", "a", status="oom"), cell("fits", "b"), cell("breaks", "a")]
    cells += [cell("breaks", "b", status="crashed"), cell("single", "a", spread=(1.0,)), cell("single", "b"), cell("only", "a")]
    return pd.DataFrame(cells)


def test_every_verdict() -> None:
    """Clear differences are decided, equivalence is shown, noise stays open, and a failed side is a status change."""
    table = compare(made(), "a", "b").set_index("op")
    assert table["verdict"].to_dict() == {
        "faster": "faster", "slower": "slower", "same": "no difference", "noisy": "inconclusive", "within": "no difference",
        "fits": "not comparable", "breaks": "not comparable", "single": "not comparable",
    }  # fmt: skip
    changes = table["change"].to_dict()
    assert (changes["fits"], changes["breaks"], changes["single"]) == ("oom → ok", "ok → crashed", "one process only")
    assert table.loc["faster", "ratio"] == pytest.approx(0.8)


def test_margin_is_respected() -> None:
    """A sure difference of 1.5 % is no difference at 2 % margin, and faster or slower at 1 %."""
    at = {m: compare(made(), "a", "b", m).set_index("op")["verdict"]["within"] for m in (0.02, 0.01)}
    assert at == {0.02: "no difference", 0.01: "slower"}


def test_false_discovery_runs_per_gpu() -> None:
    """p = 0.02 is decided alone in its table, not beside twenty comparisons without any difference."""
    lone = [cell("x", "a", spread=(0.97, 1.0, 1.03)), cell("x", "b", 0.85, (0.97, 1.0, 1.03))]
    crowd = [cell(f"n{i}", label, spread=(0.9, 1.0, 1.1)) for i in range(20) for label in "ab"]
    assert compare(pd.DataFrame(lone), "a", "b")["verdict"].tolist() == ["faster"]
    same_gpu = compare(pd.DataFrame(lone + crowd), "a", "b").set_index("op")
    other_gpu = compare(pd.DataFrame(lone + [c | {"gpu": "h"} for c in crowd]), "a", "b").set_index("op")
    assert same_gpu.loc["x", "verdict"] == "inconclusive"
    assert other_gpu.loc["x", "verdict"] == "faster"


def test_two_releases_never_collapse() -> None:
    """Two versions of one case are two cells; two rows with one key are refused."""
    frame = load_source("pml-3.0.1", "losses").frame
    cells = cells_published(frame)
    assert len(cells) == 120
    with pytest.raises(AssertionError, match="cells repeat"):
        cells_published(pd.concat([frame, frame.head(1)], ignore_index=True))


def test_published_verdicts() -> None:
    """2.9.0 to 3.0.1 before rounding: RTX 5090 8 / 5 / 5, A100 3 / 0 / 15, of 18 comparable each; 2 newly fit."""
    table = compare(cells_published(load_source("pml-3.0.1", "losses").frame), "2.9.0", "3.0.1 code", rounding=False)
    found = {gpu: counts(part) for gpu, part in table.groupby("gpu")}
    assert found == {
        "RTX 5090": {"faster": 8, "slower": 5, "inconclusive": 5, "not comparable": 2},
        "A100-SXM4-80GB": {"faster": 3, "inconclusive": 15, "not comparable": 2},
    }
    assert set(table.loc[table["verdict"] == "not comparable", "change"]) == {"oom → ok"}


def test_published_identical_triples_are_no_warning() -> None:
    """Nine rows print low = high; with rounding every interval has a positive width."""
    frame = load_source("pml-3.0.1", "losses").frame
    assert int((frame["low_ms"] == frame["high_ms"]).sum()) == 9
    table = compare_all(cells_published(frame), ["2.9.0", "3.0.0", "3.0.1 code"])
    measured = table.dropna(subset=["ratio"])
    assert len(table) == 120
    assert (measured["high"] > measured["low"]).all()


def test_aggregates_use_common_cases_only() -> None:
    """The geometric mean covers the cases that ran on both sides, and says how many."""
    mean = overall(compare(made(), "a", "b"))
    assert mean is not None
    assert mean[1] == 5
    assert overall(compare(made().query("op == 'fits'"), "a", "b")) is None


def test_sentence() -> None:
    """Counts as words name what cannot be compared."""
    text = count_sentence(compare(made(), "a", "b"))
    assert text == (
        "1 faster, 1 slower, 2 no difference, 1 inconclusive of 5; "
        "not comparable: 1 ok → crashed, 1 one process only, 1 oom → ok"
    )


def test_floor_of_a_run() -> None:
    """The A/A floor pairs two arms case by case."""
    cells = pd.DataFrame([cell("x", "a"), cell("x", "again", 1.03), cell("y", "a", status="oom"), cell("y", "again")])
    assert floor_of(cells, [("a", "again")]) == pytest.approx(0.03, rel=1e-3)


def test_unknown_version_names_the_nearest() -> None:
    """A version that the table does not have is one clear error."""
    with pytest.raises(PmlkitError, match=r"3\.0\.1 code"):
        compare(cells_published(load_source("pml-3.0.1", "losses").frame), "2.9.0", "3.0.1")
