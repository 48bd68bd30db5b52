"""Opening bundles: every file is checked before use, through the descriptor it is read from."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge.bundle import stamps
from edge.bundle.files import REMEDY, blocks, is_mostly_holes, open_inside, sha256
from edge.bundle.manifest import MAX_MANIFEST, SCHEMA_VERSION, FileEntry, Manifest
from edge.bundle.strict_json import read_document
from edge.errors import BundleError, Faults, some
from edge.log import Progress

WEIGHT_FILE = "weights.bin"
MAX_OTHER = 256 << 20  # bytes of a file other than weights
MAX_OTHERS = 1 << 30  # bytes of all of them together; kernels for eight architectures take 50 MB
# The recipe that stores most takes 4 bytes a parameter; matrices stored twice and heads padded
# with zeros made it 4.6 in small models. Tables that depend on no parameter come on top.
_BYTES_PER_PARAMETER = 8
_MAX_TABLES = MAX_OTHER


class Bundle:
    """An open bundle. Files are hashed on first use; use as a context manager or `close()` it.

    Attributes:
        path: folder of the bundle.
        manifest: the checked manifest.
        fingerprint: SHA-256 of `manifest.json`, which pins every other byte.
        on_progress: called while files are hashed and weights are read.
    """

    on_progress: Progress | None = None

    def __init__(self, path: Path, folder_fd: int, manifest: Manifest, fingerprint: str) -> None:
        self.path = path
        self.manifest = manifest
        self.fingerprint = fingerprint
        self._folder_fd = folder_fd
        self._checked: dict[str, int] = {}
        self._entries = {entry.path: entry for entry in manifest.files}

    def fd(self, path: str) -> int:
        """Return a descriptor of a listed file whose size and SHA-256 were checked through it.

        The bundle owns the descriptor. Raises BundleError when the file is not listed, is missing,
        has another size or was altered.
        """
        if path not in self._checked:
            entry = self._entries.get(path)
            if entry is None:
                raise BundleError(
                    "is not listed in the manifest", file=f"{self.path}/{path}", remedy=REMEDY
                )
            fd = open_inside(self._folder_fd, path, folder=str(self.path))
            try:
                with _readable(f"{self.path}/{path}"):
                    self._check(fd, entry)
            except BaseException:
                os.close(fd)
                raise
            self._checked[path] = fd
        return self._checked[path]

    def _check(self, fd: int, entry: FileEntry) -> None:
        file, size = f"{self.path}/{entry.path}", os.fstat(fd).st_size
        if size != entry.size:
            raise BundleError(
                f"has {size} bytes, the manifest says {entry.size}", file=file, remedy=REMEDY
            )
        if stamps.is_known(self.fingerprint, entry, fd):
            return
        if is_mostly_holes(fd, size):
            raise BundleError("is sparse: most of it was never written", file=file, remedy=REMEDY)
        if sha256(fd, entry.size, self.on_progress) != entry.sha256:
            raise BundleError(
                "does not match its SHA-256; it was altered or damaged", file=file, remedy=REMEDY
            )
        stamps.remember(self.fingerprint, entry, fd)

    @property
    def folder(self) -> Path:
        """Path of the opened folder, even if `path` now leads elsewhere. Valid until `close`."""
        opened = Path(f"/proc/self/fd/{self._folder_fd}")
        return opened if opened.is_dir() else self.path

    def read(self, path: str) -> bytes:
        """Return the whole content of a listed file, checked."""
        fd = self.fd(path)
        entry = self._entries[path]
        with _readable(f"{self.path}/{path}"):
            data = b"".join(blocks(fd, entry.size))
        # a stamp vouches for metadata only: check the bytes themselves
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise BundleError("changed while it was read", file=f"{self.path}/{path}")
        return data

    def verify(self) -> None:
        """Check every listed file now instead of on first use."""
        for entry in self.manifest.files:
            self.fd(entry.path)

    def close(self) -> None:
        """Close every descriptor."""
        for fd in self._checked.values():
            os.close(fd)
        self._checked.clear()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _readable(file: str | Path) -> Iterator[None]:
    """Turn disk errors into BundleError."""
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise BundleError(
            f"cannot be read: {reason}",
            file=file,
            remedy="check the disk, or copy it again",
        ) from problem


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle folder. Check its manifest, and that it holds exactly the listed files.

    Contents are checked on use. Raises BundleError, naming file and field, when the folder or the
    manifest is missing, the manifest is malformed or of an unknown version, a path leaves the
    folder, or files are missing or extra.
    """
    folder = Path(path)
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError) as problem:  # ValueError: a NUL in its name
        raise BundleError(
            f"is not a folder that can be opened: {getattr(problem, 'strerror', problem)}",
            file=folder,
            remedy=_suggestion(folder),
        ) from None
    try:
        with _readable(folder):
            raw = _read_manifest(folder_fd, folder)
            manifest = read_document(raw, folder / "manifest.json", Manifest, SCHEMA_VERSION, None)
            _check_sizes(folder, manifest)
            _check_listing(folder_fd, folder, manifest)
        return Bundle(folder, folder_fd, manifest, hashlib.sha256(raw).hexdigest())
    except BaseException:
        os.close(folder_fd)
        raise


