"""What programs are told on the way. Messages for `logging` are in loggers below `edge`, and nobody
who has not asked for them sees any.
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
