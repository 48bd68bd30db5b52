"""Steps of a `tokenizer.json` that would run forever, or out of memory, are refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast

from edge.errors import InputError, TokenizerError
from edge.text.hf import HfTokenizer
from edge.text.hf_checks import MAX_GROWN
from edge.text.hf_patterns import check_pattern
from edge.text.tokenizer import MAX_PIECE
from tests.text_samples import byte_level, spaced_bpe, unigram

PLAIN = byte_level()  # trained once, because equal merges come in any order
# those of the tokenizers of GPT-2, Llama 3, Qwen 2, GPT-4o, BLOOM, DeepSeek, Falcon and Tekken
KNOWN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[0-9][0-9][0-9]", r"\d", r"[一-龥぀-ゟ゠-ヿ]+", r"[[:alpha:]]+", r"\x{3000}+", r"\[\(\{",
    r"\p{N}*(?:\p{L}+x)",
)  # fmt: skip
ENDLESS = (
    "(a+)+$", "(a|a)*b", "(a|aa)+$", "(?:a*)*", "((a+)b?)+", "(a+){2,}", "(a{1,9}){1,9}", "a+*",
    r"(a)\1+", r"\k<x>", r"\g<0>", "(?R)", "(?<=a+)b", "(?<name>a)+", "(?>a+)+", "(?#x)", "(?x)a",
    "a*a*a*a*a*a*b", "(a*|a*)a*a*a*b", "a{1,100000}", "a{99}", "[a", "a)", "(?~a)", "[[:nope",
    "[[:" + "a" * 30 + ":](a+)+[]]", "", "a*a*[bc]", "a*[ab]*b*c", "a*b?a*c", r"\s+\n*$",
    "a*(?:a*)b",
    r"\p{Lu}*\p{L}*\d", "[一-龥]*[丁-丆]*x", "a{0,64}a{0,64}a{0,64}b", "a?" * 30 + "b",
    "a*(?=a*b)c",
    "A*(?i:a*)b", "(?=a*a*b)", "(a*|b*)a*c", "(a", "*a", "a|*", "a**", "(" * 40 + ")" * 40,
    "(?m).*\n*x", "(?i:" * 3 + "a?" * 30 + ")))b",
)  # fmt: skip


@pytest.mark.parametrize("pattern", KNOWN)
def test_patterns_of_known_tokenizers_pass(pattern: str) -> None:
    check_pattern(pattern)
    data = with_steps(pre_tokenizer=split(Regex=pattern))
    library = Fast.from_str(data.decode())
    assert HfTokenizer(data).encode("the state") == library.encode("the state").ids


@pytest.mark.parametrize("pattern", ENDLESS)
@pytest.mark.parametrize("where", ["normalizer", "pre_tokenizer"])
def test_patterns_that_take_for_ever_are_refused(pattern: str, where: str) -> None:
    step = split(Regex=pattern)
    if where == "normalizer":
        step = {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    with pytest.raises(TokenizerError, match="pattern"):
        HfTokenizer(with_steps(**{where: step}))


def split(**pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def with_steps(**steps: Any) -> bytes:
    return json.dumps(json.loads(PLAIN) | steps).encode()


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def chain(*steps: Any, inner: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", inner: list(steps)}


def charsmap(size: int, rest: bytes) -> dict[str, Any]:
    data = base64.b64encode(size.to_bytes(4, "little") + rest).decode()
    return {"type": "Precompiled", "precompiled_charsmap": data}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": chain(*[replace("a", "aa")] * 20)},
        {"normalizer": replace("a", "a" * 4000)},
        {"normalizer": replace("a", "a" * 65)},  # and up to four characters for each, as bytes
        {"normalizer": chain(*[chain(*[replace("e", "ee")] * 8)] * 2)},
        {"normalizer": chain(*[{"type": "Prepend", "prepend": "▁" * 200}] * 2)},
        {"normalizer": chain(*[{"type": "NFKC"}] * 40)},
        {"normalizer": replace("", "a")},
        {"normalizer": {"type": "Unheard"}},
        {"normalizer": {"type": ["NFC"]}},
        {"pre_tokenizer": {"type": {"ByteLevel": 1}}},
        {"normalizer": charsmap(1 << 31, b"\0" * 2048)},
        {"normalizer": charsmap(0xFFFFFFFC, b"\0" * 2048)},
        {"normalizer": charsmap(1024, b"\0" * 1024 + b"x" * 5000)},
        {"normalizer": charsmap(1023, b"\0" * 2048)},
        {"normalizer": charsmap(1024, b"\0" * 1024 + b"\xff\0")},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}},
        {"pre_tokenizer": chain(*[BYTES] * 6, inner="pretokenizers")},
        {"pre_tokenizer": split(String="")},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "", "prepend_scheme": "always"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"pre_tokenizer": [1]},
        {"pre_tokenizer": "ByteLevel"},
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a",
                   "continuing_subword_prefix": "", "max_input_chars_per_word": 1 << 60}},
    ],
    ids=lambda steps: json.dumps(steps)[:60],
)  # fmt: skip
def test_steps_that_cannot_be_run_are_refused(steps: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match=r"not supported|not a tokenizer"):
        HfTokenizer(with_steps(**steps))


def test_a_key_twice_is_refused() -> None:
    """The library would take one of the two."""
    plain = byte_level().decode()
    for key in ("normalizer", "model", "pre_tokenizer"):
        with pytest.raises(TokenizerError, match="twice"):
            HfTokenizer((plain[:-1] + f', "{key}": null}}').encode())


def added(*contents: Any, **more: Any) -> list[dict[str, Any]]:
    """Return added tokens, after those of PLAIN."""
    given = json.loads(PLAIN)
    first = 1 + max([*given["model"]["vocab"].values(), *(t["id"] for t in given["added_tokens"])])
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip"), False)
    return [
        *given["added_tokens"],
        *({"id": first + i, "content": text, "normalized": True} | flags | more
          for i, text in enumerate(contents)),
    ]  # fmt: skip


LONGER = replace("a", "a" * 64)
PIECES = [f"{i}" + "a" * (MAX_PIECE - 4) for i in range(17)]  # 17 * 4092 * 64 > MAX_ADDED


@pytest.mark.parametrize(
    "steps",
    [
        {"added_tokens": added("a" * 400_000)},
        {"added_tokens": added("a" * (MAX_PIECE + 1), special=True, normalized=False)},
        {"added_tokens": added(*PIECES), "normalizer": LONGER},
        {"added_tokens": added(*PIECES), "normalizer": chain(chain(replace("a", "a" * 8)), None,
                                                             replace("a", "a" * 8))},
        {"added_tokens": added(*PIECES, special=True), "normalizer": LONGER},
        {"added_tokens": added(*(f"{i}" + "é" * 4090 for i in range(1200)), normalized=False)},
        {"added_tokens": added(5)},
        {"added_tokens": added(None)},
        {"added_tokens": [[]]},
        {"added_tokens": {"a": "b"}},
        {"added_tokens": "a"},
    ],
    ids=lambda steps: json.dumps(steps)[-60:],
)  # fmt: skip
def test_added_tokens_are_checked_before_the_library_normalizes_them(steps: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match="not supported: added_tokens"):
        HfTokenizer(with_steps(**steps))


def test_added_tokens_of_a_usual_size_load() -> None:
    """Also thousands of them, if the normalizer makes text longer."""
    tokens = added(*(f"word{i}" for i in range(20_000)))
    tok = HfTokenizer(with_steps(added_tokens=tokens, normalizer={"type": "NFKC"}))
    assert tok.decode(tok.encode("word1999 word7")) == "word1999 word7"
    tok = HfTokenizer(with_steps(added_tokens=added(*PIECES[:16]), normalizer=LONGER))
    assert len(tok.encode("a")) == 64


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ({"normalizer": chain(*[replace("zz", "z" * 16)] * 2)}, "z" * (MAX_GROWN // 256 + 1)),
        ({"normalizer": LONGER}, "x" * 200_000 + "a" * 100_000),
        ({"normalizer": {"type": "NFKC"}}, "\ufdfa" * (MAX_GROWN // 72 + 1)),
        ({}, "a" * (MAX_GROWN // 4 + 1)),
        ({"normalizer": {"type": "Prepend", "prepend": "▁"}}, "a" * (MAX_GROWN // 4 + 1)),
    ],
)
def test_text_that_grows_too_long_is_refused(steps: dict[str, Any], text: str) -> None:
    """By the length that it reaches before it is split, and could reach then."""
    tok = HfTokenizer(with_steps(**steps))
    assert tok.encode(text[:10])
    with pytest.raises(InputError, match="can expand"):
        tok.encode(text)


def test_text_that_could_grow_but_does_not_is_encoded() -> None:
    """NFKC makes a few characters 18 times longer, and most texts no longer at all."""
    tok = HfTokenizer(with_steps(normalizer={"type": "NFKC"}))
    text = "the state " * 30_000
    assert len(text) * 18 * 4 > MAX_GROWN
    assert tok.decode(tok.encode(text)) == text


def unknown_less(data: bytes) -> bytes:
    """A model without a token for unknown characters."""
    changed = json.loads(data)
    changed["model"] |= {"unk_token": None, "unk_id": None, "byte_fallback": False}
    return json.dumps(changed).encode()


@pytest.mark.parametrize("data", [spaced_bpe(), unigram()], ids=["bpe", "unigram"])
def test_whatever_the_library_raises_is_typed(data: bytes) -> None:
    tok = HfTokenizer(unknown_less(data))
    for text in ("東京", "a\0b", "\U0010ffff", "▁"):
        try:
            tok.encode(text)
        except (TokenizerError, InputError) as problem:
            assert str(problem)


def test_a_panic_is_typed() -> None:
    """A panic in the library's Rust is not an Exception; this expression matches nothing."""
    tok = HfTokenizer(with_steps(pre_tokenizer=split(Regex="x*")))
    try:
        tok.encode("a state")
    except TokenizerError as problem:
        assert "cannot encode" in str(problem)
