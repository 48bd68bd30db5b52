"""One HTML page that needs nothing else: no script, no font, no address. Everything is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge.apps.measure.table import FigureTable


@dataclass(frozen=True)
class Section:
    """A titled box of the page.

    Attributes:
        cards: figures to see first, each with its name.
        notes: a paragraph each.
        pictures: caption, or "", and SVG.
        terms: what stands for what.
        text: lines as they are.
    """

    title: str
    notes: Sequence[str] = ()
    cards: Mapping[str, str] = field(default_factory=dict)
    pictures: Sequence[tuple[str, str]] = ()
    table: FigureTable | None = None
    terms: Mapping[str, str] = field(default_factory=dict)
    text: str = ""


def render(
    program: str,
    title: str,
    notes: Sequence[str],
    warnings: Sequence[str],
    cards: Sequence[tuple[str, Mapping[str, str]]],
    sections: Sequence[Section],
) -> str:
    """The page. `cards`: for each side what it is called, or "" where there is one, and figures."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("edge.apps.measure", ""), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html").render(
        program=program, title=title, notes=notes, warnings=warnings, cards=cards,
        sections=sections,
    )  # fmt: skip
