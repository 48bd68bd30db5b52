"""Progress and messages for programs. Messages go to loggers of `logging` below `edge` and are
shown only if the program asks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

# called with the activity, the amount done and the total: bytes of a bundle being loaded, tokens of
# a prompt being read
Progress = Callable[[str, int, int], None]


def info(logger: str, message: str, *values: object) -> None:
    """Log a message at INFO, with `values` formatted by %."""
    # a program that has not imported logging does not listen: avoid the import
    if logging := sys.modules.get("logging"):
        logging.getLogger(logger).info(message, *values, stacklevel=2)
