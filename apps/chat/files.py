"""Files of `edge-chat`: saved conversations, the history of lines, and texts that it reads."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from edge.errors import InputError
from edge.replace import clear

_NAME = re.compile(r"\w(?:[\w -]*[\w-])?")
KEPT_HANGUPS = 3  # conversations cut off by a hang-up that are kept besides the newest
_SUFFIX = ".edge"
MAX_TEXT = 1 << 20  # bytes of a file that /read takes


def _folder(variable: str, default: str) -> Path:
    base = os.environ.get(variable) or os.path.join(os.path.expanduser("~"), *default.split("/"))
    return Path(base) / "mamba-edge"


def conversations() -> Path:
    """Return `$XDG_DATA_HOME/mamba-edge/talks`, or the same under `~/.local/share`."""
    return _folder("XDG_DATA_HOME", ".local/share") / "talks"


def history() -> Path:
    """Return `$XDG_STATE_HOME/mamba-edge/history`, or the same under `~/.local/state`."""
    return _folder("XDG_STATE_HOME", ".local/state") / "history"


def named(command: str, argument: str) -> Path:
    """Return the file that a name or a path means; plain words name a saved conversation."""
    if not argument:
        raise InputError("needs a name or a file", field=command, remedy=f"{command} NAME")
    if _NAME.fullmatch(argument):
        return conversations() / (argument + _SUFFIX)
    return Path(os.path.expanduser(argument))


def saved() -> Iterator[tuple[str, int, str]]:
    """Yield (name, bytes, when) of the saved conversations, newest first."""
    try:
        found = [(path, path.stat()) for path in conversations().glob("*" + _SUFFIX)]
    except OSError:
        return
    for path, status in sorted(found, key=lambda item: -item[1].st_mtime):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        yield path.stem, status.st_size, when


def is_saved(name: str) -> bool:
    """Return whether a conversation is saved under this name."""
    return _NAME.fullmatch(name) is not None and named("", name).exists()


def remove(name: str) -> bool:
    """Remove a saved conversation and its previous save; return whether it existed."""
    if not is_saved(name):
        return False
    path = named("", name)
    path.unlink()
    path.with_name(path.name + "~").unlink(missing_ok=True)
    clear(path)
    return True


def hung_up() -> Path:
    """Return the file for a conversation that is cut off now; remove all but the last few."""
    older = sorted(conversations().glob(f"hangup-*{_SUFFIX}"))
    for path in older[: max(0, len(older) - KEPT_HANGUPS)]:
        with suppress(OSError):
            path.unlink()
            path.with_name(path.name + "~").unlink(missing_ok=True)
    # left by saves that were killed; their names are never used again
    for path in conversations().glob(f".hangup-*{_SUFFIX}.saving-*"):
        clear(path.with_name(path.name[1:].rpartition(".")[0]))
    return ready(conversations() / time.strftime(f"hangup-%Y%m%d-%H%M%S{_SUFFIX}"))


def ready(path: Path) -> Path:
    """Return `path`; create its folder if that is ours."""
    if path.parent == conversations():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def read_text(command: str, argument: str) -> str:
    """Return a text file's content. Raises InputError if it is missing, too large or not UTF-8."""
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
    """Return the text. Raises InputError if the data is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise InputError(
            f"is not UTF-8 at byte {problem.start}", file=file, field=field, remedy="send UTF-8"
        ) from None
