"""Publish a bundle: the folder appears whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from edge.bundle.hashing import sha256
from edge.bundle.manifest import FileEntry, Manifest
from edge.bundle.paths import check_relative
from edge.errors import ExportError


class BundleWriter:
    """Collects files in a temporary folder beside the target; `finish` hashes and renames it.

    Use as a context manager: leaving without `finish` removes the temporary folder.
    Raises ExportError when the target exists and is neither empty nor a bundle.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = Path(os.path.abspath(target))
        if self.target.exists() and not _replaceable(self.target):
            raise ExportError(
                "exists and is not a bundle",
                file=self.target,
                remedy="choose another output folder, or remove it yourself",
            )
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.mkdtemp(prefix=f".{self.target.name}.", dir=self.target.parent)
        except OSError as problem:
            raise ExportError(f"cannot be written: {problem.strerror}", file=self.target) from None
        self.folder = Path(temporary)

    def path(self, relative: str) -> Path:
        """Where to write a file of the bundle; its parent folder exists afterwards."""
        check_relative(relative)
        path = self.folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, **fields: Any) -> Manifest:
        """Hash every file, write the manifest from `fields`, publish, and return the manifest."""
        paths = sorted(p for p in self.folder.rglob("*") if p.is_file())
        entries = [_entry(path, path.relative_to(self.folder).as_posix()) for path in paths]
        manifest = Manifest(files=tuple(entries), **fields)
        written = self.path("manifest.json")
        written.write_bytes(manifest.to_json())
        for path in [*paths, written]:
            _fsync(path)
        _fsync(self.folder)
        os.chmod(self.folder, 0o777 & ~_umask())
        _publish(self.folder, self.target)
        return manifest

    def close(self) -> None:
        """Remove what was not published."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _replaceable(target: Path) -> bool:
    if target.is_symlink() or not target.is_dir():
        return False
    return (target / "manifest.json").is_file() or not any(target.iterdir())


def _entry(path: Path, relative: str) -> FileEntry:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return FileEntry(path=relative, size=size, sha256=sha256(file.fileno(), size))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(folder: Path, target: Path) -> None:
    """Rename into place; an older bundle steps aside first and is removed last."""
    aside = None
    if target.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        os.rename(target, aside / "bundle")
    try:
        os.rename(folder, target)
    except OSError:
        if aside is not None:
            os.rename(aside / "bundle", target)
            os.rmdir(aside)
        raise
    _fsync(target.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
