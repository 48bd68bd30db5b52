"""Checkpoint files that would block, never end, or are not its own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from edge.errors import CheckpointError, EdgeError
from edge.export import text_files
from edge.export.checkpoint import open_checkpoint
from edge.export.checkpoint.checkpoint import TOKENIZER_FILES
from edge.export.checkpoint.gguf import GgufFile
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


@pytest.fixture
def alarm() -> Iterator[None]:
    """Fail a test that waits for a pipe's writer."""

    def over(*_: object) -> None:
        pytest.fail("it waits without an end")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("spoil", [pipe, device, dangling])
@pytest.mark.parametrize(
    "name",
    ["x.gguf", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "x.pt",
     "consolidated.safetensors"],
)  # fmt: skip
@pytest.mark.usefixtures("alarm")
def test_weight_files_are_regular(spoil: Callable[[Path], None], name: str, path: Path) -> None:
    (path / "model.safetensors").unlink()
    if name == "x.gguf":
        (path / "config.json").unlink()
    spoil(path / name)
    assert str(path) in str(refusal(path).file)
    if name == "x.gguf":  # named, or put in a file's place after it was found
        assert refusal(path / name).file == str(path / name)
        with pytest.raises(CheckpointError, match="cannot be read"):
            GgufFile(path / name)


def test_weights_that_may_not_be_mapped(path: Path) -> None:
    """A sparse file takes no disk, but as much address space as it has bytes."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [SPARSE], "data_offsets": [0, SPARSE]}})
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(8 + len(header) + SPARSE)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        assert "may not map" in refusal(path).message
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


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
