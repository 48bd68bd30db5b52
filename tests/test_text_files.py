"""A checkpoint's tokenizer files, in the forms in which they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from edge.bundle import TokenizerInfo
from edge.errors import CheckpointError, EdgeError, ExportError
from edge.export.checkpoint import open_checkpoint
from edge.export.exporter import export_checkpoint
from edge.export.text_files import chat_template, tokenizer_info
from edge.text.load import make_tokenizer
from edge.text.tokenizer import Tokenizer as Ours
from tests.checkpoints import write_json
from tests.text_samples import CORPUS, byte_level, spm_model
from tests.transformers_checkpoints import save_llama

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint of 400 tokens; its text files are up to the test."""
    path = save_llama(tmp_path / "checkpoint", vocab_size=400, bos_token_id=1, eos_token_id=2)
    for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "generation_config"):
        (path / f"{name}.json").unlink()
    return path


def read(path: Path) -> tuple[TokenizerInfo, Ours]:
    checkpoint = open_checkpoint(path)
    info, files = tokenizer_info(checkpoint, checkpoint.config)
    return info, make_tokenizer(info, files[0][0].read_bytes(), "x")


def add_slow(path: Path, **settings: Any) -> int:
    """Add a SentencePiece model as Llama 1 and Mistral have it; return its number of pieces."""
    data = spm_model(add_dummy_prefix=True, user_defined_symbols="\n", vocab_size=330)
    (path / "tokenizer.model").write_bytes(data)
    if settings:
        write_json(path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"} | settings)
    return read(path)[0].vocab_size


STATED = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


@pytest.mark.parametrize("settings", [{}, STATED])
def test_a_slow_tokenizer_reads_as_transformers_reads_it(
    settings: dict[str, Any], folder: Path
) -> None:
    add_slow(folder, **settings)
    info, ours = read(folder)
    assert info.kind == "sentencepiece" and info.add_bos
    if not settings:
        return  # transformers needs the class name
    judge = AutoTokenizer.from_pretrained(folder)
    # unlike there, typed text never becomes a control token here
    for text in [*(each for each in CORPUS if "<s>" not in each), "Hello  there\n\nyou"]:
        expected = judge(text).input_ids
        assert [ours.bos, *ours.encode(text)] == expected, text


def test_tokens_that_were_added_to_a_slow_tokenizer(folder: Path) -> None:
    size = add_slow(folder)
    added = {
        str(size): {"content": "<|im_end|>", "special": True},
        str(size + 2): {"content": "<tool>", "special": False},
        "0": {"content": "<unk>", "special": True},
    }  # fmt: skip
    add_slow(folder, added_tokens_decoder=added, add_bos_token=False)
    write_json(folder / "added_tokens.json", {"<|im_start|>": size + 1})
    info, ours = read(folder)
    assert (info.vocab_size, info.add_bos) == (size + 3, False)
    told = ours.encode("<|im_start|>the state<tool><|im_end|>", special=True)
    assert told[0] == size + 1 and told[-2:] == [size + 2, size]
    assert size not in ours.encode("<|im_end|>"), "typed text is no control token"
    assert "<|" not in ours.decode(told)
    added[str(1 << 30)] = {"content": "x"}
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": added})
    with pytest.raises(ExportError, match=r"token 1073741824 was added to it"):
        read(folder)


def add_fast(path: Path, post: Any = None, **settings: Any) -> None:
    source = save_llama(path.parent / "other")
    fast = Tokenizer.from_file(str(source / "tokenizer.json"))
    if post is not None:
        fast.post_processor = post
    fast.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", settings)


END = "<|endoftext|>"
BEGINS = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
ENDS = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 0)])
PLAIN = processors.ByteLevel(trim_offsets=True)


@pytest.mark.parametrize(
    ("post", "stated", "expected"),
    [
        (None, {}, False),
        (BEGINS, {}, True),
        (ENDS, {}, False),
        (processors.Sequence([PLAIN, BEGINS]), {}, True),
        (BEGINS, {"add_bos_token": False}, False),
        (None, {"add_bos_token": True}, True),
    ],
)
def test_texts_begin_as_the_tokenizer_says(
    post: Any, stated: dict[str, Any], expected: bool, folder: Path
) -> None:
    """Llama 3's files say it only in the post-processor."""
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"bos_token_id": 0, "eos_token_id": 0})
    add_fast(folder, post, bos_token=END, tokenizer_class="PreTrainedTokenizerFast", **stated)
    assert read(folder)[0].add_bos is expected


def test_git_lfs_pointers_are_named(folder: Path, tmp_path: Path) -> None:
    def refused() -> EdgeError:
        with pytest.raises(CheckpointError, match="git-lfs pointer") as caught:
            export_checkpoint(folder, tmp_path / "b", verify=False)
        assert caught.value.remedy == "run git lfs pull"
        return caught.value

    add_fast(folder)
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_text(POINTER)
    assert refused().file == str(folder / "tokenizer.json")
    (folder / "tokenizer.json").write_bytes(whole)
    (folder / "model.safetensors").write_text(POINTER)
    assert refused().file == str(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused()
    (folder / "config.json").unlink()
    (folder / "pytorch_model.bin").rename(folder / "model.gguf")
    refused()


def test_a_tokenizer_that_does_not_fit_is_named(folder: Path) -> None:
    add_slow(folder)
    write_json(folder / "added_tokens.json", {"<more>": 450})
    with pytest.raises(
        ExportError, match=r"checkpoint/tokenizer\.model: has 451 tokens, the model 400"
    ):
        read(folder)


def test_odd_fields_are_left_out_or_refused(folder: Path) -> None:
    """Invalid names, an id of five thousand digits, and an id shared by two pieces."""
    token = {"content": "<|x|>", "special": True}
    templates = [{"name": ["default"], "template": "no"}, {"name": "default", "template": "yes"}]
    settings = {"chat_template": templates, "added_tokens_decoder": {"9" * 5000: token}}
    assert add_slow(folder, **settings) == add_slow(folder)
    assert chat_template(open_checkpoint(folder)) == "yes"
    (folder / "tokenizer.model").unlink()
    data = json.loads(byte_level())
    data["model"]["vocab"]["zzz"] = data["model"]["vocab"]["t"]
    write_json(folder / "tokenizer.json", data)
    with pytest.raises(ExportError, match="one id to several"):
        read(folder)
