"""A progress bar on standard error, where somebody can see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stages(first: str, width: int) -> Iterator[Callable[[str, float], None]]:
    """Yields a function that is told what is being done and the share of it that is.

    `width`: characters that the names of stages take.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), "{task.percentage:>3.0f}%")
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(f"{first:<{width}}", total=1.0)

        def show(stage: str, done: float) -> None:
            bar.update(task, description=f"{stage[:width]:<{width}}", completed=done)

        yield show
