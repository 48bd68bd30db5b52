"""Writing bundles: the folder appears whole or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edge import leftovers
from edge.bundle.files import check_relative, sha256
from edge.bundle.manifest import MAX_MANIFEST, FileEntry, Manifest
from edge.errors import ExportError, some
from edge.replace import sync


class BundleWriter:
    """Collects files in a temporary folder beside the target; `finish` hashes and renames it.

    Use as a context manager: leaving without `finish` removes the temporary folder, and an OSError
    raised inside becomes an ExportError. The next writer removes what a killed one left behind.
    Raises ExportError when the target exists and is neither empty nor only a bundle.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = Path(os.path.abspath(target))
        try:
            _check_replaceable(self.target)
            self.target.parent.mkdir(parents=True, exist_ok=True)
            prefix = leftovers.prefix(self.target, "exporting")
            leftovers.sweep(self.target.parent, prefix)
            self.folder, self._fd = _create(self.target.parent, prefix)
        except OSError as problem:
            raise ExportError(f"cannot be written: {problem.strerror}", file=self.target) from None

    def path(self, relative: str) -> Path:
        """Return the path to write a file of the bundle to, and create its parent folder."""
        check_relative(relative)
        path = self.folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, **fields: Any) -> Manifest:
        """Hash every file, write the manifest from `fields`, publish, and return the manifest."""
        paths = sorted(p for p in self.folder.rglob("*") if p.is_file())
        entries = [_entry(path, path.relative_to(self.folder).as_posix()) for path in paths]
        manifest = Manifest(files=tuple(entries), **fields)
        manifest_file = self.path("manifest.json")
        manifest_file.write_bytes(manifest.to_json())
        for path in [
            *paths,
            manifest_file,
            *filter(Path.is_dir, self.folder.rglob("*")),
            self.folder,
        ]:
            sync(path)
        os.chmod(self.folder, 0o777 & ~_umask())
        _publish(self.folder, self.target)
        return manifest

    def close(self) -> None:
        """Remove the unpublished folder, or the bundle that was replaced."""
        _remove(self.folder)
        if self._fd >= 0:
            with suppress(OSError):  # nothing of a folder is left to write
                os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self.close()
        if isinstance(value, OSError) and not isinstance(value, BrokenPipeError):
            raise ExportError(
                f"was not written: {value.strerror or value}", file=value.filename or self.target
            ) from value


def _create(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # a sweep took it for a leftover before it could be locked
            continue
        except OSError:
            folder.rmdir()
            raise
        if leftovers.lock(folder, fd):
            return folder, fd
        os.close(fd)


def _check_replaceable(target: Path) -> None:
    """Raise ExportError if replacing `target` would lose data.

    It may be missing, empty, or hold a bundle, even a damaged one, and nothing else.
    """
    if not os.path.lexists(target):
        return
    listed = None
    if target.is_dir() and not target.is_symlink():
        if not any(target.iterdir()):
            return
        listed = _listed_files(target)
    if listed is None:
        raise ExportError(
            "exists and is not a bundle",
            file=target,
            remedy="choose another output folder, or remove it yourself",
        )
    if others := sorted(_files_in(target) - listed):
        raise ExportError(
            f"is a bundle with other files in it, which would be lost: {some(others)}",
            file=target,
            remedy="move them away, or choose another output folder",
        )


def _listed_files(folder: Path) -> set[str] | None:
    """Return the files that a bundle's manifest lists, or None if there is no such manifest.

    Other programs keep files named manifest.json too.
    """
    file = folder / "manifest.json"
    try:
        if file.is_symlink() or not file.is_file() or file.stat().st_size > MAX_MANIFEST:
            return None
        manifest = json.loads(file.read_bytes())
        if "schema_version" not in manifest or "model" not in manifest:
            return None
        return {"manifest.json", *(entry["path"] for entry in manifest["files"])}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _files_in(folder: Path) -> set[str]:
    """Return the paths of everything below `folder` except folders."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths}


def _entry(path: Path, relative: str) -> FileEntry:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return FileEntry(path=relative, size=size, sha256=sha256(file.fileno(), size))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _remove(folder: Path) -> None:
    with suppress(OSError):  # despite ignore_errors, rmtree raises errors of close
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`. A replaced bundle ends up at `folder`.

    Where two names cannot be exchanged, the old bundle is first renamed aside, and `target` is
    missing for a moment.
    """
    with _publish_lock(target.parent), leftovers.publishing:
        _check_replaceable(target)
        if not target.exists():
            os.rename(folder, target)
        elif not _exchange(folder, target):
            # not named as a leftover: until the new bundle is in place, it is the only one
            aside = target.with_name(f".{target.name[:100]}.before-{secrets.token_hex(4)}")
            os.rename(target, aside)
            try:
                os.rename(folder, target)
            except OSError:
                os.rename(aside, target)
                raise
            _remove(aside)
        sync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step. Return False if the system or the file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    at_cwd, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), swap) == 0)


@contextmanager
def _publish_lock(parent: Path) -> Iterator[None]:
    """Let one process at a time publish in a folder. Held only while renaming."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
