"""Charts as SVG, drawn by matplotlib (extra `plots`).

Inside a page, colours are variables of the page, so that charts follow its light or dark theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from edge.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REMEDY = "pip install 'mamba-edge[plots]'"
SERIES = ("#2563c9", "#d1730a")
_SOFT, _LINE = "#5c6470", "#d9dde3"
_VARIABLES = {SERIES[0]: "--s0", SERIES[1]: "--s1", _SOFT: "--soft", _LINE: "--line"}
_PAGE_WIDTH, _FILE_WIDTH, _HEIGHT, _BAR_HEIGHT = 6.4, 8.6, 3.0, 0.22  # inches
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "edge", "text.parse_math": False,
    "font.family": "sans-serif", "font.size": 9, "text.color": _SOFT, "axes.labelcolor": _SOFT,
    "xtick.color": _SOFT, "ytick.color": _SOFT, "axes.edgecolor": _LINE, "grid.color": _LINE,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip

Format = Callable[[float], str]


def available() -> bool:
    """Return whether matplotlib can be imported."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # sys.modules holds a stand-in without a spec
        return False


@dataclass(frozen=True)
class Curve:
    """A named series of points. `high` draws a band above them, `labels` names each point."""

    name: str
    points: Sequence[tuple[float, float]]
    high: Sequence[float] = ()
    labels: Sequence[str] = ()


class Picture:
    """One set of axes, and its SVG once drawing is done."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.svg = ""


@contextmanager
def picture(height: float = _HEIGHT, *, inline: bool = True) -> Iterator[Picture]:
    """Provide a picture: draw on its `axes` within the block, then read its `svg`.

    `inline`: for embedding in a page, not for a file of its own. The same figures give the same
    bytes. Raises InputError without matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("charts need the package matplotlib", remedy=REMEDY) from None
    with rc_context(_STYLE):
        figure = Figure(
            figsize=(_PAGE_WIDTH if inline else _FILE_WIDTH, height), layout="constrained"
        )
        chart = Picture(figure.subplots())
        yield chart
        out = io.StringIO()
        no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=inline, metadata=no_metadata)
    chart.svg = _inlined(out.getvalue()) if inline else out.getvalue()


def _inlined(svg: str) -> str:
    """Reduce a file to its `<svg>` element.

    Removes addresses, page-wide styles, the namespace of references, and identifiers that nothing
    refers to. The others are hashes of their content.
    """
    body = svg[svg.index("<svg") :]
    size = re.search(r'viewBox="[^"]*"', body)
    assert size is not None
    body = f"<svg {size[0]}>" + body[body.index(">") + 1 :]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r' id="[\w.]+_\d+"', "", body).replace("xlink:href", "href")
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return body.strip()


# -- kinds of pictures ----------------------------------------------------------------------------


