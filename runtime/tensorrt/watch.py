"""Progress of a TensorRT build, and its interruption."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypeVar

from edge import log

_Result = TypeVar("_Result")

STEPS = 10_000  # resolution of reported progress
_POLL_S = 0.2
_START_TIMEOUT_S = 1.0


class Progress:
    """Combines nested phases into one progress value that never decreases.

    A phase subdivides its parent's current step.
    """

    def __init__(self, report: log.Progress) -> None:
        self._report = report
        self._phases: dict[str, tuple[str | None, int, int]] = {}
        self._shown = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._phases[name] = (parent, max(1, steps), 0)
        self._report_progress(name)

    def step(self, name: str, step: int) -> None:
        parent, steps, _ = self._phases.get(name, (None, 1, 0))
        self._phases[name] = (parent, steps, min(step + 1, steps))
        self._report_progress(name)

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)

    def _report_progress(self, name: str) -> None:
        self._shown = max(self._shown, min(1.0, self._fraction(name)))
        self._report(name, round(self._shown * STEPS), STEPS)

    def _fraction(self, name: str) -> float:
        """Return the completed fraction of the build, summed from this phase up to the root."""
        share = 0.0
        phase: str | None = name
        while phase is not None and phase in self._phases:
            parent, steps, done = self._phases[phase]
            share = (done + share) / steps
            phase = parent
        return share


def monitor(module: ModuleType, report: log.Progress, stop: threading.Event) -> Any:
    """Return an IProgressMonitor that reports progress and cancels the build once `stop` is set."""
    progress = Progress(report)

    class Monitor(module.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            progress.start(name, parent, steps)

        def step_complete(self, name: str, step: int) -> bool:
            progress.step(name, step)
            return not stop.is_set()

        def phase_finish(self, name: str) -> None:
            progress.finish(name)

    return Monitor()


class Interruptible(Generic[_Result]):
    """Work on a thread of its own, so that the caller's thread can handle Ctrl-C: Python's signal
    handlers do not run inside C++ calls.

    Attributes:
        stop: set by the first interrupt; the work ends when it next checks.
    """

    def __init__(self, work: Callable[[], _Result], stop: threading.Event) -> None:
        self.stop = stop
        self._work = work
        self._results: list[_Result] = []
        self._problems: list[BaseException] = []
        self._started, self._finished = threading.Event(), threading.Event()

    def result(self) -> _Result:
        """Return or raise the work's result. An interrupt or SystemExit is raised once the work has
        ended; a second one is raised at once.
        """
        thread = threading.Thread(target=self._run, name="edge-build", daemon=True)
        try:
            thread.start()
            while thread.is_alive():
                thread.join(_POLL_S)
        except BaseException:
            self.stop.set()
            # if interrupted in `start`, the thread may never begin
            if self._started.wait(_START_TIMEOUT_S):
                self._finished.wait()
            raise
        if self._problems:
            raise self._problems[0]
        return self._results[0]

    def _run(self) -> None:
        self._started.set()
        try:
            self._results.append(self._work())
        except BaseException as problem:
            self._problems.append(problem)
        finally:
            self._finished.set()
