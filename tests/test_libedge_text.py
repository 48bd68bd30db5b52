"""Text in and out of libedge: the ids and bytes of Python's tokenizers."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from edge.bundle import open_bundle
from edge.text.load import load_tokenizer
from edge.text.stream import StopMatcher, StreamDecoder
from tests.facts import facts
from tests.libedge import INPUT, CBundle, EdgeFault
from tests.malformed import resigned
from tests.mutations import mutated
from tests.test_libedge import compiled, folder

pytestmark = compiled

REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
PIECES = [
    "the ", "Hello", " don't", "'S", "'\u017f", "'Ll", "'RE", "n'v", "  ", " \n\n ", "\r\n", "\t",
    "123", "12345", "½²", "١٢٣", "\u00a0", "\u3000", "▁", "--", "...", "!?\n", "é", "ß", "日本",
    "👨‍👩‍👧", "\u200d", "\x00", "\x7f", "\x85", "\u2028", "<|im_end|>", "<|end|>", "<s>", "<unk>",
    "<0x41>", "   x", "МОСКВА ", "ไทย", "हिन्दी", "العربية", "\ufeff", "\U0001f600", "a\n\n b",
]  # fmt: skip


def odd_text(rng: random.Random, count: int) -> str:
    """Return words, odd characters and every kind of white space."""
    out: list[str] = []
    for _ in range(count):
        kind = rng.randrange(5)
        code = rng.randrange((128, 0x250, 0x3000, 0x20000, 0x110000)[kind])
        letter = chr(code) if not 0xD800 <= code < 0xE000 else " "
        out.append(letter if rng.random() < 0.5 else rng.choice(PIECES))
    return "".join(out)


def byte_level(regex: str | None = None, **options: Any) -> Callable[[Tokenizer], None]:
    """Return a model's pre-tokenizers: words by an expression, or digits and GPT-2's."""

    def into(tokenizer: Tokenizer) -> None:
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
        first: Any = pre_tokenizers.Digits(**options)
        if regex is not None:
            first = pre_tokenizers.Split(Regex(regex), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, last])

    return into


@cache
def trained_text(shape: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    SHAPES[shape](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(5)
    tokenizer.train_from_iterator(
        [odd_text(rng, 40) for _ in range(25)],
        trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|end|>", "<|im_end|>"], show_progress=False,
        ),
    )  # fmt: skip
    tokenizer.add_tokens(["  ", "   ", "<tool>", "Hello"])
    return tokenizer.to_str()


def trained(shape: str) -> dict[str, Any]:
    """Train a `tokenizer.json` of 600 pieces, some of which are added tokens."""
    return dict(json.loads(trained_text(shape)))


SHAPES: dict[str, Callable[[Tokenizer], None]] = {
    "smollm2": byte_level(individual_digits=True),
    "gpt2": byte_level(individual_digits=False),
    "llama3": byte_level(WORDS + "{1,3}" + REST),
    "qwen2": byte_level(WORDS + REST),
    "qwen35": byte_level(PRETOKENIZE_REGEX),
}


def with_tokenizer(where: Path, data: dict[str, Any]) -> CBundle:
    """Return a bundle with this `tokenizer.json`."""
    ids = [*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])]
    return with_file(where, "tokenizer.json", json.dumps(data).encode(), max(ids) + 1, eos=0)


def with_file(where: Path, name: str, content: bytes, vocab_size: int, eos: int) -> CBundle:
    """Return a bundle with this file of a tokenizer."""
    shutil.copytree(folder("demo-draft"), where, dirs_exist_ok=True)
    shutil.rmtree(where / "tokenizer")
    (where / "tokenizer").mkdir()
    path = f"tokenizer/{name}"
    (where / path).write_bytes(content)
    manifest = json.loads((where / "manifest.json").read_text())
    manifest["tokenizer"] |= {
        "kind": name if name.endswith("json") else "sentencepiece", "file": path,
        "vocab_size": vocab_size, "sha256": "0" * 64, "bos": None, "eos": [eos], "pad": None,
    }  # fmt: skip
    names = [entry for entry in manifest["files"] if not entry["path"].startswith("tokenizer/")]
    manifest["files"] = [*names, {"path": path, "size": 0, "sha256": ""}]
    (where / "manifest.json").write_text(json.dumps(manifest))
    resigned(where)
    return CBundle(where)


def same(found: CBundle, where: Path, texts: list[str], before: str = "") -> None:
    """Check that ids and bytes equal Python's, which drops `before` from the first word."""
    with open_bundle(where) as opened:
        expected = load_tokenizer(opened)
    for text in texts:
        ids = expected.encode(text)
        assert found.prompt(text) == ids, repr(text)
        decoded = found.decode(ids).decode(errors="replace")
        assert decoded.removeprefix(before) == expected.decode(ids), repr(text)
        trusted = expected.encode(text, special=True)
        assert found.prompt((text, True)) == trusted, repr(text)
        if len(ids) < 30:
            assert "".join(found.stream(ids)) == expected.decode(ids)


