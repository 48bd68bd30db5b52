"""How every program ends: 0 done, 1 the input was refused, 2 usage, 130 interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable

from edge.errors import EdgeError

REFUSED, INTERRUPTED = 1, 130


def exit_code_of(program: Callable[[], object]) -> int:
    """Run a program and turn how it ended into an exit code; errors become one line on stderr."""
    try:
        program()
    except EdgeError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of a pipe went away: not worth a traceback, and nothing is left to say
        sys.stderr.close()
        return REFUSED
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            return leaving.code
        return 0 if leaving.code is None else REFUSED
    return 0
