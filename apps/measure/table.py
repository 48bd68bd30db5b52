"""Human-readable figures: tables and lines for a terminal or Markdown, and formatted numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from edge.apps.terminal import console as harmless_console

if TYPE_CHECKING:
    from rich.console import Console

ABSENT = "absent"


@dataclass(frozen=True)
class FigureTable:
    """Rows under a head. The columns `words` are left-aligned, numbers right-aligned."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    title: str = ""

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(parts: Iterable[FigureTable | str], console: Console | None = None) -> None:
    """Print tables and lines, by default on standard output. Lines are not wrapped or coloured.

    Names in them may come from untrusted folders and files, so nothing in them is markup to rich.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if console is None:  # do not wrap a table that is piped to another program
        console = harmless_console(**({} if sys.stdout.isatty() else {"width": 160}))

    for part in parts:
        if isinstance(part, str):
            console.print(Text(part), soft_wrap=True, highlight=False)
            continue
        title = Text(part.title) if part.title else None
        grid = Table(box=box.MARKDOWN, title=title, title_justify="left")
        for index, name in enumerate(part.head):
            justify: Literal["left", "right"] = "left" if index in part.words else "right"
            grid.add_column(Text(name), justify=justify, no_wrap=True)
        for row in part.rows:
            grid.add_row(*map(Text, row))
        console.print(grid)


def named(rows: Mapping[str, str]) -> list[str]:
    """Return aligned lines of names and values."""
    width = max(map(len, rows)) + 2
    return [f"  {name:<{width}}{value}" for name, value in rows.items()]


def shares(rows: Iterable[tuple[str, float]], total: float) -> Iterable[str]:
    """Yield lines of milliseconds and their share of the total."""
    for name, spent in rows:
        yield f"  {spent:9.3f} ms {spent / total:5.0%}  {name}"


# -- numbers --------------------------------------------------------------------------------------


def ms(value: float | None) -> str:
    """Format milliseconds with the significant digits."""
    if value is None:
        return ABSENT
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def plus_minus(spread: Mapping[str, Any] | None) -> str:
    """Format a mean and its deviation as llama-bench does."""
    if spread is None:
        return ABSENT
    deviation = spread["deviation"]
    return f"{spread['mean']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def two(value: float | None, none: str = "") -> str:
    """Format with two decimals."""
    return none if value is None else f"{value:.2f}"


def number(value: float | None) -> str:
    """Format with four significant digits; None is infinity."""
    if value is None:
        return "∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}"
    return f"{value:.2e}"
