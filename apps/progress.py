"""A progress bar on standard error, where somebody can see it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge.apps.terminal import harmless


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


PATIENCE_S = 1.0  # what takes less is over before a bar would be read


@contextmanager
def waiting(text: str, counts: Callable[[], tuple[int, int]] | None = None) -> Iterator[None]:
    """Show a bar as soon as this has lasted PATIENCE_S, and take it away at the end.

    `counts`: how much is done and of how much in all, asked from another thread; without it, or
    while the second is 0, the bar only moves.
    """
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(text, counts, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(text: str, counts: Callable[[], tuple[int, int]] | None, ended: threading.Event) -> None:
    if ended.wait(PATIENCE_S):
        return
    # imported only where there is something to wait for
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns[: 4 if counts else 2], console=console, transient=True) as bar:
        task = bar.add_task(escape(harmless(text)), total=None)
        while not ended.wait(0.1):
            if counts is not None:
                done, total = counts()
                bar.update(task, completed=done, total=total or None)
