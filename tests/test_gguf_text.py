"""Tokenizers rebuilt from GGUF metadata, against the tokenizers that the metadata came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35

from edge.errors import CheckpointError
from edge.export.checkpoint import open_checkpoint
from edge.export.checkpoint.gguf.tokenizer import GgufTokenizer
from edge.export.text_files import tokenizer_info
from edge.text.spm import SentencePieceTokenizer, read_model
from edge.text.tokenizer import Tokenizer as Ours
from tests.gguf_files import write_gguf
from tests.text_samples import CORPUS, spm_model
from tests.transformers_checkpoints import save_llama

TEXTS = [
    *CORPUS, "DON'T stop: it's 12345 o'clock\r\n\n\n  and   then…\tx", "ÀÉÎ a\u0301 ½ 東京タワー12",
    "camelCaseWords IN UPPER.\n\n", "", " ", "def f(x):\n        return x  # 3.14159\n",
    "สวัสดีครับ ผมชื่อ हिन्दी में, लिखा",
]  # fmt: skip
# as in the published tokenizer.json files
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def words_of(pre: str) -> Any:
    """Split a text as the original does."""
    if pre in ("gpt-2", "mpt"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre == "falcon":
        parts = [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
        return pre_tokenizers.Sequence(parts)
    pattern = {
        "llama-bpe": LLAMA3,
        "qwen2": QWEN2,
        "qwen35": QWEN35,
        "tekken": TEKKEN,
        "gpt-4o": GPT4O,
    }[pre]
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])


def original(pre: str) -> Tokenizer:
    fast = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    fast.pre_tokenizer = words_of(pre)
    if pre in ("mpt", "qwen2", "qwen35"):
        fast.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    fast.train_from_iterator(TEXTS * 3, trainer)
    return fast


def bpe_metadata(fast: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(fast.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


def rebuilt(metadata: dict[str, Any], folder: Path, size: int = 1000) -> GgufTokenizer:
    made = GgufTokenizer(Path("x.gguf"), metadata, size)
    made.write(folder)
    return made


@pytest.mark.parametrize(
    "pre", ["gpt-2", "mpt", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "falcon"]
)
def test_byte_level_bpe_reads_as_the_original(pre: str, tmp_path: Path) -> None:
    fast = original(pre)
    made = rebuilt(bpe_metadata(fast, pre), tmp_path)
    assert made.refused is None and made.generation() == {"eos_token_ids": [0]}
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, "a<|end|>b"]:
        assert again.encode(text).ids == fast.encode(text).ids, text
    assert again.get_vocab() == fast.get_vocab()


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_reads_as_the_original(prefix: bool, tmp_path: Path) -> None:
    data = spm_model(add_dummy_prefix=prefix)
    model = read_model(data)

    judge = sentencepiece.SentencePieceProcessor(model_proto=data)
    pieces = range(judge.get_piece_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.text for piece in model.pieces],
        "tokenizer.ggml.token_type": [piece.kind for piece in model.pieces],
        "tokenizer.ggml.scores": [np.float32(judge.get_score(i)).item() for i in pieces],
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    rebuilt(metadata, tmp_path)
    again = (tmp_path / "tokenizer.model").read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=again)
    ids: dict[str, Any] = {"bos": 1, "eos": (2,)}
    ours: list[Ours] = [SentencePieceTokenizer(bytes_, **ids) for bytes_ in (data, again)]
    for text in TEXTS:
        assert processor.encode(text) == judge.encode(text), text
        assert ours[1].encode(text) == ours[0].encode(text)


def test_special_tokens_come_from_the_metadata(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    file = write_gguf(
        save_llama(tmp_path / "hf"), tmp_path / "x.gguf", tokenizer__chat_template=template,
        tokenizer__ggml__add_bos_token=True, tokenizer__ggml__eot_token_id=5,
        tokenizer__ggml__padding_token_id=7,
    )  # fmt: skip
    checkpoint = open_checkpoint(file)
    expected = {"bos_token_id": 0, "eos_token_ids": [0, 5], "pad_token_id": 7}
    assert checkpoint.generation == expected
    info, _ = tokenizer_info(checkpoint, checkpoint.config)
    assert info.add_bos and info.eos == (0, 5) and info.vocab_size == 270, "padding is no token"


def test_an_end_that_only_the_template_names(tmp_path: Path) -> None:
    metadata = bpe_metadata(original("gpt-2"), "gpt-2")
    metadata["tokenizer.ggml.token_type"][4] = 3
    metadata["tokenizer.ggml.tokens"][4] = "<|im_end|>"
    assert rebuilt(metadata, tmp_path).generation() == {"eos_token_ids": [0]}
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}<|im_end|>"
    assert rebuilt(metadata, tmp_path).generation() == {"eos_token_ids": [0, 4]}


REFUSED: dict[str, tuple[str, Any, str]] = {
    "another model": ("model", "bert", "is 'bert'; gpt2, llama are known"),
    "an unknown cut": ("pre", "deepseek-coder", "is 'deepseek-coder', an unknown pre-tokenizer"),
    "no merges": ("merges", None, "is missing"),
    "merges of numbers": ("merges", [1, 2], "is not a list"),
    "a merge of nothing": ("merges", ["ab"], "entry 0 joins no tokens: 'ab'"),
    "a merge of strangers": ("merges", ["qq zz"], "entry 0 joins no tokens"),
    "too few kinds": ("token_type", [1, 2], "has 2 entries for"),
    "too many tokens": ("tokens", ["x"] * 2000, "has 2000 entries, the model 1000"),
    "scores for bpe": ("model", "llama", "is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_that_is_refused(case: str, tmp_path: Path) -> None:
    name, value, message = REFUSED[case]
    metadata = bpe_metadata(original("gpt-2"), "gpt-2") | {f"tokenizer.ggml.{name}": value}
    refused = rebuilt(metadata, tmp_path).refused
    assert refused is not None and message in refused.message and "--tokenizer" in str(refused)
    assert not (tmp_path / "tokenizer.json").exists()


def test_another_tokenizer_takes_its_place(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "hf")
    file = write_gguf(folder, tmp_path / "x.gguf", tokenizer__ggml__pre="unheard-of")
    checkpoint = open_checkpoint(file)
    with pytest.raises(CheckpointError, match="unheard-of"):
        tokenizer_info(checkpoint, checkpoint.config)
    info, _ = tokenizer_info(checkpoint, checkpoint.config, folder / "tokenizer.json")
    assert info.vocab_size == 270
