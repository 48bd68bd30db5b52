"""Bundle files that would take hours to read, or fill the memory, are refused by their size."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from edge.bundle import open_bundle
from edge.bundle.manifest import MAX_MANIFEST
from edge.bundle.reader import MAX_OTHER
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


def test_a_long_manifest_is_not_parsed(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"[" + b'"",' * (MAX_MANIFEST // 3) + b'""]')
    began = time.process_time()
    with pytest.raises(BundleError, match="bytes, at most"):
        open_bundle(folder)
    assert time.process_time() - began < 1
