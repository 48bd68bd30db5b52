"""What TensorRT says when something fails: kept, and told with the error that is raised."""

from __future__ import annotations

from types import ModuleType
from typing import Any

# of one failure the first messages say why, the later ones what it led to
_KEPT = 4


class Messages:
    """The errors since they were last taken. Any thread of TensorRT may add one."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        if len(self._texts) < _KEPT:
            self._texts.append(" ".join(text.split()))

    def take(self) -> str:
        """All of them, "; " between, which are then forgotten; "" for none."""
        texts, self._texts = self._texts, []
        return "; ".join(texts)


def listener(module: ModuleType, messages: Messages) -> tuple[Any, Any]:
    """A logger and an error recorder of that TensorRT that add to `messages`.

    Both must live as long as what they are given to. With a recorder set, TensorRT reports errors
    to it; the logger hears of those before, and of the plugin library's.
    """
    base_logger: Any = module.ILogger
    base_recorder: Any = module.IErrorRecorder
    severe = (base_logger.Severity.ERROR, base_logger.Severity.INTERNAL_ERROR)

    class Logger(base_logger):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            base_logger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in severe:
                messages.add(text)

    class Recorder(base_recorder):  # type: ignore[misc, unused-ignore]
        """Hands on what it hears; of the interface only that is asked of us."""

        def __init__(self) -> None:
            base_recorder.__init__(self)

        def report_error(self, code: Any, text: str) -> bool:
            messages.add(text)
            return True

        # these are for the application, which asks `messages` instead
        def get_num_errors(self) -> int:
            return 0

        def get_error_code(self, index: int) -> Any:
            raise IndexError(index)

        def get_error_desc(self, index: int) -> str:
            raise IndexError(index)

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            """Nothing is kept here."""

    return Logger(), Recorder()
