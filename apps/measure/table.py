"""Human-readable figures: tables and lines for a terminal or Markdown, and formatted numbers."""

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
    """Print tables and lines, by default on standard output. Lines are not wrapped or coloured."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if console is None:  # do not wrap a table that is piped to another program
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
