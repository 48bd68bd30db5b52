"""How far TensorRT is while it builds, and how it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypeVar

from edge import log

_Result = TypeVar("_Result")

STEPS = 10_000  # that a share of the whole is told in
_LOOK_S = 0.2
_BEGINS_S = 1.0


class Progress:
    """How far nested phases are, as one number that does not go back.

    A phase of n steps shares its parent's current step.
    """

    def __init__(self, report: log.Progress) -> None:
        self._report = report
        self._phases: dict[str, tuple[str | None, int, int]] = {}
        self._shown = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._phases[name] = (parent, max(1, steps), 0)
        self._tell(name)

    def step(self, name: str, step: int) -> None:
        parent, steps, _ = self._phases.get(name, (None, 1, 0))
        self._phases[name] = (parent, steps, min(step + 1, steps))
        self._tell(name)

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)

    def _tell(self, name: str) -> None:
        self._shown = max(self._shown, min(1.0, self._done(name)))
        self._report(name, round(self._shown * STEPS), STEPS)

    def _done(self, name: str) -> float:
        """Share of the whole: this phase's part of its parent's current step, and so on up."""
        share = 0.0
        at: str | None = name
        while at is not None and at in self._phases:
            parent, steps, done = self._phases[at]
            share = (done + share) / steps
            at = parent
        return share


def monitor(module: ModuleType, report: log.Progress, stop: threading.Event) -> Any:
    """An IProgressMonitor that reports, and ends the build at its next step after `stop`."""
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
    """Work on a thread of its own, so that this one hears Ctrl-C: inside of C++ Python's signal
    handlers do not run.

    Attributes:
        stop: set by the first interrupt; the work ends as soon as it looks.
    """

    def __init__(self, work: Callable[[], _Result], stop: threading.Event) -> None:
        self.stop = stop
        self._work = work
        self._results: list[_Result] = []
        self._problems: list[BaseException] = []
        self._begun, self._ended = threading.Event(), threading.Event()

    def result(self) -> _Result:
        """What the work returns or raises. An interrupt (or the end of the process) is raised when
        the work has ended; a second one does not wait.
        """
        thread = threading.Thread(target=self._run, name="edge-build", daemon=True)
        try:
            thread.start()
            while thread.is_alive():
                thread.join(_LOOK_S)
        except BaseException:
            self.stop.set()
            # interrupted in `start`, it may not have begun, and may never
            if self._begun.wait(_BEGINS_S):
                self._ended.wait()
            raise
        if self._problems:
            raise self._problems[0]
        return self._results[0]

    def _run(self) -> None:
        self._begun.set()
        try:
            self._results.append(self._work())
        except BaseException as problem:
            self._problems.append(problem)
        finally:
            self._ended.set()
