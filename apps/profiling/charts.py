"""Charts as inline SVG: lines, bars, a histogram, all of plain shapes and text.

Colours are CSS classes `s0`, `s1`, … and `ink`, so that the page decides them, light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44
_ROW = 22  # of a bar

Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One line or one set of points; `low` and `high` draw a band, `names` are of the points."""

    name: str
    points: Sequence[Point]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Axis:
    """From the values of a figure to its place, and the numbers written along it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = (math.log10(v) for v in (low, high, value))
        return (at - low) / (high - low)


def linear_axis(values: Sequence[float], *, zero: bool = True) -> Axis:
    """Round numbers around all values, from zero where that is asked for."""
    low = 0.0 if zero else min(values)
    step = _round_step((max(values) - low) or abs(low) or 1.0)
    first, last = math.floor(low / step), math.ceil(max(values) / step)
    last = max(last, first + 1)
    return Axis(first * step, last * step, tuple(i * step for i in range(first, last + 1)))


def log_axis(values: Sequence[float], base: int = 10) -> Axis:
    """Powers of `base` around all values; they must be positive."""
    first = math.floor(math.log(min(values), base) + 1e-9)
    last = math.ceil(math.log(max(values), base) - 1e-9)
    last = max(last, first + 1)
    ticks = tuple(float(base) ** i for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks, logarithmic=True)


def _round_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that about five steps make `span`."""
    rough = span / 5
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


# -- charts ---------------------------------------------------------------------------------------


def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, labels: tuple[str, str],
    formats: tuple[Format, Format], *, dots_only: Sequence[Series] = (),
) -> str:  # fmt: skip
    """Lines with their points, and lone points with their names, over two axes.

    Beside lone points a line is a bound, not a measurement: it has no points of its own.
    """
    body = [*_grid(x, y, labels, formats)]
    for number, line in enumerate(series):
        places = [_place(x, y, point) for point in line.points]
        if line.low:
            upper = [_place(x, y, (p[0], v)) for p, v in zip(line.points, line.high, strict=True)]
            lower = [_place(x, y, (p[0], v)) for p, v in zip(line.points, line.low, strict=True)]
            body.append(f'<polygon class="band s{number}" points="{_path(upper + lower[::-1])}"/>')
        kind = "bound" if dots_only else f"s{number}"
        body.append(f'<polyline class="line {kind}" points="{_path(places)}"/>')
        body += [] if dots_only else [_dot(number, place, line.name, point, formats)
                 for place, point in zip(places, line.points, strict=True)]  # fmt: skip
    for number, lone in enumerate(dots_only):
        for name, point in zip(lone.names, lone.points, strict=True):
            place = _place(x, y, point)
            body.append(_dot(number, place, f"{lone.name} {name}", point, formats))
            if not number:  # the others' points of that name are near
                body.append(_text(place[0] - 8, place[1] - 6, name, "end"))
    return _svg(HEIGHT, body, labels[1])


def histogram(series: Sequence[tuple[str, Sequence[float]]], bins: int, label: str,
              format_x: Format) -> str:  # fmt: skip
    """How many values fall into each of `bins`; the last one takes all beyond the 99.5th in 100."""
    values = sorted(value for _, row in series for value in row)
    top = values[min(len(values) - 1, int(0.995 * len(values)))]
    x = linear_axis([values[0], top if top > values[0] else values[0] * 1.1 + 1e-9], zero=False)
    width = (x.high - x.low) / bins
    counts = []
    for _, row in series:
        found = [0] * bins
        for value in row:
            found[min(bins - 1, max(0, int((value - x.low) / width)))] += 1
        counts.append(found)
    y = linear_axis([float(max(map(max, counts)))])
    body = [*_grid(x, y, (label, "tokens"), (format_x, lambda value: f"{value:g}"))]
    for number, found in enumerate(counts):
        for index, count in enumerate(found):
            if count:
                left, top_y = _place(x, y, (x.low + index * width, count))
                right, bottom = _place(x, y, (x.low + (index + 1) * width, 0))
                note = f"{count} between {format_x(x.low + index * width)} and "
                note += format_x(x.low + (index + 1) * width)
                body.append(
                    f'<rect class="bar s{number}" x="{left:.1f}" y="{top_y:.1f}" '
                    f'width="{max(0.5, right - left - 1):.1f}" height="{bottom - top_y:.1f}">'
                    f"<title>{escape(note)}</title></rect>"
                )
    return _svg(HEIGHT, body, label)


def bars(rows: Sequence[tuple[str, float]], format_value: Format, number: int = 0) -> str:
    """One row a name, longest first as given."""
    most = max((value for _, value in rows), default=1.0) or 1.0
    left, right = 190, 130
    body = []
    for index, (name, value) in enumerate(rows):
        y = index * _ROW + 4
        width = max(1.0, (WIDTH - left - right) * value / most)
        body.append(_text(left - 8, y + 13, name, "end"))
        body.append(
            f'<rect class="bar s{number}" x="{left}" y="{y}" width="{width:.1f}" '
            f'height="{_ROW - 6}"/>'
        )
        body.append(_text(left + width + 6, y + 13, format_value(value)))
    return _svg(len(rows) * _ROW + 8, body, "breakdown")


# -- pieces ---------------------------------------------------------------------------------------


def _place(x: Axis, y: Axis, point: Point) -> Point:
    across, down = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    return _LEFT + across * x.share(point[0]), _TOP + down * (1 - y.share(point[1]))


def _grid(
    x: Axis, y: Axis, labels: tuple[str, str], formats: tuple[Format, Format]
) -> Iterator[str]:
    for tick in y.ticks:
        at = _place(x, y, (x.low, tick))[1]
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield _text(_LEFT - 6, at + 4, formats[1](tick), "end")
    for tick in x.ticks:
        at = _place(x, y, (tick, y.low))[0]
        yield (
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
        )
        yield _text(at, HEIGHT - _BOTTOM + 16, formats[0](tick), "middle")
    yield _text((WIDTH + _LEFT) / 2, HEIGHT - 8, labels[0], "middle")
    yield _text(_LEFT, _TOP - 3, labels[1])


def _dot(number: int, place: Point, name: str, point: Point, formats: tuple[Format, Format]) -> str:
    note = escape(f"{name}: {formats[0](point[0])}, {formats[1](point[1])}")
    return (
        f'<circle class="dot s{number}" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="4">'
        f"<title>{note}</title></circle>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text class="ink" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(places: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _svg(height: float, body: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(body)}</svg>"
    )
