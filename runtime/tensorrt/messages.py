"""TensorRT's log messages, kept for the error that is raised when a call fails."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

# the first messages of a failure give its cause, later ones its consequences
_ERRORS = 4
_WARNINGS = 3


@functools.cache
def logger(module: ModuleType) -> Any:
    """Return an ILogger that keeps errors and warnings until they are taken, from any thread.

    There is one per process, because TensorRT keeps the first logger it gets.
    """
    base: Any = module.ILogger

    class MessageLog(base):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            base.__init__(self)
            self._errors: list[str] = []
            self._warnings: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (base.Severity.ERROR, base.Severity.INTERNAL_ERROR):
                self.add(text)
            elif severity == base.Severity.WARNING:
                self._warnings.append(" ".join(text.split()))
                del self._warnings[:-_WARNINGS]

        def add(self, text: str) -> None:
            if len(self._errors) < _ERRORS:
                self._errors.append(" ".join(text.split()))

        def take(self, *, warnings: bool = False) -> str:
            """Return and clear the messages: errors joined by "; ", or without any error and with
            `warnings` the last warnings; "" if there are none.
            """
            messages = self._errors or (self._warnings if warnings else [])
            self._errors, self._warnings = [], []
            return "; ".join(messages)

    return MessageLog()


def recorder(module: ModuleType, log: Any) -> Any:
    """Return an IErrorRecorder that adds to `log`. TensorRT objects with a recorder report errors
    only to it.

    The recorder must outlive the objects it is set on.
    """
    base: Any = module.IErrorRecorder

    class Recorder(base):  # type: ignore[misc, unused-ignore]
        """Forwards errors to the log; the rest of the interface is a stub."""

        def __init__(self) -> None:
            base.__init__(self)

        def report_error(self, code: int, text: str) -> bool:
            log.add(text)
            return True

        # for the application, which reads the log instead
        def get_num_errors(self) -> int:
            return 0

        def get_error_code(self, index: int) -> Any:
            raise IndexError(index)

        def get_error_desc(self, index: int) -> str:
            raise IndexError(index)

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            """Do nothing: the log keeps the errors."""

    return Recorder()
