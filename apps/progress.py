"""Progress bars on standard error, shown at a terminal only."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edge.apps import terminal

if TYPE_CHECKING:
    from edge.runtime.model import Model


@contextmanager
def stages(first: str, width: int) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that takes the name of a stage and the share that is done.

    `width`: characters reserved for stage names.
    """
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = terminal.console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), "{task.percentage:>3.0f}%")
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(f"{first:<{width}}", total=1.0)

        def show(stage: str, done: float) -> None:
            bar.update(task, description=escape(f"{stage[:width]:<{width}}"), completed=done)

        yield show


PATIENCE_S = 1.0  # shorter work is over before anyone could read a bar


def load(bundle: str | os.PathLike[str], **options: Any) -> Model:
    """Call `edge.load` with a progress bar."""
    from edge.runtime import model

    counts = (0, 0)

    def report(_: str, done: int, total: int) -> None:
        nonlocal counts
        counts = done, total

    with waiting(f"loading {bundle}", lambda: counts, "bytes"):
        return model.load(bundle, on_progress=report, **options)


@contextmanager
def waiting(text: str, counts: Callable[[], tuple[int, int]], unit: str) -> Iterator[None]:
    """Show a bar once PATIENCE_S have passed, and remove it at the end.

    `counts`: returns done and total in `unit`; called from another thread. While the total is 0,
    the bar only pulses.
    """
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    watcher = threading.Thread(target=_show_bar, args=(text, counts, unit, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _show_bar(
    text: str, counts: Callable[[], tuple[int, int]], unit: str, ended: threading.Event
) -> None:
    if ended.wait(PATIENCE_S):
        return
    # imported only when a bar is shown
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counters: list[str | ProgressColumn] = [MofNCompleteColumn(), f"{{task.fields[rate]}} {unit}/s"]
    if unit == "bytes":
        counters = [DownloadColumn(), TransferSpeedColumn()]
    columns = ("{task.description}", BarColumn(), *counters, TimeRemainingColumn())
    with Progress(*columns, console=terminal.console(stderr=True), transient=True) as bar:
        previous, rate = 0, "–"
        task = bar.add_task(escape(text), total=None, rate=rate)
        while not ended.wait(0.1):
            done, total = counts()
            if done < previous:  # another count has begun: forget the speed of the last one
                bar.reset(task)
            previous, rate = done, f"{bar.tasks[0].speed:.0f}" if bar.tasks[0].speed else "–"
            bar.update(task, completed=done, total=total or None, rate=rate)
