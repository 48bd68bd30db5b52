"""Weight files that must be refused: damaged, hostile, or not matching the config."""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import shutil
import tarfile
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from edge.errors import CheckpointError
from edge.export.checkpoint import open_checkpoint, torch_pickle
from edge.export.checkpoint.weights import TorchFile
from tests.checkpoints import edit_config, refusal, write_json
from tests.facts import facts, says
from tests.state_spaces_checkpoints import save_state_spaces
from tests.transformers_checkpoints import save_mamba

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one checkpoint of each file format, which must not be written to."""
    savers = {"mamba": save_mamba, "state-spaces": save_state_spaces}
    return {name: save(tmp_path_factory.mktemp(name)) for name, save in savers.items()}


@pytest.fixture
def path(saved: dict[str, Path], tmp_path: Path) -> Path:
    """Return a Mamba checkpoint to corrupt."""
    return Path(shutil.copytree(saved["mamba"], tmp_path / "mamba"))


def test_no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    assert "no weights" in str(refusal(path))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_safetensors_file_cut_short(keep: int, path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    error = refusal(path)
    assert "damaged or cut short" in str(error) and error.file == str(file)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -100])
@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
def test_a_torch_file_cut_short(keep: int, modern: bool, path: Path) -> None:
    file = as_torch_file(path, modern=modern)
    file.write_bytes(file.read_bytes()[:keep])
    error = refusal(path)
    assert error.file == str(file)


def as_torch_file(path: Path, *, modern: bool = True) -> Path:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    file = path / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=modern)
    return file


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(where=st.integers(0, 2000), flip=st.integers(1, 255), from_end=st.booleans())
@pytest.mark.parametrize("name", ["state-spaces", "mamba"])
def test_a_changed_byte_makes_no_other_error(
    name: str, where: int, flip: int, from_end: bool, saved: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    directory = Path(shutil.copytree(saved[name], tmp_path_factory.mktemp("flip") / name))
    [file] = [*directory.glob("*.bin"), *directory.glob("*.safetensors")]
    content = bytearray(file.read_bytes())
    content[-1 - where if from_end else where] ^= flip
    file.write_bytes(content)
    try:
        list(open_checkpoint(directory).tensors())
    except CheckpointError as error:
        assert error.file is not None and error.remedy


class Payload:
    """Creates a file when a careless loader unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("form", ["zip", "legacy", "plain pickle", "nested"])
def test_a_pickle_with_code_is_refused_and_not_run(form: str, path: Path) -> None:
    mark = path.parent / "executed"
    tensors: dict[str, Any] = dict(load_file(path / "model.safetensors"))
    (path / "model.safetensors").unlink()
    evil = tensors | {"backbone.norm_f.weight": Payload(mark)}
    file = path / "pytorch_model.bin"
    if form == "plain pickle":
        file.write_bytes(pickle.dumps(Payload(mark)))
    else:
        content = {"state_dict": [evil]} if form == "nested" else evil
        torch.save(content, file, _use_new_zipfile_serialization=form != "legacy")
    assert "nothing was run" in str(refusal(path, read=True))
    assert not mark.exists()
    # The payload works: a loader that trusts the file does run it.
    with contextlib.suppress(RuntimeError):
        torch.load(file, weights_only=False)
    assert mark.exists()


class Call:
    """Makes a loader call a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


# a few bytes each, which torch's weights-only loader makes into gigabytes, or into other objects
GROWING = {
    "bytearray": Call(bytearray, 1 << 33),
    "tensor": Call(torch.Tensor, 1 << 31),
    "storage": Call(torch.UntypedStorage, 1 << 33),
    "hex": Call(codecs.encode, Call(codecs.encode, "00", "hex"), "hex"),
    "size": Call(torch.Size, [1 << 40] * 4),
    "counter": Call(Counter, "aaaa"),
    "set": {1, 2},
    "number": np.float32(1),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", GROWING)
def test_what_named_tensors_do_not_need_is_not_given_to_torch(
    kind: str, modern: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: dict[str, Any] = dict(load_file(path / "model.safetensors"))
    file = as_torch_file(path)
    torch.save(tensors | {"extra": GROWING[kind]}, file, _use_new_zipfile_serialization=modern)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch reads it"))
    assert "nothing was run" in refusal(path).message


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
def test_what_a_file_holds_is_counted(
    modern: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of a pickle can make an empty dictionary."""
    tensors: dict[str, Any] = dict(load_file(path / "model.safetensors"))
    file = as_torch_file(path)
    torch.save(tensors | {"extra": [{} for _ in range(3000)]}, file,
               _use_new_zipfile_serialization=modern)  # fmt: skip
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch reads it"))
    for limit, most in (("MAX_OPERATIONS", 3000), ("MAX_CALLS", 20), ("MAX_PICKLE", 3000)):
        with monkeypatch.context() as patch:
            patch.setattr(torch_pickle, limit, most)
            assert says(refusal(path).message, "tensors", "more than")


