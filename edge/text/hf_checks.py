"""Checks of a `tokenizer.json`'s steps, before Hugging Face's library reads the file.

The library runs whatever a file says: chains of replacements that double a text, patterns that
search without end, tables allocated by their stated length. Only steps known here by name are
allowed, and each states how much longer it can make a text. Such files need not be hostile.

The library takes up to 160 bytes of memory for each character that the steps make, and runs the
normalizer on added tokens while it loads them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edge.errors import InputError
from edge.text.hf_patterns import check_pattern
from edge.text.tokenizer import MAX_PIECE

MAX_STEPS = 32  # normalizers and pre-tokenizers together
# factor of a text's length, over all steps; NFKC, lower case and bytes make 216
MAX_GROWTH = 1 << 8
MAX_GROWN = 1 << 24  # characters of one text after all steps
MAX_ADDED = 1 << 22  # characters of all added tokens after the normalizer
MAX_STRING = 256  # characters of a string in a step
MODELS = ("BPE", "Unigram", "WordLevel")

Step = Mapping[str, Any]


class LengthGrowth(NamedTuple):
    """Maximum factors by which the normalizer, and then the pre-tokenizer, lengthen a text."""

    normalizer: int
    pre_tokenizer: int

    @property
    def safe_length(self) -> int:
        """Number of characters that cannot grow beyond MAX_GROWN."""
        return MAX_GROWN // (self.normalizer * self.pre_tokenizer)

    def check(self, text: str, normalize: Callable[[str], str] | None) -> None:
        """Raise InputError if `text` could grow beyond MAX_GROWN.

        Few texts come near the factors, so a long one is normalized in parts, to measure it.
        """
        size = len(text) * self.normalizer
        if size * self.pre_tokenizer > MAX_GROWN and normalize is not None:
            part, size = max(1, (1 << 20) // self.normalizer), 0
            for at in range(0, len(text), part):
                size += len(normalize(text[at : at + part]))
                if size * self.pre_tokenizer > MAX_GROWN:
                    break
        if size * self.pre_tokenizer > MAX_GROWN:
            raise InputError(
                f"has {len(text)} characters, which the tokenizer can expand to more than "
                f"{MAX_GROWN}",
                field="prompt",
                remedy="send a shorter text",
            )


def growth(config: Step) -> LengthGrowth:
    """Return how much longer a tokenizer's steps make a text.

    Raises ValueError naming the step that is unknown or exceeds a limit.
    """
    model = config["model"]
    if (kind := model.get("type", "BPE")) not in MODELS:
        raise ValueError(f"model: unknown kind {kind!r:.40}")
    if model.get("dropout"):
        raise ValueError("model: drops merges at random")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        _string(model.get(name) or "", f"model.{name}")
    steps = _flatten(config.get("normalizer"), "normalizer", "normalizers")
    steps += _flatten(config.get("pre_tokenizer"), "pre_tokenizer", "pretokenizers")
    if len(steps) > MAX_STEPS:
        raise ValueError(f"has {len(steps)} steps, at most {MAX_STEPS} are allowed")
    factors = {"normalizer": 1, "pre_tokenizer": 1}
    for where, step in steps:
        kind = step.get("type")
        if not isinstance(kind, str) or (where, kind) not in _STEPS:
            raise ValueError(f"{where}: unknown kind {kind!r:.40}")
        try:
            factors[where] *= _STEPS[where, kind](step)
        except ValueError as problem:
            raise ValueError(f"{where}: {kind}: {problem}") from None
        if factors["normalizer"] * factors["pre_tokenizer"] > MAX_GROWTH:
            raise ValueError(f"{where}: the steps make a text more than {MAX_GROWTH} times longer")
    found = LengthGrowth(**factors)
    _check_added(config.get("added_tokens"), found.normalizer)
    return found


def _check_added(tokens: Any, factor: int) -> None:
    """Check the added tokens, which the normalizer may make longer."""
    if tokens is None:
        return
    if not isinstance(tokens, list):
        raise ValueError("added_tokens: is not a list")
    size = 0
    for index, token in enumerate(tokens):
        text = token.get("content") if isinstance(token, Mapping) else None
        if not isinstance(text, str) or len(text) > MAX_PIECE:
            raise ValueError(
                f"added_tokens.{index}: has no content of at most {MAX_PIECE} characters"
            )
        size += len(text) * (1 if token.get("normalized") is False else factor)
        if size > MAX_ADDED:
            raise ValueError(f"added_tokens: have more than {MAX_ADDED} characters, normalized")


def _flatten(step: Any, where: str, inner: str) -> list[tuple[str, Step]]:
    """Return (`where`, step) for each step of nested sequences, in order."""
    steps: list[tuple[str, Step]] = []
    pending = [step]
    while pending and len(steps) <= MAX_STEPS:
        current = pending.pop()
        if current is None:
            continue
        if not isinstance(current, Mapping):
            raise ValueError(f"{where}: is not a step")
        if current.get("type") != "Sequence":
            steps.append((where, current))
            continue
        children = current.get(inner)
        if not isinstance(children, list) or len(children) > MAX_STEPS:
            raise ValueError(f"{where}: a sequence without steps, or of more than {MAX_STEPS}")
        pending += reversed(children)
    return steps


def _string(value: Any, name: str, minimum: int = 0) -> str:
    if not isinstance(value, str) or not minimum <= len(value) <= MAX_STRING:
        raise ValueError(f"{name}: is not a string of {minimum} to {MAX_STRING} characters")
    return value


def _constant(factor: int) -> Callable[[Step], int]:
    return lambda step: factor


def _pattern(step: Step) -> int:
    """Return the minimum length of a match. Raises ValueError for a pattern that is not allowed."""
    pattern = step.get("pattern")
    if not isinstance(pattern, Mapping) or len(pattern) != 1:
        raise ValueError("pattern: is neither a string nor a regular expression")
    ((kind, text),) = pattern.items()
    if kind == "String":
        return len(_string(text, "pattern", 1))
    if kind != "Regex" or not isinstance(text, str):
        raise ValueError("pattern: is neither a string nor a regular expression")
    check_pattern(text)
    return 1


def _split(step: Step) -> int:
    _pattern(step)
    return 1


def _replace(step: Step) -> int:
    minimum, content = _pattern(step), _string(step.get("content"), "content")
    return max(1, -(-len(content) // minimum))


def _prepend(step: Step) -> int:
    # a text of one character grows most
    return 1 + len(_string(step.get("prepend"), "prepend"))


def _metaspace(step: Step) -> int:
    _string(step.get("replacement", "▁"), "replacement", 1)
    return 2


def _precompiled(step: Step) -> int:
    try:
        data = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("precompiled_charsmap: is not base64") from None
    return charsmap_growth(data)


def charsmap_growth(data: bytes) -> int:
    """Return the length of the longest replacement in SentencePiece's table of characters.

    The table states the size of a trie in bytes; the trie and zero-terminated texts follow. Raises
    ValueError when it is malformed or a text is too long.
    """
    if not data:
        return 1
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or not 1024 <= size <= len(data) - 4:
        raise ValueError(
            f"precompiled_charsmap: states a trie of {size} bytes, in {len(data)} bytes of data"
        )
    try:
        texts = data[4 + size :].decode("utf-8").split("\0")
    except UnicodeDecodeError:
        raise ValueError("precompiled_charsmap: is not UTF-8") from None
    longest = max(map(len, texts))
    if longest > MAX_STRING:
        raise ValueError(f"precompiled_charsmap: replaces a character by {longest} characters")
    return max(1, longest)


# Growth of one character: NFKD turns U+FDFA into 18 characters (Unicode Standard Annex 15), and
# lower case has up to 3. ByteLevel turns each byte into one or two.
_STEPS: dict[tuple[str, Any], Callable[[Step], int]] = {
    **{("normalizer", kind): _constant(1) for kind in ("Strip", "StripAccents", "Nmt")},
    **{("normalizer", kind): _constant(3) for kind in ("NFC", "Lowercase")},
    ("normalizer", "NFD"): _constant(4),
    **{("normalizer", kind): _constant(18) for kind in ("NFKC", "NFKD")},
    ("normalizer", "BertNormalizer"): _constant(12),
    ("normalizer", "Replace"): _replace,
    ("normalizer", "Prepend"): _prepend,
    ("normalizer", "Precompiled"): _precompiled,
    ("normalizer", "ByteLevel"): _constant(2),
    **{
        ("pre_tokenizer", kind): _constant(1)
        for kind in (
            "Digits", "Whitespace", "WhitespaceSplit", "Punctuation", "BertPreTokenizer",
            "UnicodeScripts",
        )
    },
    # a space before every word, and up to two bytes for each
    ("pre_tokenizer", "ByteLevel"): _constant(4),
    ("pre_tokenizer", "Metaspace"): _metaspace,
    ("pre_tokenizer", "Split"): _split,
    ("pre_tokenizer", "CharDelimiterSplit"): _constant(1),
}  # fmt: skip
