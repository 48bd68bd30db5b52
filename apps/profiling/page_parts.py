"""What pages are made of: sections and tables, with everything that is said escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def section(title: str, body: str) -> str:
    """A titled box; `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def cards(figures: dict[str, str]) -> str:
    """Figures to see first, each with its name."""
    each = (f'<div class="card">{escape(name)}<b>{escape(value)}</b></div>'
            for name, value in figures.items())  # fmt: skip
    return f'<div class="cards">{"".join(each)}</div>'
