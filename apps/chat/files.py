"""Where `edge-chat` keeps saved conversations and the history of lines, and files that it reads."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from edge.errors import InputError
from edge.runtime.replace import clear

_NAME = re.compile(r"\w(?:[\w -]*[\w-])?")
KEPT_HANGUPS = 3  # of what was cut off, besides the newest
_SUFFIX = ".edge"
MAX_TEXT = 1 << 20  # bytes of a file that /read takes


def _folder(variable: str, default: str) -> Path:
    base = os.environ.get(variable) or os.path.join(os.path.expanduser("~"), *default.split("/"))
    return Path(base) / "mamba-edge"


def conversations() -> Path:
    """`$XDG_DATA_HOME/mamba-edge/talks`, or under `~/.local/share`."""
    return _folder("XDG_DATA_HOME", ".local/share") / "talks"


def history() -> Path:
    """`$XDG_STATE_HOME/mamba-edge/history`, or under `~/.local/state`."""
    return _folder("XDG_STATE_HOME", ".local/state") / "history"


def named(command: str, argument: str) -> Path:
    """The file that a name or a path means: plain words are a saved conversation."""
    if not argument:
        raise InputError("needs a name or a file", field=command, remedy=f"{command} NAME")
    if _NAME.fullmatch(argument):
        return conversations() / (argument + _SUFFIX)
    return Path(os.path.expanduser(argument))


def saved() -> Iterator[tuple[str, int, str]]:
    """(name, bytes, when) of the saved conversations, newest first."""
    try:
        found = [(path, path.stat()) for path in conversations().glob("*" + _SUFFIX)]
    except OSError:
        return
    for path, facts in sorted(found, key=lambda item: -item[1].st_mtime):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.st_mtime))
        yield path.stem, facts.st_size, when


def is_saved(name: str) -> bool:
    """Whether a conversation has been saved by this name."""
    return _NAME.fullmatch(name) is not None and named("", name).exists()


def remove(name: str) -> bool:
    """Remove a saved conversation, and the save before it; whether there was one."""
    if not is_saved(name):
        return False
    path = named("", name)
    path.unlink()
    path.with_name(path.name + "~").unlink(missing_ok=True)
    clear(path)
    return True


def hung_up() -> Path:
    """Where a conversation goes that is cut off now; older ones than the last few make room."""
    older = sorted(conversations().glob(f"hangup-*{_SUFFIX}"))
    for path in older[: max(0, len(older) - KEPT_HANGUPS)]:
        with suppress(OSError):
            path.unlink()
            path.with_name(path.name + "~").unlink(missing_ok=True)
    # killed while it was saved, under a name that nothing is saved by again
    for path in conversations().glob(f".hangup-*{_SUFFIX}.saving-*"):
        clear(path.with_name(path.name[1:].rpartition(".")[0]))
    return ready(conversations() / time.strftime(f"hangup-%Y%m%d-%H%M%S{_SUFFIX}"))


def ready(path: Path) -> Path:
    """`path`, its folder made where it is one of ours."""
    if path.parent == conversations():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def read_text(command: str, argument: str) -> str:
    """A text file's content. Raises InputError: missing, too large, not UTF-8."""
    if not argument:
        raise InputError("needs a file", field=command, remedy=f"{command} FILE")
    path = Path(os.path.expanduser(argument))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT + 1)
    except OSError as problem:
        raise InputError(f"cannot be read: {problem.strerror}", file=path) from None
    if len(data) > MAX_TEXT:
        raise InputError(f"is larger than {MAX_TEXT} bytes", file=path, remedy="send a part of it")
    return decoded(data, file=path)


def decoded(data: bytes, *, file: Path | None = None, field: str | None = None) -> str:
    """The text. Raises InputError: not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise InputError(
            f"is not UTF-8 at byte {problem.start}", file=file, field=field, remedy="send UTF-8"
        ) from None
