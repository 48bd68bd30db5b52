"""What TensorRT says when something fails: kept, and told with the error that is raised."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

# of one failure the first messages say why, the later ones what it led to
_ERRORS = 4
_WARNINGS = 3


@functools.cache
def logger(module: ModuleType) -> Any:
    """An ILogger that keeps errors and warnings until they are taken; any thread may add one.

    One for the process, because TensorRT keeps the first that it is given.
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
            """The errors, "; " between, else with `warnings` the last of those; "" for none. All of
            them are then forgotten.
            """
            found = self._errors or (self._warnings if warnings else [])
            self._errors, self._warnings = [], []
            return "; ".join(found)

    return MessageLog()


def recorder(module: ModuleType, log: Any) -> Any:
    """An IErrorRecorder that adds to `log`. Where one is set, TensorRT reports errors to it alone.

    It must live as long as what it is given to.
    """
    base: Any = module.IErrorRecorder

    class Recorder(base):  # type: ignore[misc, unused-ignore]
        """Hands on what it hears; of the interface only that is asked of us."""

        def __init__(self) -> None:
            base.__init__(self)

        def report_error(self, code: int, text: str) -> bool:
            log.add(text)
            return True

        # these are for the application, which asks the log instead
        def get_num_errors(self) -> int:
            return 0

        def get_error_code(self, index: int) -> Any:
            raise IndexError(index)

        def get_error_desc(self, index: int) -> str:
            raise IndexError(index)

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            """Do nothing: none are kept here."""

    return Recorder()
