"""A shim under the C library: counts, refuses, shortens or makes fatal the calls on one folder.

It is preloaded into a child process, which controls it through `FaultyCalls`. Only calls on the
folder count, so Python's own file access does not.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.compiling import compiled

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char edge_folder[4096];      /* calls outside of it pass */
int edge_calls;              /* counted since it was set to 0 */
int edge_fail_at = -1;       /* this one fails: with edge_errno, 0 kills before, -1 kills after */
int edge_sticky;             /* and all later ones with it */
int edge_errno;
int edge_short;              /* writes take at most so many bytes, 0 all */
int edge_readonly;           /* whatever would write fails with EROFS, and the rest passes */
char edge_log[1 << 18];      /* names of the calls */
int edge_logged;

static int inside(const char *path) {
    size_t n = strlen(edge_folder);
    return path && n && !strncmp(path, edge_folder, n) && (path[n] == '/' || !path[n]);
}
static char fd_path[4096];
static int inside_fd(int fd) {
    char link[64];
    if (!edge_folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, fd_path, sizeof fd_path - 1);
    if (n < 0) return 0;
    fd_path[n] = 0;
    return inside(fd_path);
}
static int inside_at(int at, const char *path) {
    return path && path[0] == '/' ? inside(path) : at == AT_FDCWD ? 0 : inside_fd(at);
}
/* whether this call is to fail; `dies` is set when the process is to die after it */
static int refused(const char *name, const char *what, int *dies) {
    int n = edge_calls++, room = sizeof edge_log - edge_logged;
    const char *part = what ? strrchr(what, '/') : NULL;
    int size = snprintf(edge_log + edge_logged, room, "%s:%s ", name, part ? part + 1 : what);
    if (size < room) edge_logged += size;
    if (edge_readonly) {
        if (!strncmp(name, "open", 4) || !strcmp(name, "close") || strstr(name, "read")) return 0;
        errno = EROFS;
        return 1;
    }
    if (edge_fail_at < 0 || n < edge_fail_at || (n > edge_fail_at && !edge_sticky)) return 0;
    if (edge_errno == 0) kill(getpid(), SIGKILL);
    if (edge_errno < 0) { *dies = 1; return 0; }
    errno = edge_errno;
    return 1;
}
#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))
#define WRAP(type, name, where, what, parameters, arguments)                  \
    type name parameters {                                                    \
        int dies = 0;                                                         \
        if ((where) && refused(#name, what, &dies)) return -1;                \
        type out = REAL(name) arguments;                                      \
        if (dies) kill(getpid(), SIGKILL);                                    \
        return out;                                                           \
    }
#define OPEN(name, first, given, where)                                       \
    int name(first, int flags, ...) {                                         \
        va_list rest; va_start(rest, flags);                                  \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;     \
        va_end(rest);                                                         \
        int dies = 0, writes = flags & (O_WRONLY | O_RDWR | O_CREAT);         \
        if ((where) && refused(writes ? "create" : "open", path, &dies)) return -1; \
        int out = REAL(name)(given, flags, mode);                             \
        if (dies) kill(getpid(), SIGKILL);                                    \
        return out;                                                           \
    }
#define COMMA ,
OPEN(open, const char *path, path, inside(path))
OPEN(open64, const char *path, path, inside(path))
OPEN(openat, int at COMMA const char *path, at COMMA path, inside_at(at, path))
OPEN(openat64, int at COMMA const char *path, at COMMA path, inside_at(at, path))
WRAP(int, fsync, inside_fd(fd), fd_path, (int fd), (fd))
WRAP(int, mkdir, inside(path), path, (const char *path, mode_t mode), (path, mode))
WRAP(int, chmod, inside(path), path, (const char *path, mode_t mode), (path, mode))
WRAP(int, unlink, inside(path), path, (const char *path), (path))
WRAP(int, rmdir, inside(path), path, (const char *path), (path))
WRAP(int, rename, inside(to), to, (const char *from, const char *to), (from, to))
WRAP(int, link, inside(to), to, (const char *from, const char *to), (from, to))
WRAP(int, linkat, inside_at(b, to), to,
     (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags))
WRAP(int, renameat2, inside(to), to,
     (int a, const char *from, int b, const char *to, unsigned flags), (a, from, b, to, flags))
WRAP(int, unlinkat, inside_at(at, path), path, (int at, const char *path, int flags),
     (at, path, flags))
WRAP(ssize_t, read, inside_fd(fd), fd_path, (int fd, void *to, size_t n), (fd, to, n))
WRAP(ssize_t, pread, inside_fd(fd), fd_path, (int fd, void *to, size_t n, off_t at),
     (fd, to, n, at))
WRAP(ssize_t, pread64, inside_fd(fd), fd_path, (int fd, void *to, size_t n, off64_t at),
     (fd, to, n, at))
/* closed it is in any case, as Linux does it */
int close(int fd) {
    int dies = 0, fails = inside_fd(fd) && refused("close", fd_path, &dies), problem = errno;
    int out = REAL(close)(fd);
    if (dies) kill(getpid(), SIGKILL);
    if (!fails) return out;
    errno = problem;
    return -1;
}
ssize_t write(int fd, const void *data, size_t size) {
    int dies = 0;
    if (inside_fd(fd)) {
        if (refused("write", fd_path, &dies)) return -1;
        if (dies) size = (size + 1) / 2;
        if (edge_short && size > (size_t)edge_short) size = edge_short;
    }
    ssize_t out = REAL(write)(fd, data, size);
    if (dies) kill(getpid(), SIGKILL);
    return out;
}
"""


