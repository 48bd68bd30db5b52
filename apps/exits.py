"""Exit codes of every program: 0 done, 1 input refused, 2 usage, 128 + n ended by signal n."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from edge.apps import interrupts
from edge.apps.terminal import say, tell_traceback
from edge.errors import EdgeError, InputError

REFUSED, USAGE, INTERRUPTED = 1, 2, 130
# errors of a disk that takes no more data
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# Address space that libraries take before a bundle is opened: 147 MiB measured, one BLAS thread.
# With less, OpenBLAS ends the process: with 178 to 190 MiB in all it always did.
START = 160 << 20
_NO_ROOM = "error: not enough memory: raise the limit (ulimit -v), or stop other programs"


def exit_code_of(program: Callable[[], object]) -> int:
    """Run a program and return its exit code; errors become one line on stderr.

    A refused option value is a usage error. Ctrl-C and SIGTERM are obeyed soon, and files being
    written are removed; see `interrupts`.
    """
    # startup makes 50,000 objects that stay: scanning them 150 times took a tenth of its time
    gc.set_threshold(100_000)
    if not _has_room():
        say(_NO_ROOM, file=sys.stderr)
        return REFUSED
    try:
        with interrupts.obeyed():
            code = _run(program)
        # flush the buffer here, where a failure is still handled
        try:
            sys.stdout.flush()
        except OSError:
            if code != 128 + signal.SIGHUP:  # after which the terminal is gone
                raise
        return code
    except BrokenPipeError:
        # the reader of a pipe went away: nobody is left to report to
        sys.stderr.close()
        return REFUSED
    except OSError as problem:
        if problem.errno not in _FULL:
            tell_traceback()
            return REFUSED
        say(f"error: the output cannot be written: {problem.strerror}", file=sys.stderr)
        # the interpreter flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except Exception:  # a bug of ours
        tell_traceback()
        return REFUSED


def leave(program: Callable[[], object]) -> NoReturn:
    """Run a program and end the process with its exit code."""
    code = exit_code_of(program)
    if code > 128:  # shutting down an interpreter that has loaded torch takes seconds
        interrupts.end(code)
    sys.exit(code)


def _run(program: Callable[[], object]) -> int:
    try:
        program()
    except EdgeError as problem:
        say(f"error: {problem}", file=sys.stderr)
        names_option = re.fullmatch(r"--?[a-z][\w-]*(\[\d+\])?", problem.field or "")
        # a refused file is no usage error, even if an option names it
        usage = names_option and isinstance(problem, InputError) and problem.file is None
        return USAGE if usage else REFUSED
    except (MemoryError, ImportError) as problem:
        # "failed to map" is the loader's message for a library that has no room
        if isinstance(problem, ImportError) and "failed to map" not in str(problem):
            raise
        say(_NO_ROOM, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as system_exit:
        if isinstance(system_exit.code, int):
            return system_exit.code
        return 0 if system_exit.code is None else REFUSED
    return 0


def _has_room() -> bool:
    """Return whether the address space limit leaves room to load libraries.

    Some libraries end the process when it does not.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return True
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each thread takes 40 MB of the limit
    try:
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
    except OSError:
        return True
    return limit - used >= START