def test_an_archive_has_each_name_once_and_no_hidden_pickle(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    file = as_torch_file(path)
    torch.save(tensors, file)
    good = file.read_bytes()
    evil = pickle.dumps(Call(bytearray, 1 << 33), 2)
    names = {"data.pkl": "a name twice", "DATA.PKL": "a name twice", "more.PKL": "nothing was run"}
    for name, told in names.items():
        file.write_bytes(good)
        with zipfile.ZipFile(file, "a") as archive, warnings.catch_warnings(action="ignore"):
            archive.writestr(f"{file.stem}/{name}", evil)
        assert told in refusal(path).message, name
    file.unlink()
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as packed:
        packed.addfile(tarfile.TarInfo("pickle"))
    assert "tar archive" in refusal(path).message


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "legacy"])
def test_what_torch_writes_for_tensors_is_read(modern: bool, path: Path) -> None:
    """Parameters, shared and strided tensors, every dtype, and a module's own state_dict."""
    shared, file = torch.randn(4, 6), path / "tensors.bin"
    stored: dict[str, Any] = {
        str(dtype): torch.ones(3, dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8,
                      torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
    }  # fmt: skip
    stored |= {"a": shared, "b": shared, "turned": shared.t(), "part": shared[1:3]}
    stored["parameter"] = torch.nn.Parameter(shared)
    for content in (stored, torch.nn.Linear(2, 3).state_dict()):
        torch.save(content, file, _use_new_zipfile_serialization=modern)
        read = TorchFile(file)
        assert read.entries.keys() == content.keys()
        assert all(torch.equal(read.read(name), content[name]) for name in content)


@pytest.mark.parametrize(
    ("content", "message"),
    [([1, 2], "holds a list"), ({"epoch": 3}, "holds a int"), ({1: torch.ones(1)}, "holds a"),
     (torch.ones(3), "holds a Tensor")],
    ids=["list", "number", "unnamed", "tensor"],
)  # fmt: skip
def test_a_torch_file_of_other_things(content: object, message: str, path: Path) -> None:
    torch.save(content, as_torch_file(path))
    assert message in str(refusal(path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite_are_counted(
    value: float, dtype: torch.dtype, path: Path
) -> None:
    file = path / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    name = "backbone.layers.1.mixer.in_proj.weight"
    tensors[name][3, 4] = tensors[name][5, 6] = value
    save_file(tensors, file)
    checkpoint = open_checkpoint(path)
    checkpoint.tensor("layers.0.in_proj.weight")
    with pytest.raises(CheckpointError, match=facts("2 of 2304", "NaN")) as caught:
        list(checkpoint.tensors())
    assert (caught.value.file, caught.value.field) == (str(file), name)


def test_everything_wrong_with_the_tensors_is_said_at_once(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["backbone.layers.0.mixer.D"], tensors["backbone.norm_f.weight"]
    tensors["backbone.layers.0.mixer.A_log"] = torch.ones(48, 9)
    tensors["backbone.layers.1.mixer.conv1d.weight"] = torch.ones(48, 4)
    tensors["backbone.layers.2.mixer.D"] = torch.ones(48)
    tensors["adapter"] = torch.ones(2, 3)
    tensors["backbone.layers.1.mixer.D"] = torch.ones(48, dtype=torch.int8)
    tensors["backbone.layers.1.norm.weight"] = torch.ones(24, dtype=torch.float64)
    save_file(tensors, file)
    text = str(refusal(path))
    for line in (
        "missing (2):\n  backbone.layers.0.mixer.D [48]\n  backbone.norm_f.weight [24]",
        "unused (2):",
        "adapter [2, 3]",
        "backbone.layers.2.mixer.D [48]",
        "wrong shape (2):",
        "backbone.layers.0.mixer.A_log: expected [48, 5], found [48, 9]",
        "backbone.layers.1.mixer.conv1d.weight: expected [48, 1, 4], found [48, 4]",
        "not fp32, fp16 or bf16 (2):",
        "backbone.layers.1.mixer.D: I8",
        "backbone.layers.1.norm.weight: F64",
    ):
        assert line in text, text


def test_a_tensor_under_two_spellings_is_not_chosen_between(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    twin = {"backbone.embedding.weight": tensors["backbone.embeddings.weight"] + 1}
    save_file(tensors | twin, file)
    assert "unused (1)" in str(refusal(path))


def test_an_untied_model_needs_its_head(path: Path) -> None:
    edit_config(path, tie_word_embeddings=False)
    assert "missing (1):\n  lm_head.weight [272, 24]" in str(refusal(path))


def test_a_weight_file_that_is_no_regular_file(path: Path) -> None:
    file = path / "model.safetensors"
    file.unlink()
    file.symlink_to(path / "gone")
    assert "not a regular file" in str(refusal(path))
    file.unlink()
    os.mkfifo(file)
    assert "not a regular file" in str(refusal(path))


def test_an_index_may_not_lead_out_of_the_directory(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent / "model.safetensors")
    outside = str(path.parent / "model.safetensors")
    for shard in ("../model.safetensors", outside, "a/b.safetensors", "..", "", "x\0y", "a\\b"):
        write_json(path / "model.safetensors.index.json", {"weight_map": {"a": shard}})
        error = refusal(path)
        assert error.file == str(path / "model.safetensors.index.json"), shard


@pytest.mark.parametrize(
    ("index", "field"),
    [({}, "weight_map"), ({"weight_map": []}, "weight_map"), ({"weight_map": {}}, "weight_map"),
     ({"weight_map": {"a": 1}}, "weight_map.a"),
     ({"weight_map": {"a": "gone.safetensors"}}, "weight_map")],
    ids=str,
)  # fmt: skip
def test_a_bad_index_is_named(index: object, field: str, path: Path) -> None:
    (path / "model.safetensors").unlink()
    write_json(path / "model.safetensors.index.json", index)
    error = refusal(path)
    assert (error.file, error.field) == (str(path / "model.safetensors.index.json"), field)


def test_a_tensor_that_its_shard_lacks_is_missing(path: Path) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    weight_map = dict.fromkeys(tensors, "part.safetensors")
    del tensors["backbone.norm_f.weight"]
    file.unlink()
    save_file(tensors, path / "part.safetensors")
    write_json(path / "model.safetensors.index.json", {"weight_map": weight_map})
    assert "backbone.norm_f.weight [24] (its index promises it)" in str(refusal(path))
