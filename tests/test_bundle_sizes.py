"""Bundle files that would take hours to read, or fill the memory, are refused by their size."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from edge import tensors
from edge.bundle import files, open_bundle
from edge.bundle.manifest import MAX_MANIFEST, Manifest
from edge.bundle.reader import MAX_OTHER, MAX_OTHERS
from edge.errors import BundleError
from edge.runtime.model import resolve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("demo-draft"), tmp_path / "bundle"))


@pytest.mark.parametrize("name", ["README.md", "graphs/ort.onnx", "chat_template.jinja"])
def test_a_sparse_file_is_not_hashed(name: str, folder: Path) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(200 << 30)
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["path"] == name:
            entry["size"] = 200 << 30
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=f"at most {MAX_OTHER}"):
        open_bundle(folder)


def needs_holes(folder: Path) -> None:
    """Skip a test on a file system that does not say where a file has holes."""
    with (folder / "hole").open("wb") as file:
        file.truncate(1 << 20)
    with (folder / "hole").open("rb") as file:
        try:
            holes = os.lseek(file.fileno(), 0, os.SEEK_DATA) > 0
        except OSError as problem:
            holes = problem.errno == errno.ENXIO
    (folder / "hole").unlink()
    if not holes:
        pytest.skip("this file system does not report holes")


def listed(folder: Path, sizes: dict[str, int]) -> None:
    """Give the bundle sparse files of these sizes, listed in its manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    known = {entry["path"]: entry for entry in manifest["files"]}
    for name, size in sizes.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("ab") as file:
            file.truncate(size)
        if name not in known:
            manifest["files"].append({"path": name, "sha256": "0" * 64})
            known[name] = manifest["files"][-1]
        known[name]["size"] = size
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"weights.bin": 200 << 30}, "at most"),
        ({f"x{i}.bin": 200 << 30 for i in range(3)}, f"at most {MAX_OTHER}"),
        ({"more/weights.bin": 1 << 30}, f"at most {MAX_OTHER}"),
        ({f"docs/x{i}": 256 << 20 for i in range(2000)}, f"at most {MAX_OTHERS}"),
        ({f"docs/x{i}.bin": 3 << 20 for i in range(400)}, f"at most {MAX_OTHERS}"),
    ],
    ids=["weights", "unused-weights", "weights-in-a-folder", "many", "many-small"],
)
def test_files_that_the_model_cannot_need_are_not_hashed(
    sizes: dict[str, int], says: str, folder: Path
) -> None:
    listed(folder, sizes)
    with pytest.raises(BundleError, match=says):
        open_bundle(folder)


def test_weights_of_a_model_that_is_said_to_be_large_are_not_hashed_if_sparse(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest may say that the model has a hundred billion parameters."""
    needs_holes(folder)
    monkeypatch.setattr(tensors, "parameters", lambda config: 100 << 30)
    for written in (0, 1 << 20, 64 << 20):
        with (folder / "weights.bin").open("r+b") as file:
            file.seek(1 << 30)
            file.write(b"1" * written)
        listed(folder, {"weights.bin": 200 << 30})
        with open_bundle(folder) as bundle, pytest.raises(BundleError, match="is sparse"):
            bundle.verify()


def test_holes_are_told_from_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a file may be holes; a disk that does not know of holes has none."""
    needs_holes(tmp_path)
    monkeypatch.setattr(files, "MAY_BE_HOLES", 1 << 20)
    path, piece, size = tmp_path / "file", 1 << 16, 1 << 24
    for share, holes in ((0, True), (4, True), (1, False), (12, False)):
        with path.open("wb") as file:
            file.truncate(size)
            for at in range(0, size, piece) if share else ():
                if share == 1 or at // piece % 16 < share:
                    file.seek(at)
                    file.write(b"1" * piece)
        with path.open("rb") as file:
            file.seek(3)
            assert files.is_mostly_holes(file.fileno(), size) == holes
            assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 0

    def unknown(fd: int, place: int, whence: int) -> int:
        if whence == os.SEEK_DATA:
            raise OSError(errno.EINVAL, "it knows of no holes")
        return 0

    monkeypatch.setattr(os, "lseek", unknown)
    assert not files.is_mostly_holes(-1, size)


def test_checking_many_files_takes_time_in_proportion(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is looked for among all others: 10,000 took 50 million comparisons."""
    listed(folder, dict.fromkeys([f"docs/{i}" for i in range(300)], 0))
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["size"] == 0:
            entry["sha256"] = hashlib.sha256(b"").hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(Manifest, "entry", lambda *_: pytest.fail("searches"))
    with open_bundle(folder) as bundle:
        bundle.verify()
        assert bundle.read("docs/299") == b""


def test_a_long_manifest_is_not_parsed(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"[" + b'"",' * (MAX_MANIFEST // 3) + b'""]')
    began = time.process_time()
    with pytest.raises(BundleError, match="bytes, at most"):
        open_bundle(folder)
    assert time.process_time() - began < 1
