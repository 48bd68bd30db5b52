"""Exit codes of every program: 0 done, 1 input refused, 2 usage, 128 + n ended by signal n."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

from edge.apps.terminal import say, tell_traceback
from edge.errors import EdgeError

REFUSED, INTERRUPTED = 1, 130


def exit_code_of(program: Callable[[], object]) -> int:
    """Run a program and turn how it ended into an exit code; errors become one line on stderr.

    SIGTERM ends it in order, so that what it was writing is removed; programs that drain first set
    a handler of their own.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)
    try:
        program()
    except EdgeError as problem:
        say(f"error: {problem}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        say("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of a pipe went away: not worth a traceback, and nothing is left to say
        sys.stderr.close()
        return REFUSED
    except Exception:  # a fault of ours, told in full
        tell_traceback()
        return REFUSED
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            return leaving.code
        return 0 if leaving.code is None else REFUSED
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
