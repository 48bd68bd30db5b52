"""A bar on standard error, where somebody can see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def shown(task: str, total: float) -> Iterator[Callable[[float], None]]:
    """Yields a function that is told how much more is done, of `total`."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), "{task.percentage:>3.0f}%",
        TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        row = bar.add_task(task, total=total)

        def more(amount: float) -> None:
            bar.advance(row, amount)

        yield more
