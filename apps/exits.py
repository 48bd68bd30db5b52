"""Exit codes of every program: 0 done, 1 input refused, 2 usage, 128 + n ended by signal n."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import sys
from collections.abc import Callable
from typing import NoReturn

from edge.apps import interrupts
from edge.apps.terminal import say, tell_traceback
from edge.errors import EdgeError, InputError

REFUSED, USAGE, INTERRUPTED = 1, 2, 130
# what a disk says that takes no more
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# Address space that libraries take before a bundle is looked at: 147 MiB measured, one BLAS thread.
# With less OpenBLAS ends the process: between 178 and 190 MiB in all it always did.
START = 160 << 20
_NO_ROOM = "error: not enough memory: raise the limit (ulimit -v), or stop other programs"


def exit_code_of(program: Callable[[], object]) -> int:
    """Run a program and turn how it ended into an exit code; errors become one line on stderr. An
    option's value that is refused is a mistake in usage. Ctrl-C and SIGTERM are obeyed soon, and
    what was being written is removed; see `interrupts`.
    """
    # a start makes 50,000 objects that stay: looking through them 150 times took a tenth of it
    gc.set_threshold(100_000)
    if not _has_room():
        say(_NO_ROOM, file=sys.stderr)
        return REFUSED
    try:
        with interrupts.obeyed():
            code = _ended(program)
        # what is left in the buffer is written here, where it may fail
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader of a pipe went away: not worth a traceback, and nothing is left to say
        sys.stderr.close()
        return REFUSED
    except OSError as problem:
        if problem.errno not in _FULL:
            tell_traceback()
            return REFUSED
        say(f"error: the output cannot be written: {problem.strerror}", file=sys.stderr)
        # the interpreter tries once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except Exception:  # a fault of ours, told in full
        tell_traceback()
        return REFUSED


def leave(program: Callable[[], object]) -> NoReturn:
    """Run a program and end the process as it ended."""
    code = exit_code_of(program)
    if code > 128:  # to take down an interpreter that has loaded torch takes seconds
        interrupts.end(code)
    sys.exit(code)


def _ended(program: Callable[[], object]) -> int:
    try:
        program()
    except EdgeError as problem:
        say(f"error: {problem}", file=sys.stderr)
        of_option = re.fullmatch(r"--?[a-z][\w-]*(\[\d+\])?", problem.field or "")
        # a file is refused, whichever option names it
        usage = of_option and isinstance(problem, InputError) and problem.file is None
        return USAGE if usage else REFUSED
    except (MemoryError, ImportError) as problem:
        # so the loader says that a library has no room
        if isinstance(problem, ImportError) and "failed to map" not in str(problem):
            raise
        say(_NO_ROOM, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            return leaving.code
        return 0 if leaving.code is None else REFUSED
    return 0


def _has_room() -> bool:
    """Whether libraries can begin: within a limit of address space some end the process instead."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return True
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each thread takes 40 MB of it
    try:
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * resource.getpagesize()
    except OSError:
        return True
    return most - used >= START
