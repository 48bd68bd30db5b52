"""A tokenizer of the program's own in libedge: the ids and bytes of Python, which uses the same
libraries, for tokenizers that libedge does not read."""

from __future__ import annotations

import ctypes as c
import io
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edge.bundle import open_bundle
from edge.text.load import load_tokenizer
from tests import libedge
from tests.libedge import BUNDLE, INPUT, CBundle, CChoices, CModel, EdgeFault, OwnTokenizer
from tests.test_libedge import compiled, folder
from tests.test_libedge_text import PIECES, odd_text, same, with_file

pytestmark = compiled

SPACE = "\u2581"
Encode = Callable[[str, bool], list[int]]
ODD = ["", " ", "  two  spaces  ", "unknown \u4e2d\u0fff", SPACE, f" {SPACE} x", "<s> <unk> <0x41>",
       "\ufdfa", "\uff21\uff22 \u2460", "tab\there\n\nnew"]  # fmt: skip


def own(encode: Encode, pieces: list[bytes], specials: dict[str, int], strips: bool) -> Any:
    """Return a program's tokenizer, written in Python."""

    def encoded(_: Any, text: Any, size: int, first: int, out: Any, room: int, count: Any) -> int:
        ids = encode(c.string_at(text, size).decode(), bool(first))
        count[0] = len(ids)
        for i in range(len(ids) if len(ids) <= room else 0):
            out[i] = ids[i]
        return 0

    def told(_: Any, token: int, text: Any, size: Any) -> int:
        text[0], size[0] = pieces[token], len(pieces[token])
        return 0

    marks = (libedge.Special * len(specials))(
        *(libedge.Special(text.encode(), token) for text, token in specials.items())
    )
    return OwnTokenizer(
        encode=libedge.EncodeText(encoded), token=libedge.TokenText(told),
        special_count=len(specials), specials=marks, strips_space=strips,
    )  # fmt: skip


# -- SentencePiece unigram -------------------------------------------------------------------------


@cache
def unigram(**options: Any) -> bytes:
    rng, out = random.Random(4), io.BytesIO()
    words = [word.strip() for word in PIECES if word.isprintable() and word.strip()]
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(300)]
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=420, model_type="unigram",
        hard_vocab_limit=False, control_symbols=["<|user|>"], minloglevel=2, num_threads=1,
        **options,
    )  # fmt: skip
    return out.getvalue()


def piece_bytes(processor: Any, token: int) -> bytes:
    if processor.is_control(token):
        return b""
    if processor.is_unknown(token):
        return "\ufffd".encode()
    piece = processor.id_to_piece(token)
    if processor.is_byte(token):
        return bytes([int(piece[3:5], 16)])
    return bytes(piece.replace(SPACE, " ").encode())


def with_unigram(where: Path, **options: Any) -> CBundle:
    """Return a bundle with a unigram model, and its library's tokenizer."""
    data = unigram(**options)
    processor = SentencePieceProcessor(model_proto=data)
    count = processor.vocab_size()
    found = with_file(where, "tokenizer.model", data, count, eos=processor.eos_id())
    with pytest.raises(
        EdgeFault, match=r"a unigram model; give the bundle a tokenizer of your own"
    ):
        found.prompt("x")
    specials = {processor.id_to_piece(i): i for i in range(count) if processor.is_control(i)}
    pieces = [piece_bytes(processor, i) for i in range(count)]
    found.use_tokenizer(own(lambda text, _: processor.encode(text), pieces, specials, True))
    return found


@pytest.mark.parametrize("options", [{}, {"byte_fallback": True}, {"user_defined_symbols": "  "}])
def test_a_unigram_model(options: dict[str, Any], tmp_path: Path) -> None:
    found = with_unigram(tmp_path, **options)
    rng = random.Random(2)
    texts = [odd_text(rng, count) for count in (1, 2, 3, 5, 9, 30, 2000) for _ in range(10)]
    texts += [*ODD, "\ufdfa" * 30]  # as 18 characters each, it needs more room than bytes
    if "byte_fallback" in options:  # Python then tells the character from a space, the library not
        texts = [text.replace(SPACE, "_") for text in texts]
    same(found, tmp_path, texts, before=" ")


