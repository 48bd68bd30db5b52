"""The folder of models that are loaded by name, where `edge pull` puts bundles.

Each bundle is in a folder of its name. Names that begin with a dot hold other things: bundles being
written, downloads, and the times of last use.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

NAME = re.compile(r"[a-z0-9](?:[._-]?[a-z0-9])*")
MAX_NAME = 96
DOWNLOADS = ".downloads"
_USED = ".used"
PYPI = "pypi:"
# ends of file names that state the weights' type: model.Q4_K_M.gguf, model-f16.gguf
_SUFFIX = re.compile(r"[-._](?:(?:iq|q|tq)\d+(?:_[a-z0-9]+)*|b?f16|f32|fp16|fp32|mxfp4)$", re.I)
# a repository as hubs name it: OWNER/NAME
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def folder() -> Path:
    """Return `$EDGE_MODELS`, or `mamba-edge/models` in `$XDG_DATA_HOME` or `~/.local/share`."""
    if configured := os.environ.get("EDGE_MODELS"):
        return Path(configured).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(
        os.path.expanduser("~"), ".local", "share"
    )
    return Path(base) / "mamba-edge" / "models"


def is_name(text: str) -> bool:
    """Return whether `text` is a model name: a-z, 0-9, and single dots, dashes and underscores."""
    return len(text) <= MAX_NAME and NAME.fullmatch(text) is not None


def is_repository(text: str) -> bool:
    """Return whether `text` has the form OWNER/NAME."""
    return _REPOSITORY.fullmatch(text) is not None and ".." not in text


def is_source(text: str) -> bool:
    """Return whether `text` is OWNER/NAME, with @REVISION or not, or pypi:PACKAGE."""
    repository, at, revision = text.partition("@")
    return text.startswith(PYPI) or (is_repository(repository) and bool(revision) == bool(at))


def name_for(text: str) -> str:
    """Return the model name for a repository, folder or file of this name.

    Empty when no character of it may be in a name.
    """
    plain = _SUFFIX.sub("", text.rpartition("/")[2].removesuffix(".gguf")).lower()
    words = re.sub(r"[^a-z0-9]+", lambda match: match[0][0] if match[0][0] in "._-" else "-", plain)
    return words.strip("._-")[:MAX_NAME].rstrip("._-")


def find(name: str) -> Path | None:
    """Return the path of the bundle of that name, or None."""
    if not is_name(name):
        return None
    path = folder() / name
    return path if (path / "manifest.json").is_file() else None


def names() -> list[str]:
    """Return the sorted names of all models. Raises OSError when the folder cannot be read."""
    try:
        found = os.listdir(folder())
    except FileNotFoundError:
        return []
    return sorted(name for name in found if find(name) is not None)


def mark_used(path: Path) -> None:
    """Record that a bundle of this folder was loaded just now; ignore bundles elsewhere."""
    if path.parent != folder():
        return
    mark = folder() / _USED / path.name
    with contextlib.suppress(OSError):  # the folder may be read-only for this user
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
        os.utime(mark)


def last_used(name: str) -> float | None:
    """Return when a model was last loaded, in seconds since the epoch, or None if never."""
    try:
        return (folder() / _USED / name).stat().st_mtime
    except OSError:
        return None


def forget_use(name: str) -> None:
    """Remove the mark that `mark_used` left."""
    with contextlib.suppress(OSError):
        (folder() / _USED / name).unlink()
