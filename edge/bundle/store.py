"""The folder of models that are called by name: `edge pull` puts bundles there.

Each is a bundle in a folder of its name. What begins with a dot is none: bundles that are being
written, downloads, and when each was last used.
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
# how files of quantized weights end: model.Q4_K_M.gguf, model-f16.gguf
_KIND = re.compile(r"[-._](?:(?:iq|q|tq)\d+(?:_[a-z0-9]+)*|b?f16|f32|fp16|fp32|mxfp4)$", re.I)
# as hubs write them: OWNER/NAME
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def folder() -> Path:
    """`$EDGE_MODELS`, or `$XDG_DATA_HOME/mamba-edge/models`, or that under `~/.local/share`."""
    if named := os.environ.get("EDGE_MODELS"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(
        os.path.expanduser("~"), ".local", "share"
    )
    return Path(base) / "mamba-edge" / "models"


def is_name(text: str) -> bool:
    """Whether a model may be called so: lower case, digits, and single dots, dashes and lines."""
    return len(text) <= MAX_NAME and NAME.fullmatch(text) is not None


def is_repository(text: str) -> bool:
    """Whether a text has the form OWNER/NAME."""
    return _REPOSITORY.fullmatch(text) is not None and ".." not in text


def name_for(text: str) -> str:
    """What a model is called that comes from a repository, folder or file of this name.

    Empty when nothing of it can be in a name.
    """
    plain = _KIND.sub("", text.rpartition("/")[2].removesuffix(".gguf")).lower()
    words = re.sub(r"[^a-z0-9]+", lambda cut: cut[0][0] if cut[0][0] in "._-" else "-", plain)
    return words.strip("._-")[:MAX_NAME].rstrip("._-")


def find(name: str) -> Path | None:
    """The bundle of that name, or None."""
    if not is_name(name):
        return None
    path = folder() / name
    return path if (path / "manifest.json").is_file() else None


def names() -> list[str]:
    """The models that are there, sorted. Raises OSError when the folder cannot be read."""
    try:
        found = os.listdir(folder())
    except FileNotFoundError:
        return []
    return sorted(name for name in found if find(name) is not None)


def mark_used(path: Path) -> None:
    """Remember that a bundle of the folder was loaded just now; of others nothing is kept."""
    if path.parent != folder():
        return
    mark = folder() / _USED / path.name
    with contextlib.suppress(OSError):  # a folder that only others may write to
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
        os.utime(mark)


def last_used(name: str) -> float | None:
    """When it was last loaded, in seconds since the epoch; None for never."""
    try:
        return (folder() / _USED / name).stat().st_mtime
    except OSError:
        return None


def forget_use(name: str) -> None:
    """Remove what `mark_used` left."""
    with contextlib.suppress(OSError):
        (folder() / _USED / name).unlink()