def test_typed_text_never_becomes_a_special_token(tmp_path: Path) -> None:
    found = with_unigram(tmp_path, byte_fallback=True)
    user = found.token("<|user|>")
    typed = found.prompt("Hello <|user|>")
    assert user not in typed and found.decode(typed) == b" Hello <|user|>"
    assert found.prompt(("<|user|>", True), "Hello <|user|>") == [user, *typed]
    assert found.decode([user, *typed]) == b" Hello <|user|>"
    assert "".join(found.stream([user, *typed])) == "Hello <|user|>"


def test_choices(tmp_path: Path) -> None:
    found = with_unigram(tmp_path, byte_fallback=True)
    texts = ["turn left", "turn right", "\u4e2d"]
    choices, model = CChoices(found, texts), CModel(tmp_path)
    for seed in range(4):
        said, _ = model.session().generate(
            found.prompt("Which way?"), sampling={"temperature": 1.0, "has_seed": 1, "seed": seed},
            constraint=choices.begin(),
        )  # fmt: skip
        assert "".join(found.stream(said)) == texts[choices.found]


# -- a tokenizer.json of pieces that write a space as ▁ --------------------------------------------


def test_pieces_with_a_space_before_the_first_word(tmp_path: Path) -> None:
    """`first` is told: text behind a special token gets no space."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = [SPACE, *"Helotrbdwni"]
    merges = [("H", "e"), ("l", "o"), (SPACE, "He"), ("l", "lo"), (SPACE, "w"), ("r", "o")]
    for piece in [*letters, *("".join(merge) for merge in merges)]:
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>"])
    count = tokenizer.get_vocab_size()
    data = tokenizer.to_str().encode()
    found = with_file(tmp_path, "tokenizer.json", data, count, eos=2)
    inner = Tokenizer.from_str(data.decode())
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    for each in (tokenizer, inner):
        each.encode_special_tokens = True
    with open_bundle(tmp_path) as opened:
        expected = load_tokenizer(opened)
    pieces = [expected.token_bytes(i) for i in range(count)]
    specials = {"<s>": 1, "</s>": 2, "<|user|>": count - 1}
    found.use_tokenizer(
        own(lambda text, first: (tokenizer if first else inner).encode(text).ids, pieces, specials,
            True)
    )  # fmt: skip
    rng = random.Random(7)
    same(found, tmp_path, ["Hello", "<|user|>Hello", "<|user|> Hello wor", *ODD,
                           *(odd_text(rng, 9) for _ in range(30))], before=" ")  # fmt: skip
    assert found.prompt("lo") != found.prompt(("<s>", True), "lo")[1:]


# -- faults ----------------------------------------------------------------------------------------


def plain(**changed: Any) -> OwnTokenizer:
    """Return a tokenizer of bytes for `demo`, with other fields."""
    made = own(
        lambda text, _: list(text.encode()), [bytes([i % 256]) for i in range(4096)], {}, False
    )
    for name, value in changed.items():
        setattr(made, name, value)
    return made  # type: ignore[no-any-return]


def marks(*given: tuple[bytes | None, int]) -> Any:
    array = (libedge.Special * len(given))(*(libedge.Special(*each) for each in given))
    return {"special_count": len(given), "specials": array}


def broken_token(result: int, text: bytes | None, size: int) -> Any:
    def told(_: Any, token: int, out: Any, count: Any) -> int:
        out[0], count[0] = text, size
        return result if token == 7 else 0

    return libedge.TokenText(told)


@pytest.mark.parametrize(
    ("changed", "field", "says"),
    [
        ({"encode": libedge.EncodeText()}, "tokenizer.encode", "NULL"),
        ({"token": libedge.TokenText()}, "tokenizer.token", "NULL"),
        ({"special_count": 2, "specials": None}, "tokenizer.specials", "NULL"),
        ({"size": 4}, "tokenizer", "a size that this version does not know"),
        (marks((b"<s>", 1), (None, 2)), "tokenizer.specials.1.text", "empty"),
        (marks((b"<s>", 1), (b"", 2)), "tokenizer.specials.1.text", "empty"),
        (marks((b"<s>", 4096)), "tokenizer.specials.0.id", "between 0 and 4095"),
        (marks((b"<s>", -1)), "tokenizer.specials.0.id", "between 0 and 4095"),
        (marks((b"x" * 2000, 1)), "tokenizer.specials", "too long"),
        ({"token": broken_token(3, b"x", 1)}, "tokenizer.token", "returned 3 for token 7"),
        ({"token": broken_token(0, b"x", 1 << 20)}, "tokenizer.token", "1048576 bytes for token 0"),
        ({"token": broken_token(0, None, 1)}, "tokenizer.token", "no bytes for token 0"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_not_usable(changed: dict[str, Any], field: str, says: str) -> None:
    found = CBundle(folder("demo"))
    with pytest.raises(EdgeFault, match=says) as caught:
        found.use_tokenizer(plain(**changed))
    assert caught.value.status == INPUT and caught.value.field == field
    assert found.prompt("Hello") == CBundle(folder("demo")).prompt("Hello")  # the bundle's own


def broken_encode(result: int, *ids: int, more: int = 0) -> Any:
    def encoded(_: Any, text: Any, size: int, first: int, out: Any, room: int, count: Any) -> int:
        count[0] = room + more if more else len(ids)
        for i, each in enumerate(ids):
            out[i] = each
        return result

    return libedge.EncodeText(encoded)


@pytest.mark.parametrize(
    ("encode", "field", "says"),
    [
        (broken_encode(5), "text", "tokenizer returned 5"),
        (broken_encode(0, 5, -1), "tokenizer.encode", "gave token -1, which is not between"),
        (broken_encode(0, 4096), "tokenizer.encode", "gave token 4096"),
        (broken_encode(0, more=1), "tokenizer.encode", "room for 11 tokens, after room for 10"),
        (broken_encode(0, more=1 << 40), "tokenizer.encode", "asked for room"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_fails(encode: Any, field: str, says: str) -> None:
    found = CBundle(folder("demo"))
    found.use_tokenizer(plain(encode=encode))
    with pytest.raises(EdgeFault, match=says) as caught:
        found.prompt("x")
    assert caught.value.status == INPUT and caught.value.field == field


def test_when_a_tokenizer_may_be_given(tmp_path: Path) -> None:
    found = CBundle(folder("demo"))
    found.prompt("Hello")
    with pytest.raises(EdgeFault, match="too late") as caught:
        found.use_tokenizer(plain())
    assert caught.value.status == INPUT
    found = CBundle(folder("demo"))
    found.use_tokenizer(plain())
    assert found.prompt("é") == list("é".encode())
    with pytest.raises(EdgeFault, match="too late"):
        found.use_tokenizer(plain())
    # the bundle's end of text is special, and a tokenizer that gives it for typed text is wrong
    end = found.info().eos[0]
    assert found.decode([end, 65]) == b"A"
    found = CBundle(folder("demo"))
    found.use_tokenizer(plain(encode=broken_encode(0, end)))
    with pytest.raises(EdgeFault, match="cannot encode"):
        found.prompt("x")


def test_reading_a_file_of_the_bundle(tmp_path: Path) -> None:
    found = with_file(tmp_path, "tokenizer.model", b"not a model", 300, eos=2)
    name = found.info().tokenizer_file.decode()
    assert found.read(name, 11) == (11, b"not a model")
    assert found.read(name, 10) == (11, bytes(10))
    with pytest.raises(EdgeFault, match="not listed") as caught:
        found.read("../tokenizer.model", 11)
    assert caught.value.status == BUNDLE
    (tmp_path / name).write_bytes(b"not a Model")
    for work in (lambda: found.read(name, 11), lambda: found.use_tokenizer(plain())):
        with pytest.raises(EdgeFault, match="altered") as caught:
            work()
        assert caught.value.status == BUNDLE
