"""Progress and messages for programs. The messages go to `logging`, to loggers below `edge`, and
are shown only where a program asks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

# is told what is being done, how much of it is, and of how much: bytes of a bundle that is loaded,
# tokens of a prompt that is read
Progress = Callable[[str, int, int], None]


def info(logger: str, message: str, *values: object) -> None:
    """Log a message at INFO, `values` put in with %."""
    # a program that has not imported logging listens to nothing, and is spared the import
    if logging := sys.modules.get("logging"):
        logging.getLogger(logger).info(message, *values, stacklevel=2)
