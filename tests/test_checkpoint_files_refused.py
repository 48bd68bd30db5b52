"""Checkpoint files that would block, never end, or are not its own."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edge.errors import CheckpointError, EdgeError
from edge.export import text_files
from edge.export.checkpoint import open_checkpoint
from edge.export.checkpoint.checkpoint import TOKENIZER_FILES
from tests.checkpoints import refusal
from tests.text_samples import byte_level
from tests.transformers_checkpoints import save_mamba

SPARSE = 20 << 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mamba(tmp_path_factory.mktemp("mamba"))


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    """Return a checkpoint to corrupt."""
    return Path(shutil.copytree(saved, tmp_path / "mamba"))


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def elsewhere(file: Path) -> None:
    file.symlink_to("/etc/passwd")


def above(file: Path) -> None:
    (file.parent.parent / "secret").write_text("{}")
    file.symlink_to("../secret")


def sparse(file: Path) -> None:
    with file.open("wb") as made:
        made.truncate(SPARSE)


def dangling(file: Path) -> None:
    file.symlink_to("nothing")


KINDS = (pipe, device, elsewhere, above, sparse, dangling)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.model", *TOKENIZER_FILES])
@pytest.mark.parametrize("spoil", KINDS)
def test_files_are_regular_bounded_and_the_checkpoints_own(
    spoil: Callable[[Path], None], name: str, path: Path
) -> None:
    (path / name).unlink(missing_ok=True)
    spoil(path / name)
    assert refusal(path).file == str(path / name)


def test_a_card_that_is_not_the_checkpoints_own_is_left_out(path: Path) -> None:
    (path / "README.md").symlink_to("/etc/passwd")
    checkpoint = open_checkpoint(path)
    assert checkpoint.card is None and text_files.licence(checkpoint) is None


def test_links_within_a_checkpoint_and_in_the_hubs_cache_are_followed(
    path: Path, tmp_path: Path
) -> None:
    (path / "config.json").rename(path / "moved.json")
    (path / "config.json").symlink_to("moved.json")
    open_checkpoint(path)
    (path / "config.json").unlink()
    (path / "moved.json").rename(path / "config.json")
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    path.rename(cache / "blobs")
    for file in (cache / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    open_checkpoint(snapshot)


def test_a_template_that_is_no_text(path: Path) -> None:
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(CheckpointError, match="UTF-8"):
        text_files.chat_template(open_checkpoint(path))


def test_a_tokenizer_is_checked_before_its_library_reads_it(path: Path) -> None:
    data = byte_level().decode().replace('"normalizer":null', '"normalizer":{"type":"Unheard"}')
    data = data.replace('"normalizer": null', '"normalizer": {"type": "Unheard"}')
    (path / "tokenizer.json").write_text(data)
    checkpoint = open_checkpoint(path)
    with pytest.raises(EdgeError, match="unknown kind"):
        text_files.tokenizer_info(checkpoint, checkpoint.config)


def torch_file(path: Path, **changed: torch.Tensor) -> Path:
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors") | changed
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    return path / "pytorch_model.bin"


def test_a_tensor_that_repeats_its_bytes_is_refused(path: Path) -> None:
    """45 KB that claim 206 GB."""
    torch_file(path, **{"backbone.embeddings.weight": torch.zeros(1).expand(1 << 18, 1 << 18)})
    assert "which repeat" in str(refusal(path))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_packed_archive_is_refused(method: int, path: Path) -> None:
    file = torch_file(path)
    packed = file.with_suffix(".packed")
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.writestr("archive/data/bomb", b"\0" * (64 << 20))
    packed.rename(file)
    assert "packed" in str(refusal(path))