@pytest.mark.parametrize("name", ["demo", "demo-bytes"])
def test_the_demonstrations(name: str) -> None:
    rng = random.Random(len(name))
    texts = [odd_text(rng, count) for count in (1, 2, 3, 5, 9, 30) for _ in range(10)]
    same(CBundle(folder(name)), folder(name), [*texts, "", odd_text(rng, 3000)])


@pytest.mark.parametrize("shape", SHAPES)
def test_byte_level_bpe(shape: str, tmp_path: Path) -> None:
    """Also at every place where a class of characters begins or ends."""
    data = trained(shape)
    data["model"]["ignore_merges"] = shape == "llama3"
    found = with_tokenizer(tmp_path, data)
    rng = random.Random(len(shape))
    texts = [odd_text(rng, count) for count in (1, 2, 3, 5, 9, 30) for _ in range(10)]
    table = (Path(__file__).parent.parent / "runtime/libedge/src/unicode.inc").read_text()
    starts = [int(word, 16) >> 6 for word in table.replace("\n", "").strip(",").split(",")]
    borders = [chr(code) for start in starts for code in (start - 1, start) if code > 0
               and not 0xD800 <= code < 0xE000]  # fmt: skip
    same(found, tmp_path, [*texts, " ".join(borders), "a".join(borders)])


def with_added(data: dict[str, Any], *contents: str) -> dict[str, Any]:
    """Return a `tokenizer.json` with more added tokens: special in brackets, others plain."""
    first = 1 + max(*data["model"]["vocab"].values(), *(t["id"] for t in data["added_tokens"]))
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] += [
        {"id": first + i, "content": text, "special": text[0] == "<"} | kind
        for i, text in enumerate(contents)
    ]
    return data


def test_added_tokens_that_begin_with_each_other(tmp_path: Path) -> None:
    """The longest counts, at each place, whatever was nearly found."""
    rng = random.Random(8)
    texts = {"".join(rng.choices("ab", k=rng.randrange(2, 7))) for _ in range(30)}
    added = [f"{left}{text}" for text in sorted(texts) for left in ("<", "")]
    found = with_tokenizer(tmp_path, with_added(trained("gpt2"), *added))
    same(found, tmp_path, ["".join(rng.choices("<ab ", k=60)) for _ in range(60)])


def test_many_added_tokens_take_no_longer(tmp_path: Path) -> None:
    """The time grows with the text, not with the tokens times the text."""
    names = [f"{left}{i}" for i in range(30_000) for left in ("<x", "w")]
    found = with_tokenizer(tmp_path, with_added(trained("gpt2"), *names))
    began = time.process_time()
    for text in (("<" * 100_000, True), "w" * 100_000):
        assert found.prompt(text)
    assert time.process_time() - began < 5


def test_long_special_tokens_are_refused(tmp_path: Path) -> None:
    found = with_tokenizer(tmp_path, with_added(trained("gpt2"), "<" + "é" * 1000))
    with pytest.raises(EdgeFault, match=facts("special token", "too long")):
        found.prompt("x")


