"""A self-contained HTML page without scripts, fonts or links. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from edge.apps.measure.table import FigureTable


class Drawing(NamedTuple):
    """A chart in a box of the page: title, a sentence below the title or "", and SVG."""

    title: str
    note: str
    svg: str


def render(
    program: str,
    title: str,
    notes: Sequence[str],
    warnings: Sequence[str],
    cards: Iterable[tuple[str, Mapping[str, str]]],
    drawings: Iterable[Drawing],
    parts: Iterable[FigureTable | str],
) -> str:
    """Render the page: headline figures, then charts, then what a terminal shows.

    `cards`: name of each group of figures, or "", and the figures. `parts`: tables and lines, as
    for `table.show`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("edge.apps.measure", ""), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html").render(
        program=program, title=title, notes=notes, warnings=warnings, cards=list(cards),
        drawings=list(drawings), parts=list(_paragraphs(parts)),
    )  # fmt: skip


def _paragraphs(parts: Iterable[FigureTable | str]) -> Iterator[FigureTable | str]:
    """Join consecutive lines."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, str):
            lines.append(part)
            continue
        if lines:
            yield "\n".join(lines)
        lines = []
        yield part
    if lines:
        yield "\n".join(lines)
