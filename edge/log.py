"""Messages for `logging`, in loggers below `edge`. Nobody who has not asked for them sees any."""

from __future__ import annotations

import sys


def info(logger: str, message: str, *values: object) -> None:
    """Log a message at INFO, `values` put in with %."""
    # a program that has not imported logging listens to nothing, and is spared the import
    if logging := sys.modules.get("logging"):
        logging.getLogger(logger).info(message, *values, stacklevel=2)
