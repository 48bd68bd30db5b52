"""Figures for people: tables and lines for a terminal or a text, numbers with fitting digits."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

ABSENT = "absent"


@dataclass(frozen=True)
class FigureTable:
    """Rows under a head; the columns `words` are aligned to the left, numbers to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    title: str = ""

    def markdown(self) -> str:
        """As a table of Markdown."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(parts: Iterable[FigureTable | str], console: Console | None = None) -> None:
    """Print tables and lines, on standard output unless told otherwise; a line is never folded, nor
    a number coloured.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if console is None:  # a table that is piped somewhere is not to be folded
        console = Console() if sys.stdout.isatty() else Console(width=160)

    for part in parts:
        if isinstance(part, str):
            console.print(part, soft_wrap=True, highlight=False, markup=False)
            continue
        grid = Table(box=box.MARKDOWN, title=part.title or None, title_justify="left")
        for index, name in enumerate(part.head):
            grid.add_column(name, justify="left" if index in part.words else "right", no_wrap=True)
        for row in part.rows:
            grid.add_row(*row)
        console.print(grid)


def named(rows: Mapping[str, str]) -> list[str]:
    """Names and values under each other."""
    width = max(map(len, rows)) + 2
    return [f"  {name:<{width}}{value}" for name, value in rows.items()]


def shares(rows: Iterable[tuple[str, float]], total: float) -> Iterable[str]:
    """Milliseconds and their part of the total, one a line."""
    for name, spent in rows:
        yield f"  {spent:9.3f} ms {spent / total:5.0%}  {name}"


# -- numbers --------------------------------------------------------------------------------------


def ms(value: float | None) -> str:
    """Milliseconds with the digits that count."""
    if value is None:
        return ABSENT
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def plus_minus(spread: Mapping[str, Any] | None) -> str:
    """A mean and its deviation, as llama-bench writes them."""
    if spread is None:
        return ABSENT
    deviation = spread["deviation"]
    return f"{spread['mean']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def two(value: float | None, none: str = "") -> str:
    """Two decimals."""
    return none if value is None else f"{value:.2f}"


def number(value: float | None) -> str:
    """Four digits that count; None is what no number can say."""
    if value is None:
        return "∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}"
    return f"{value:.2e}"