def lines(curves: Sequence[Curve], labels: tuple[str, str], format_x: Format) -> str:
    """Draw points and lines over powers of two, from zero up, with a band up to `high`."""
    with picture() as chart:
        axes = chart.axes
        axes.set_xscale("log", base=2)
        for colour, curve in zip(_colours(), curves, strict=False):
            x, y = zip(*curve.points, strict=True)
            axes.plot(x, y, marker="o", color=colour, label=curve.name)
            axes.fill_between(x, y, curve.high, color=colour, alpha=0.18, linewidth=0)
        ticks = sorted({point[0] for curve in curves for point in curve.points})
        axes.set_xticks(ticks, [format_x(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        _finish(axes, labels, len(curves) > 1)
    return chart.svg


def histogram(rows: Sequence[tuple[str, Sequence[float]]], bins: int, label: str) -> str:
    """Draw a histogram. The last of `bins` bars holds all values above the 99.5th percentile."""
    with picture() as chart:
        fill(chart.axes, rows, bins)
        _finish(chart.axes, (label, "tokens"), len(rows) > 1)
    return chart.svg


def fill(axes: Axes, rows: Sequence[tuple[str, Sequence[float]]], bins: int) -> None:
    """Draw the bars of a histogram."""
    pooled = np.concatenate([np.asarray(values) for _, values in rows])
    low, top = float(pooled.min()), float(np.quantile(pooled, 0.995, method="lower"))
    edges = np.linspace(low, top if top > low else low * 1.1 + 1e-9, bins + 1).tolist()
    for colour, (name, values) in zip(_colours(), rows, strict=False):
        clipped = np.clip(values, edges[0], edges[-1])
        axes.hist(clipped, bins=edges, color=colour, alpha=0.75, label=name)


def bars(rows: Sequence[tuple[str, float]], format_value: Format, series: int = 0) -> str:
    """Draw one bar per row, in the given order, with its value beside it."""
    with picture(_BAR_HEIGHT * len(rows) + 0.1) as chart:
        _bars(chart.axes, rows, [SERIES[series % len(SERIES)]] * len(rows), format_value)
        chart.axes.margins(x=0.25)
        chart.axes.axis("off")
        for index, (name, _) in enumerate(rows):
            chart.axes.text(0, index, f"{name} ", ha="right", va="center")
    return chart.svg


def roofline(
    curves: Sequence[Curve], roof: Sequence[tuple[float, float]], labels: tuple[str, str]
) -> str:
    """Draw named points under a bound, with both axes logarithmic."""
    with picture() as chart:
        axes = chart.axes
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.plot(*zip(*roof, strict=True), color=_SOFT)
        _scatter(axes, curves)
        _plain_numbers(axes, both=True)
        _finish(axes, labels, len(curves) > 1)
    return chart.svg


def by_prompt(speedups: Sequence[float], labels: tuple[str, str]) -> str:
    """Draw sorted values as points, and a line at 1."""
    with picture() as chart:
        chart.axes.axhline(1.0, color=_SOFT)
        _scatter(chart.axes, [Curve("", list(enumerate(sorted(speedups), 1)))])
        chart.axes.set_ylim(bottom=0)
        chart.axes.locator_params(axis="x", integer=True)
        _finish(chart.axes, labels, False)
    return chart.svg


def log_bars(
    title: str,
    rows: Sequence[tuple[str, float, str]],
    colours: dict[str, str],
    label: str,
) -> str:
    """Draw a file of (name, value, kind) rows as bars on a logarithmic axis, coloured by kind."""
    with picture(_BAR_HEIGHT * len(rows) + 1.0, inline=False) as chart:
        from matplotlib.patches import Patch

        axes = chart.axes
        axes.set_xscale("log")
        bar_colours = [colours[kind] for _, _, kind in rows]
        _bars(axes, [row[:2] for row in rows], bar_colours, "{:.1e}".format)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.margins(x=0.15)
        axes.set_title(title, loc="left", pad=24)
        _plain_numbers(axes)
        _finish(axes, (label, ""), False)
        handles = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
        axes.legend(handles=handles, ncols=len(handles), loc="lower left", bbox_to_anchor=(0, 1))
    return chart.svg


def _colours() -> Iterator[str]:
    while True:
        yield from SERIES


def _bars(
    axes: Axes, rows: Sequence[tuple[str, float]], colours: Sequence[str], format_value: Format
) -> None:
    values = [value for _, value in rows]
    container = axes.barh(range(len(rows)), values, height=0.7, color=colours)
    axes.bar_label(container, [format_value(value) for value in values], padding=4)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _scatter(axes: Axes, curves: Sequence[Curve]) -> None:
    for number, (colour, curve) in enumerate(zip(_colours(), curves, strict=False)):
        if curve.points:
            axes.plot(*zip(*curve.points, strict=True), "o", color=colour, label=curve.name)
        if not number:  # the same points of other curves are nearby
            for name, point in zip(curve.labels, curve.points, strict=False):
                axes.annotate(name, point, xytext=(-6, 4), textcoords="offset points", ha="right")


def _plain_numbers(axes: Axes, both: bool = False) -> None:
    """Format powers of ten without superscripts, which need a font that a page does not have."""
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis) if both else (axes.xaxis,):
        axis.set_major_formatter(lambda value, _: f"{value:g}")


def _finish(axes: Axes, labels: tuple[str, str], legend: bool) -> None:
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.grid(True)
    axes.set_axisbelow(True)
    if legend:
        axes.legend()