def _suggestion(path: Path) -> str:
    """Suggest the folder that was meant, or how to export a bundle, from `path` if possible."""
    with contextlib.suppress(OSError, ValueError):
        if path.name == "manifest.json" and path.is_file():
            return f"give its folder: {path.parent}"
        if (path.suffix == ".gguf" and path.is_file()) or (path / "config.json").is_file():
            return f"it is a checkpoint; make a bundle of it: edge export {path} -o BUNDLE"
    return "make one with: edge export CHECKPOINT -o BUNDLE"


def _read_manifest(folder_fd: int, folder: Path) -> bytes:
    try:
        fd = open_inside(folder_fd, "manifest.json", folder=str(folder))
    except BundleError as problem:
        if "missing" in problem.message:
            raise BundleError(
                "not a bundle: manifest.json is missing", file=folder, remedy=_suggestion(folder)
            ) from None
        raise
    try:
        size = os.fstat(fd).st_size
        if size > MAX_MANIFEST:
            raise BundleError(
                f"has {size} bytes, at most {MAX_MANIFEST} allowed", file=folder / "manifest.json"
            )
        return b"".join(blocks(fd, size))
    finally:
        os.close(fd)


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse files that the model cannot need: hashing them could take hours."""
    from edge.tensors import parameters  # needs numpy, which may find no room before it is checked

    faults, others = Faults(), 0
    for entry in manifest.files:
        most = MAX_OTHER
        if entry.path == WEIGHT_FILE:
            most = _MAX_TABLES + _BYTES_PER_PARAMETER * parameters(manifest.model)
        else:
            others += entry.size
        if entry.size > most:
            faults.add(entry.path, f"has {entry.size} bytes, at most {most} allowed")
    if others > MAX_OTHERS:
        faults.add("files", f"besides weights have {others} bytes, at most {MAX_OTHERS} allowed")
    faults.refuse(BundleError, file=folder)


def _check_listing(folder_fd: int, folder: Path, manifest: Manifest) -> None:
    found = set(_walk(folder_fd, "")) - {"manifest.json"}
    listed = {entry.path for entry in manifest.files}
    missing, extra = sorted(listed - found), sorted(found - listed)
    surplus = f"holds files the manifest does not list: {some(extra)}"
    if missing:
        also = f"; {surplus}" if extra else ""
        raise BundleError(f"is missing {some(missing)}{also}", file=folder, remedy=REMEDY)
    if extra:
        raise BundleError(surplus, file=folder, remedy="move them away")


def _walk(folder_fd: int, prefix: str, depth: int = 0) -> Iterator[str]:
    """Yield the paths of everything below except folders; links are listed, never followed."""
    if depth > 8:
        raise BundleError("nests folders more than 8 deep", file=prefix)
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                child_fd = os.open(
                    entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder_fd
                )
                try:
                    yield from _walk(child_fd, f"{prefix}{entry.name}/", depth + 1)
                finally:
                    os.close(child_fd)
            else:
                yield prefix + entry.name