def built() -> Path:
    """Build the shim; skips the test without gcc."""
    options = ("-O1", "-fPIC", "-shared", "-x", "c", "-", "-ldl")
    return compiled("faulty.so", "gcc", *options, source=SHIM)


class FaultyCalls:
    """The shim of this process, which was started with it in LD_PRELOAD."""

    KILL_BEFORE, KILL_AFTER = 0, -1

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def _int(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self._library, name)

    def watch(
        self, folder: Path, fail_at: int = -1, errno: int = 0, *, sticky: bool = False,
        short: int = 0, readonly: bool = False,
    ) -> None:  # fmt: skip
        """Count calls on `folder` from 0; call number `fail_at` fails, and with `sticky` all later
        ones. `short`: maximum number of bytes that a write takes. `readonly`: behave like a
        read-only mount.
        """
        self._int("edge_calls").value = self._int("edge_logged").value = 0
        self._int("edge_fail_at").value, self._int("edge_errno").value = fail_at, errno
        self._int("edge_sticky").value, self._int("edge_short").value = sticky, short
        self._int("edge_readonly").value = readonly
        name = ctypes.create_string_buffer(os.fsencode(os.path.realpath(folder)))
        ctypes.memmove(
            ctypes.addressof(ctypes.c_char.in_dll(self._library, "edge_folder")), name, len(name)
        )

    def rest(self) -> list[str]:
        """Let all calls pass again; return the counted ones, as `call:name of the file`."""
        ctypes.c_char.in_dll(self._library, "edge_folder").value = b"\0"
        log = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(self._library, "edge_log")),
                               self._int("edge_logged").value)  # fmt: skip
        return log.decode().split()


ROOT = Path(__file__).parent.parent
PATIENCE_S = 300


def in_child(
    function: Callable[..., object], *arguments: object, shim: Path | None = None,
    environment: Mapping[str, str] | None = None, timeout: float = PATIENCE_S,
) -> str:  # fmt: skip
    """Call a function of a test module with text arguments in a child process, with the shim if
    given; return its output. Any exception fails the test.
    """
    module, name = function.__module__, function.__name__
    more = {} if shim is None else {"LD_PRELOAD": str(shim)}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; from {module} import {name}; {name}(*sys.argv[1:])",
         *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout,
        env=os.environ | more | dict(environment or {}), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


class Parent:
    """A process with the shim, used as a context manager. It forks a child for every call, so that
    what the children import is imported once.
    """

    def __enter__(self) -> Parent:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.faulty_calls import answer; answer()"],
            cwd=ROOT, env=os.environ | {"LD_PRELOAD": str(built())}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def in_child(self, function: Callable[..., object], *arguments: object) -> str:
        """Call a function as the function `in_child` does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            call = (function.__module__, function.__name__, *map(str, arguments))
            print(json.dumps([str(out), str(err), *call]), file=self._process.stdin, flush=True)
            status = self._process.stdout.readline().strip()
            assert status == "0", f"{status}: {err.read_text()[-3000:]}"
            return out.read_text()


def answer() -> None:
    """Make calls, read from standard input, in children; write their exit statuses."""
    for line in sys.stdin:
        out, err, module, name, *arguments = json.loads(line)
        function = getattr(importlib.import_module(module), name)
        child = os.fork()
        if not child:
            signal.alarm(PATIENCE_S)
            for path, number in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
            function(*arguments)
            sys.exit()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