def test_normalized_texts(tmp_path: Path) -> None:
    """NFC changes nothing where no character combines; what may change is refused."""
    data = trained("gpt2") | {"normalizer": {"type": "NFC"}}
    found = with_tokenizer(tmp_path, data)
    same(found, tmp_path, ["naïve Straße 日本 한국 😀  x", "Hello   there"])
    for text in ("e\u0301", "\u2126", "\u1100\u1161", "\u0378"):
        with pytest.raises(EdgeFault, match="compose") as caught:
            found.prompt(text)
        assert caught.value.status == INPUT


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "Unigram": ("model", {"type": "Unigram"}),
    "byte_fallback": ("model", {"byte_fallback": True}),
    "dropout": ("model", {"dropout": 0.1}),
    "Metaspace": ("pre_tokenizer", {"type": "Metaspace"}),
    "add_prefix_space": ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True}),
    "NFKC": ("normalizer", {"type": "NFKC"}),
    "Split by a": (
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False},
    ),
    "WordPiece": ("decoder", {"type": "WordPiece"}),
    "zzz": ("vocab", {"zzz": 300}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_read_is_named(why: str, tmp_path: Path) -> None:
    data = trained("smollm2")
    key, change = REFUSED[why]
    if key == "vocab":
        data["model"]["vocab"] |= change
    else:
        data[key] = (data[key] or {}) | change
    if key == "pre_tokenizer":
        data[key] = change
    found = with_tokenizer(tmp_path, data)
    with pytest.raises(EdgeFault, match=why) as caught:
        found.prompt("x")
    assert caught.value.status == INPUT and caught.value.file.endswith("tokenizer.json")


def test_prompts_in_parts() -> None:
    """Typed text never becomes a special token."""
    found = CBundle(folder("demo"))
    user, end = found.token("<|user|>"), found.token("<|end|>")
    typed = found.prompt("Hi <|end|>")
    assert end not in typed and found.decode(typed) == b"Hi <|end|>"
    ids = found.prompt(("<|user|>Hi", True), " <|end|>", ("<|end|>", True))
    assert ids == [user, *typed, end] and found.decode(ids) == b"Hi <|end|>"
    with pytest.raises(EdgeFault, match="not a special token"):
        found.token("Hi")
    for ids in ([-1], [1 << 20]):
        with pytest.raises(EdgeFault, match="not between"):
            found.decode(ids)
        with pytest.raises(EdgeFault, match="not between"):
            found.stream(ids)


def test_streamed_text_is_that_of_python() -> None:
    """With bytes in any order, with and without stop texts."""
    found = CBundle(folder("demo-bytes"))
    with open_bundle(folder("demo-bytes")) as opened:
        tokenizer = load_tokenizer(opened)
    rng = random.Random(3)
    for case in range(150):
        text = odd_text(rng, 12).encode()
        ids = list(mutated(text, rng) if case % 2 else text)
        stops = [odd_text(rng, 1).replace("\0", "0") for _ in range(case % 4)]
        stream, matcher = StreamDecoder(tokenizer), StopMatcher(stops)
        expected = []
        for token in ids:
            expected.append(matcher.feed(stream.feed(token)))
            if matcher.stopped:
                break
        expected.append(matcher.feed(stream.finish()) + matcher.finish())
        assert found.stream(ids, matcher.stops) == expected
    for stops in (["x"] * 65, [""], ["x" * 5000]):
        with pytest.raises(EdgeFault) as caught:
            found.stream([1], stops)
        assert caught.value.field == "stop"


def test_a_byte_without_a_name(tmp_path: Path) -> None:
    """A zero ends a list of digits in C, but is not a digit."""
    shutil.copytree(folder("demo"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer/tokenizer.model"
    for name in (b"<0x\0\0>", b"<0x4\0>", b"<0x4g>"):
        file.write_bytes(
            (folder("demo") / "tokenizer/tokenizer.model").read_bytes().replace(b"<0x41>", name)
        )
        resigned(tmp_path)
        with pytest.raises(EdgeFault, match="does not name a byte"):
            CBundle(tmp_path).prompt("A")


@pytest.mark.parametrize("kind", ["json", "model"])
def test_mutated_tokenizers(kind: str, tmp_path: Path) -> None:
    """Refused, or read without harm; `make -C runtime/libedge asan` has many more."""
    if kind == "json":
        with_tokenizer(tmp_path / "it", trained("smollm2"))
    else:
        shutil.copytree(folder("demo"), tmp_path / "it")
    (file,) = (tmp_path / "it/tokenizer").glob(f"tokenizer.{kind}")
    before, refused = file.read_bytes(), 0
    for seed in range(12):
        file.write_bytes(mutated(before, random.Random(seed)))
        resigned(tmp_path / "it")
        try:
            CBundle(tmp_path / "it").prompt("Hello, robot")
        except EdgeFault as fault:
            assert fault.status == INPUT or "vocab_size" in fault.field, fault
            refused += 1
    assert refused > 2
