"""Byte-level BPE as a tokenizer.json, from a vocabulary, its merges and how text is cut into words.

The patterns by name are from llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
# a Unicode mark belongs to the letter before it
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"^\s\p{L}", r"^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = _TAIL.replace(r"[\r\n]*", r"[\r\n/]*")
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_CASED_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)

Step = dict[str, Any]
_BYTE_LEVEL: Step = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
}  # fmt: skip
_BYTE_LEVEL_ONLY = _BYTE_LEVEL | {"use_regex": False}
_DIGITS: Step = {"type": "Digits", "individual_digits": True}


def _split_step(pattern: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def split_and_map(pattern: str) -> list[Step]:
    """Return the steps that cut a text where a pattern says, and write its bytes as characters."""
    return [_split_step(pattern), _BYTE_LEVEL_ONLY]


# Falcon and Falcon-Mamba split digits after the byte-level step, which turns some bytes into digits
_FALCON: list[Step] = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    _BYTE_LEVEL,
    _DIGITS | {"individual_digits": False},
    _split_step("[0-9][0-9][0-9]"),
]
# pre-tokenizers, each with its names
_PRE_TOKENIZERS: tuple[tuple[list[Step], str], ...] = (
    ([_BYTE_LEVEL], "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling"),
    ([_DIGITS, _BYTE_LEVEL], "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (
        split_and_map(_LLAMA3),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2 dbrx smaug-bpe",
    ),
    (split_and_map(_QWEN2), "qwen2 deepseek-r1-qwen stablelm2 megrez"),
    (split_and_map(_QWEN35), "qwen35"),
    (split_and_map(_TEKKEN), "tekken"),
    (split_and_map(_GPT4O), "gpt-4o llama4"),
    (_FALCON, "falcon"),
)
# words in the vocabulary are not split by merges, and texts begin with `bos`
WHOLE_WORDS = {
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "lfm2",
    "tekken",
}
_NORMALIZED = {"mpt", "olmo", "qwen2", "qwen35", "deepseek-r1-qwen"}  # apply Unicode NFC


@dataclass(frozen=True)
class Words:
    """How a text is cut into words before merges apply.

    Attributes:
        steps: pre-tokenizer steps of a tokenizer.json.
        whole: whether a word that is in the vocabulary is not split by merges.
        normalized: whether Unicode NFC applies first.
        begins: text of the special token that texts begin with, or None for none.
    """

    steps: Sequence[Step]
    whole: bool = False
    normalized: bool = False
    begins: str | None = None


NAMED = {
    name: Words(steps, name in WHOLE_WORDS, name in _NORMALIZED)
    for steps, names in _PRE_TOKENIZERS
    for name in names.split()
}


@dataclass(frozen=True)
class AddedToken:
    """A token that is found before the text around it is cut into words."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True


@dataclass(frozen=True)
class Rebuilt:
    """A tokenizer.json made of other files.

    Attributes:
        data: its content.
        file: the file that has the vocabulary.
        settings: what tokenizer_config.json says where it is silent, such as `eos_token`.
    """

    data: bytes
    file: Path
    settings: Mapping[str, Any]


def is_text(text: str) -> bool:
    """Return whether a string from JSON can be written as UTF-8: it may have half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def merged_pair(merge: str, vocabulary: Container[str]) -> tuple[str, str] | None:
    """Return the two pieces of `A B` if they and `AB` are in the vocabulary, else None."""
    # the first part has at least one character, which may itself be a space
    cut = merge.find(" ", 1)
    left, right = merge[:cut], merge[cut + 1 :]
    known = cut > 0 and bool(right) and all(p in vocabulary for p in (left, right, left + right))
    return (left, right) if known else None


def bpe_document(
    words: Words,
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    added: Mapping[int, AddedToken],
) -> bytes:
    """Return a tokenizer.json. `vocabulary` has the texts of the `added` tokens too, by id."""
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index} | asdict(token) for index, token in added.items()],
        "normalizer": {"type": "NFC"} if words.normalized else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words.steps},
        "post_processor": _beginning(words.begins, vocabulary),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": words.whole,
            "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip
    return json.dumps(document, ensure_ascii=False).encode()


def _beginning(token: str | None, vocabulary: Mapping[str, int]) -> Step | None:
    """Return the step that puts a special token before every text."""
    if token is None:
        return None
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    known = {"id": token, "ids": [vocabulary[token]], "tokens": [token]}
    return {
        "type": "TemplateProcessing", "single": [first, text], "pair": [first, text, second],
        "special_tokens": {token: known},
    }  # fmt: skip
