"""The one kind of figure a report shows: deterministic SVG with alternative text, drawn without global state."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pmlkit.report.page import count_shown

# Okabe and Ito's palette: told apart by readers with colour vision deficiencies. Order = order of first use on a page.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
VERDICT_COLOURS = {
    "faster": "#009e73",
    "slower": "#d55e00",
    "no difference": "#0072b2",
    "inconclusive": "#7f7f7f",
    "not comparable": "#b0b0b0",
}
_PRECISION_COLOURS = {"bf16": "#0072b2", "mxfp8": "#d55e00", "nvfp4": "#009e73", "fp32": "#cc79a7"}
_PIPELINE_MARKERS = {"standard": "o", "staged": "s", "mega": "^"}


def precision_colour(key: str) -> str:
    """Return the colour of a precision, the same in every figure; a new one is black until it has its own."""
    return _PRECISION_COLOURS.get(key, "#000000")


def pipeline_marker(key: str) -> str:
    """Return the marker of a pipeline, the same in every figure; a new one is a diamond until it has its own."""
    return _PIPELINE_MARKERS.get(key, "D")


_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "pmlkit",  # element ids derive from this and the content, so equal input gives equal bytes
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "figure.facecolor": "white",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "legend.frameon": False,
}


@contextmanager
def style() -> Iterator[None]:
    """Apply the report's figure style for the time of drawing or saving."""
    with mpl.rc_context(_STYLE):
        yield


class ReportFigure(Figure):
    """A figure with alternative text that states its numbers. Draw inside `with style():`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, layout="constrained", **kwargs)
        FigureCanvasSVG(self)
        self.alt = ""

    def svg(self) -> str:
        """Return the SVG text without a date, so that equal figures are equal bytes."""
        buffer = io.StringIO()
        with style():
            self.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        assert self.alt, "a figure without alternative text"
        count_shown("figure")
        return {"image/svg+xml": self.svg(), "text/plain": self.alt}, {"image/svg+xml": {"alt": self.alt}}


def nothing(sentence: str) -> ReportFigure:
    """Return a figure that only says why there is nothing to see."""
    with style():
        figure = ReportFigure(figsize=(9, 0.8))
        figure.text(0.5, 0.5, sentence, ha="center", va="center")
    figure.alt = sentence
    return figure


def data_uri(svg: str) -> str:
    """Return an SVG as a data URI: on the page as an image, its ids cannot collide with those of another figure."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
