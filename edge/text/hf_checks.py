"""What a `tokenizer.json` may ask of Hugging Face's library, checked before it reads the file.

The library runs whatever a file says: chains of replacements that double a text, patterns that take
time without end, tables whose stated length is allocated. Steps are known here by name, and each
says how much longer it can make a text. Such files need not be hostile.

A pattern is run by Oniguruma, which backtracks. Patterns of tokenizers are alternatives of
characters, classes and their repeats; groups are not repeated. That is the form that is accepted,
so that no pattern takes exponential time.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_STEPS = 32  # normalizers and pre-tokenizers together
MAX_GROWTH = 1 << 10  # of a text, by all steps
MAX_STRING = 256  # characters of a string in a step
MAX_PATTERN = 4096
MAX_REPEAT = 64  # of one character, where a pattern says how often
MAX_UNBOUNDED = 4  # repeats without a bound in one alternative, one after the other
MODELS = ("BPE", "Unigram", "WordLevel")

Step = Mapping[str, Any]


def growth(config: Step) -> int:
    """How many times longer the steps of a tokenizer can make a text, at most.

    Raises ValueError naming the step that is unknown or asks for too much.
    """
    model = config["model"]
    if (kind := model.get("type", "BPE")) not in MODELS:
        raise ValueError(f"model: unknown kind {kind!r:.40}")
    if model.get("dropout"):
        raise ValueError("model: drops merges at random")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        _string(model.get(name) or "", f"model.{name}")
    steps = _flat(config.get("normalizer"), "normalizer", "normalizers")
    steps += _flat(config.get("pre_tokenizer"), "pre_tokenizer", "pretokenizers")
    if len(steps) > MAX_STEPS:
        raise ValueError(f"has {len(steps)} steps, at most {MAX_STEPS} are allowed")
    factor = 1
    for where, step in steps:
        kind = step.get("type")
        if not isinstance(kind, str) or (where, kind) not in _STEPS:
            raise ValueError(f"{where}: unknown kind {kind!r:.40}")
        try:
            factor *= _STEPS[where, kind](step)
        except ValueError as problem:
            raise ValueError(f"{where}: {kind}: {problem}") from None
        if factor > MAX_GROWTH:
            raise ValueError(f"{where}: the steps make a text more than {MAX_GROWTH} times longer")
    return factor


def _flat(step: Any, where: str, inner: str) -> list[tuple[str, Step]]:
    """The steps of nested sequences, in order, with whether they normalize or split."""
    found: list[tuple[str, Step]] = []
    waiting = [step]
    while waiting and len(found) <= MAX_STEPS:
        one = waiting.pop()
        if one is None:
            continue
        if not isinstance(one, Mapping):
            raise ValueError(f"{where}: is not a step")
        if one.get("type") != "Sequence":
            found.append((where, one))
            continue
        below = one.get(inner)
        if not isinstance(below, list) or len(below) > MAX_STEPS:
            raise ValueError(f"{where}: a sequence without steps, or of more than {MAX_STEPS}")
        waiting += reversed(below)
    return found


def _string(value: Any, name: str, least: int = 0) -> str:
    if not isinstance(value, str) or not least <= len(value) <= MAX_STRING:
        raise ValueError(f"{name}: is not a text of {least} to {MAX_STRING} characters")
    return value


def _constant(factor: int) -> Callable[[Step], int]:
    return lambda step: factor


def _pattern(step: Step) -> int:
    """Characters that a match has at least. Raises ValueError for what must not be searched."""
    pattern = step.get("pattern")
    if not isinstance(pattern, Mapping) or len(pattern) != 1:
        raise ValueError("pattern: is neither a text nor a regular expression")
    ((kind, text),) = pattern.items()
    if kind == "String":
        return len(_string(text, "pattern", 1))
    if kind != "Regex" or not isinstance(text, str) or not 1 <= len(text) <= MAX_PATTERN:
        raise ValueError(f"pattern: is not an expression of 1 to {MAX_PATTERN} characters")
    check_pattern(text)
    return 1


def _split(step: Step) -> int:
    _pattern(step)
    return 1


def _replace(step: Step) -> int:
    least, content = _pattern(step), _string(step.get("content"), "content")
    return max(1, -(-len(content) // least))


def _prepend(step: Step) -> int:
    # a text of one character is the one that grows most
    return 1 + len(_string(step.get("prepend"), "prepend"))


def _metaspace(step: Step) -> int:
    _string(step.get("replacement", "▁"), "replacement", 1)
    return 2


def _precompiled(step: Step) -> int:
    """A trie with its size in bytes before it, then what is put in place, each ended by a zero."""
    try:
        data = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("precompiled_charsmap: is not base64") from None
    if not data:
        return 1
    size = int.from_bytes(data[:4], "little")
    if len(data) < 4 or size % 4 or not 1024 <= size <= len(data) - 4:
        raise ValueError(
            f"precompiled_charsmap: states {size} bytes of trie, there are {len(data)} in all"
        )
    longest = max(map(len, data[4 + size :].split(b"\0")))
    if longest > MAX_STRING:
        raise ValueError(f"precompiled_charsmap: replaces a character by {longest} bytes")
    return max(1, longest)


# What normalizing can do to one character: NFKD makes 18 of U+FDFA (Unicode Standard Annex 15),
# a lower case has up to three. ByteLevel makes one or two bytes of each byte.
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

_GROUP = re.compile(r"\((?:\?(?:[im]*(?:-[im]+)?[:)]|=|!))?")
_NAMED_CLASS = re.compile(r"\[:\^?[a-z]{1,10}:\]")
_REPEAT = re.compile(r"[*+?][+?]?|\{([0-9]{0,9})(,?)([0-9]{0,9})\}[+?]?")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?\w+\}|x\{[0-9A-Fa-f]{1,6}\}|x[0-9A-Fa-f]{2}|[1-9kgKXRG]|.)", re.S
)


def check_pattern(pattern: str) -> None:
    """Raise ValueError unless a regular expression has the form of a tokenizer's."""
    at = 0
    unbounded = [0]  # in the alternative, of each group that is open
    after_group = True  # nothing that may be repeated comes before
    while at < len(pattern):
        character = pattern[at]
        if found := _REPEAT.match(pattern, at):
            most = _most(found)
            if after_group and found[0] != "?":
                raise ValueError(f"pattern: repeats a group at {at}")
            if most is None:
                unbounded[-1] += 1
            elif most > MAX_REPEAT:
                raise ValueError(f"pattern: repeats more than {MAX_REPEAT} times at {at}")
            if sum(unbounded) > MAX_UNBOUNDED:
                raise ValueError(f"pattern: more than {MAX_UNBOUNDED} repeats in one alternative")
            at, after_group = found.end(), True
            continue
        after_group = False
        if character == "(":
            opened = _GROUP.match(pattern, at)
            assert opened is not None
            if pattern.startswith("(?", at) and len(opened[0]) < 3:
                raise ValueError(f"pattern: a group of an unknown kind at {at}")
            at, after_group = opened.end(), True
            if not opened[0].endswith(")"):
                unbounded.append(0)
            continue
        if character == ")":
            if len(unbounded) == 1:
                raise ValueError(f"pattern: closes a group that is not open at {at}")
            # what is in a group counts for the alternative around it
            inner = unbounded.pop()
            unbounded[-1] += inner
            at, after_group = at + 1, True
            continue
        if character == "|":
            after_group = True
            if len(unbounded) == 1:  # those of alternatives in a group add up
                unbounded[0] = 0
        at = _one(pattern, at)


def _most(repeat: re.Match[str]) -> int | None:
    """How often something is matched at most; None without a bound."""
    if repeat[1] is None:
        return 1 if repeat[0][0] == "?" else None
    last = repeat[3] if repeat[2] else repeat[1]
    return int(last) if last else None


def _one(pattern: str, at: int) -> int:
    """Where the character, escape or class that begins at `at` ends."""
    if pattern[at] == "\\":
        found = _ESCAPE.match(pattern, at)
        if found is None or found[0][1:2] in "123456789kgKXRG":
            raise ValueError(f"pattern: an escape of an unknown kind at {at}")
        return found.end()
    if pattern[at] != "[":
        return at + 1
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif depth and pattern.startswith("[:", at):
            # where it is no name, Oniguruma takes the bracket for itself, or for another class
            if not (named := _NAMED_CLASS.match(pattern, at)):
                raise ValueError(f"pattern: a class of an unknown name at {at}")
            at = named.end() - 1
        elif pattern[at] == "[":
            depth += 1
            if pattern[at + 1 : at + 2] == "^":
                at += 1
            if pattern[at + 1 : at + 2] == "]":  # the first in a class is itself
                at += 1
        elif pattern[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise ValueError("pattern: a class without an end")
