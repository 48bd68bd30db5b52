"""Read a byte-level BPE tokenizer published as vocab.json and merges.txt, without tokenizer.json.

The two files say nothing about how a text is cut into words. The class named in
tokenizer_config.json does, as in transformers; without one, the model's type implies it. Added
tokens are in tokenizer_config.json, added_tokens.json and special_tokens_map.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from edge.errors import CheckpointError, Faults
from edge.export.checkpoint.bpe import (
    NAMED,
    AddedToken,
    Rebuilt,
    bpe_document,
    is_text,
    merged_pair,
)
from edge.export.checkpoint.fields import read_json
from edge.export.checkpoint.files import read_utf8
from edge.export.checkpoint.weights import check_pointer
from edge.text.tokenizer import MAX_PIECE

T = TypeVar("T")
VOCAB, MERGES = "vocab.json", "merges.txt"
SETTINGS, ADDED, SPECIAL = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
MAX_ID = (1 << 31) - 1
_END = "<|endoftext|>"
_BOTH = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
_LAST = {"eos_token": _END, "unk_token": _END, "pad_token": _END}
# class in transformers → name of how it cuts words, and the tokens it names by default
_CLASSES = {
    "GPT2Tokenizer": ("gpt-2", _BOTH),
    "CodeGenTokenizer": ("gpt-2", _BOTH),
    "GPTNeoXTokenizer": ("olmo", _BOTH),
    "Qwen2Tokenizer": ("qwen2", _LAST),
    "Qwen3_5Tokenizer": ("qwen35", _LAST),
}
# `model_type` in config.json → the class where tokenizer_config.json names none
_IMPLIED = {
    **dict.fromkeys(("gpt_neox", "mamba", "mamba2"), "GPTNeoXTokenizer"),
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"
    ),
}  # fmt: skip
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token",
          "mask_token")  # fmt: skip
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_REMEDY = (
    "download the tokenizer's files again, or give the original tokenizer.json with --tokenizer"
)


def read_vocab_merges(files: Mapping[str, Path], model_type: object) -> Rebuilt:
    """Return the tokenizer of a folder's files, by name; `model_type` is config.json's.

    Raises CheckpointError naming all that is missing, malformed or contradictory.
    """
    reader = _Reader(files)
    words, settings = reader.words(model_type)
    vocabulary = reader.vocabulary()
    merges = reader.merges(vocabulary)
    added = reader.added(vocabulary, settings)
    folder = next(iter(files.values())).parent
    reader.faults.refuse(CheckpointError, file=folder, remedy=_REMEDY)
    whole = vocabulary | {token.content: index for index, token in added.items()}
    return Rebuilt(bpe_document(NAMED[words], whole, merges, added), files[VOCAB], settings)


class _Reader:
    """Reads the files one after another and collects the faults of all."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.faults = Faults()
        self._files = files
        self._settings, self._added, self._special = (
            self._read(name, read_json) or {} for name in (SETTINGS, ADDED, SPECIAL)
        )

    def _read(self, name: str, read: Callable[[Path], T]) -> T | None:
        """Return the content of a file, or None without it or after noting why it is unreadable."""
        if name not in self._files:
            if name in (VOCAB, MERGES):
                other = MERGES if name == VOCAB else VOCAB
                self.faults.add(name, f"is missing beside {other}")
            return None
        try:
            check_pointer(self._files[name])
            return read(self._files[name])
        except CheckpointError as problem:
            self.faults.add(name, problem.message)
            return None

    def words(self, model_type: object) -> tuple[str, Mapping[str, Any]]:
        """Return the name of how words are cut, and all settings."""
        stated = self._settings.get("tokenizer_class")
        known = isinstance(model_type, str)
        name = stated or (_IMPLIED.get(str(model_type)) if known else None)
        kind = name.removesuffix("Fast") if isinstance(name, str) else None
        if kind not in _CLASSES:
            problem = "names no class" if stated is None else f"is {stated!r:.60}"
            self.faults.add(
                f"{SETTINGS} tokenizer_class",
                f"{problem}, so how words are cut is unknown; {', '.join(_CLASSES)} are read",
            )
            kind = "GPT2Tokenizer"
        if self._settings.get("add_prefix_space"):
            self.faults.add(
                f"{SETTINGS} add_prefix_space", "is set, and spaces before texts are not supported"
            )
        words, defaults = _CLASSES[kind]
        return words, {**defaults, **self._special, **self._settings}

    def vocabulary(self) -> dict[str, int]:
        pieces = self._read(VOCAB, read_json) or {}
        self.faults.count(VOCAB, _piece_problems(pieces))
        seen: dict[object, str] = {}
        self.faults.count(
            VOCAB,
            (
                f"gives the id {index!r:.20} to {seen[index]!r:.40} and {piece!r:.40}"
                for piece, index in pieces.items()
                if isinstance(index, int) and seen.setdefault(index, piece) != piece
            ),
        )
        return {piece: i for piece, i in pieces.items() if isinstance(i, int)}

    def merges(self, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
        text = self._read(MERGES, read_utf8) or ""
        # some of Unicode's line ends may be inside pieces
        lines = [line.rstrip("\r") for line in text.split("\n")]
        first = 1 if lines[0].startswith("#version") else 0
        numbered = [(n, line) for n, line in enumerate(lines[first:], first + 1) if line]
        pairs = [(n, line, merged_pair(line, vocabulary)) for n, line in numbered]
        if vocabulary:  # otherwise every line would be at fault
            self.faults.count(
                MERGES,
                (f"line {n} joins no pieces of {VOCAB}: {line!r:.60}" for n, line, pair in pairs
                 if pair is None),
            )  # fmt: skip
        return [pair for _, _, pair in pairs if pair is not None]

    def added(
        self, vocabulary: Mapping[str, int], settings: Mapping[str, Any]
    ) -> dict[int, AddedToken]:
        """Return the tokens that are not found by merges, by id in ascending order."""
        tokens = self._decoder()
        named, ids = self._named(settings), {t.content: i for i, t in tokens.items()}
        problems = []
        for text, index in self._added.items():
            if problem := _token_problem(text, index):
                problems.append(problem)
            elif ids.setdefault(text, index) != index:
                problems.append(f"gives {text!r:.40} the id {index}, {SETTINGS} {ids[text]}")
            elif (
                tokens.setdefault(index, named.get(text, AddedToken(text, special=False))).content
                != text
            ):
                problems.append(f"gives {text!r:.40} the id of {tokens[index].content!r:.40}")
        self.faults.count(ADDED, problems)
        for text, token in named.items():
            if text in vocabulary and text not in ids:
                tokens.setdefault(vocabulary[text], token)
        by_id = {index: piece for piece, index in vocabulary.items()}
        clashes = [
            (index, token.content, by_id.get(index))
            for index, token in tokens.items()
            if by_id.get(index, token.content) != token.content
            or vocabulary.get(token.content, index) != index
        ]
        self.faults.count(
            VOCAB,
            (
                f"has {piece!r:.40} as {i}, where {text!r:.40} was added"
                for i, text, piece in clashes
            ),
        )
        return dict(sorted(tokens.items()))

    def _decoder(self) -> dict[int, AddedToken]:
        """Return `added_tokens_decoder` of tokenizer_config.json."""
        field = f"{SETTINGS} added_tokens_decoder"
        stated = self._settings.get("added_tokens_decoder") or {}
        if not isinstance(stated, dict):
            self.faults.add(field, "is not an object of ids and tokens")
            return {}
        tokens: dict[int, AddedToken] = {}
        texts, problems = set(), []
        for key, value in stated.items():
            token = _token(value, special=False)
            index = int(key) if key.isascii() and key.isdecimal() and len(key) < 11 else None
            if token is None or index is None:
                problems.append(f"{key!r:.20} is {value!r:.40}, not a token with an id")
            elif problem := _token_problem(token.content, index):
                problems.append(problem)
            elif index in tokens or token.content in texts:
                problems.append(f"has {token.content!r:.40} or the id {index} twice")
            else:
                tokens[index] = token
                texts.add(token.content)
        self.faults.count(field, problems)
        return tokens

    def _named(self, settings: Mapping[str, Any]) -> dict[str, AddedToken]:
        """Return the special tokens that the settings name, by text."""
        stated = [(name, settings.get(name)) for name in _NAMES]
        for name in _LISTS:
            several = settings.get(name)
            if isinstance(several, dict):
                several = list(several.values())
            stated += (
                [(name, each) for each in several]
                if isinstance(several, list)
                else [(name, several)]
            )
        found = {}
        for name, each in stated:
            if (token := _token(each, special=True)) is not None:
                found[token.content] = token
            elif each is not None:
                self.faults.add(f"{SETTINGS} {name}", f"is {each!r:.40}, not a token")
        return found


def _piece_problems(pieces: Mapping[str, object]) -> Iterator[str]:
    for piece, index in pieces.items():
        if problem := _token_problem(piece, index):
            yield problem


def _token_problem(text: str, index: object) -> str | None:
    """Return what is wrong with a token and its id, or None."""
    if type(index) is not int or not 0 <= index <= MAX_ID:
        return f"gives {text!r:.40} the id {index!r:.20}"
    if not 0 < len(text) <= MAX_PIECE:
        return f"has a token of {len(text)} characters, 1 to {MAX_PIECE} allowed"
    return None if is_text(text) else f"has {text!r:.40}, which is not Unicode text"


def _token(stated: object, special: bool) -> AddedToken | None:
    """Return a token given as text, or as an object of text and flags; None for anything else."""
    if isinstance(stated, str):
        return AddedToken(stated, special=special)
    if not isinstance(stated, dict) or not isinstance(stated.get("content"), str):
        return None
    names = {field.name for field in fields(AddedToken)} - {"content"}
    flags = {name: stated[name] for name in names if isinstance(stated.get(name), bool)}
    return AddedToken(stated["content"], **({"special": special} | flags))
