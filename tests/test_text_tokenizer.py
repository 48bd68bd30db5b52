"""Tokenizers: typed text never becomes a special token, and survives encoding and decoding."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast

from edge.errors import InputError, TokenizerError
from edge.text.byte import ByteTokenizer
from edge.text.hf import HfTokenizer
from edge.text.spm import SentencePieceTokenizer, read_model, rewrite_model
from edge.text.tokenizer import MAX_TEXT, Segment
from tests.text_samples import CORPUS, EXACT, KINDS, byte_level, spaced_bpe, spm_model, tokenizer

TEXTS = ["", " ", "a", " two  spaces ", "line\nline\r\n\ttab", "é 東京 🦾", "▁ and \x00 and \ufeff"]


@pytest.mark.parametrize("kind", KINDS)
def test_typed_special_tokens_are_plain_text(kind: str) -> None:
    tok = tokenizer(kind)
    assert (kind == "bytes") == (not tok.specials)
    for special in tok.specials:
        assert tok.encode(special.text, special=True) == [special.id]
        for text in [
            special.text,
            f"before {special.text}",
            f"{special.text}after",
            f"a{special.text}b{special.text}",
            special.text * 3,
            special.text[:2] + special.text + special.text[2:],
            f" {special.text} ",
        ]:
            ids = tok.encode(text)
            assert tok.special_ids.isdisjoint(ids)
            if kind in EXACT or "  " not in text:
                assert tok.decode(ids).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("kind", EXACT)
def test_text_comes_back_as_it_went_in(kind: str) -> None:
    tok = tokenizer(kind)
    for text in TEXTS + CORPUS + [special.text for special in tok.specials]:
        assert tok.decode(tok.encode(text)) == text


@pytest.mark.parametrize("kind", EXACT)
@given(data=st.data())
@settings(max_examples=60)
def test_any_text_round_trips_and_holds_no_special(kind: str, data: st.DataObject) -> None:
    tok = tokenizer(kind)
    spelled = [special.text for special in tok.specials] or ["<s>"]
    parts = st.one_of(st.text(max_size=8), st.sampled_from([*spelled, *CORPUS, "<|", "|>", "▁"]))
    text = "".join(data.draw(st.lists(parts, max_size=6)))
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert tok.special_ids.isdisjoint(ids)
    assert all(0 <= token < tok.vocab_size for token in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_only_whole_special_tokens_in_one_trusted_segment_count(kind: str) -> None:
    tok = tokenizer(kind)
    for special in tok.specials:
        for cut in range(1, len(special.text)):
            left, right = special.text[:cut], special.text[cut:]
            for first, second in [(True, False), (False, True), (False, False), (True, True)]:
                ids = tok.encode_segments([Segment(left, first), Segment(right, second)])
                assert tok.special_ids.isdisjoint(ids)
    ids = [tok.vocab_size - 1, 3]
    assert tok.encode_segments([Segment("ignored", tokens=tuple(ids))]) == ids


def test_template_text_and_typed_text_are_encoded_together() -> None:
    tok = tokenizer("spm")
    whole = tok.encode("the state of the model")
    for cut in range(len("the state of the model")):
        left, right = "the state of the model"[:cut], "the state of the model"[cut:]
        assert tok.encode_segments([Segment(left, True), Segment(right)]) == whole


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_encodes_and_decodes_as_the_library(kind: str, prefix: bool) -> None:
    model = spm_model(kind, add_dummy_prefix=prefix)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    tok = SentencePieceTokenizer(model)
    for text in [*CORPUS, "é 🦾 x\n\n y ", " lead"]:
        assert tok.encode(text) == library.encode(text)
        assert tok.decode(library.encode(text)) == library.decode(library.encode(text))
    assert tok.encode("a<|user|>b<|end|>", special=True)[-1] == library.piece_to_id("<|end|>")


@pytest.mark.parametrize("data", [byte_level(), spaced_bpe()], ids=["byte-level", "spaced"])
def test_tokenizer_json_encodes_and_decodes_as_the_library(data: bytes) -> None:
    library = Fast.from_str(data.decode())
    tok = HfTokenizer(data)
    for text in [*CORPUS[:3], "é 🦾 x\n\n y   z", " lead", "the past"]:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tok.encode(text) == ids
        assert tok.decode(ids) == library.decode(ids)
    for special in tok.specials:
        text = f"the {special.text}the past{special.text}"
        ids = library.encode(text, add_special_tokens=False).ids
        assert tok.encode(text, special=True) == ids
        assert tok.decode(ids) == library.decode(
            ids, skip_special_tokens=special.id in _hidden(tok)
        )


def test_plain_added_tokens_after_special_ones_keep_their_ids() -> None:
    """Special tokens are hidden from the library, which counts the ids of added tokens."""
    data = json.loads(byte_level())
    last = max(token["id"] for token in data["added_tokens"])
    data["added_tokens"] += [
        data["added_tokens"][-1] | {"id": last + 1 + i, "content": text, "special": special}
        for i, (text, special) in enumerate([("wow", False), ("<x>", True), ("oho", False)])
    ]
    library, tok = Fast.from_str(json.dumps(data)), HfTokenizer(json.dumps(data).encode())
    for text in ("a wow b", "oho", "oho wow"):
        assert tok.encode(text) == library.encode(text).ids
    assert tok.special_ids.isdisjoint(tok.encode("wow <x> <tool> oho"))


def _hidden(tok: HfTokenizer) -> set[int]:
    return {i for i in range(tok.vocab_size) if tok.token_bytes(i) == b""}


def test_white_space_that_a_model_defines_stays_text() -> None:
    assert 7 in tokenizer("spm").encode("a\nb")
    tok = tokenizer("byte-level")
    assert tok.id_to_piece(tok.encode("   ")[0]) == "   "


def test_special_tokens_are_hidden_in_answers_and_words_in_brackets_are_not() -> None:
    tok = tokenizer("byte-level")
    assert tok.decode(tok.encode("a<|end|><tool>b", special=True)) == "a<tool>b"
    assert tokenizer("spm").decode([4, 6, 1]) == ""


def test_a_text_that_continues_another_keeps_its_space() -> None:
    tok = tokenizer("spm-prefix")
    ids = tok.encode("the")
    assert tok.decode(ids) == "the"
    assert tok.decode(ids, continued=True) == " the"
    # only the first text gets the space
    joined = tok.encode_segments([Segment("", tokens=(6,)), Segment("the")])
    assert tok.decode(joined[1:], continued=True) == "the"
    tok = tokenizer("spaced")
    assert tok.encode("<s>the", special=True)[1] == tok.encode_segments([Segment("the")])[1]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_refused(kind: str) -> None:
    tok = tokenizer(kind)
    with pytest.raises(InputError, match="not valid Unicode at character 2"):
        tok.encode("ab\ud800")
    with pytest.raises(InputError, match="characters"):
        tok.encode("a" * (MAX_TEXT + 1))
    with pytest.raises(InputError, match="string"):
        tok.encode(b"bytes")  # type: ignore[arg-type]
    for token in (-1, tok.vocab_size, 1 << 63):
        with pytest.raises(InputError, match="token"):
            tok.decode([token])
        with pytest.raises(InputError, match="token"):
            tok.id_to_piece(token)


def test_holes_in_a_vocabulary_are_known() -> None:
    data = json.loads(byte_level())
    data["model"]["vocab"]["zzz"] = 400
    tok = HfTokenizer(json.dumps(data).encode())
    assert tok.vocab_size == 401
    assert 399 in tok.unassigned and 400 not in tok.unassigned
    assert tok.decode([399]) == ""
    data["model"]["vocab"]["zzz"] = data["model"]["vocab"]["t"]
    with pytest.raises(TokenizerError, match=r"is '.+' and '.+'"):
        HfTokenizer(json.dumps(data).encode())
    data["model"]["vocab"]["zzz"] = 1 << 30
    with pytest.raises(TokenizerError, match="ids up to"):
        HfTokenizer(json.dumps(data).encode())


def test_malformed_tokenizer_json_is_refused() -> None:
    good = byte_level()
    for cut in random.Random(1).sample(range(len(good) - 1), 40):
        with pytest.raises(TokenizerError):
            HfTokenizer(good[:cut])
    for bad in [b"", b"[]", b"{}", b"\xff", b'{"model": {}}', b"[" * 100_000, b'{"model": 1}']:
        with pytest.raises(TokenizerError):
            HfTokenizer(bad)
    data = json.loads(good)
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        with pytest.raises(TokenizerError, match="decoder"):
            HfTokenizer(json.dumps(data | {"decoder": decoder}).encode())
    data["model"]["vocab"]["x" * 100_000] = 340
    with pytest.raises(TokenizerError, match="100000 characters"):
        HfTokenizer(json.dumps(data).encode())


def test_malformed_sentencepiece_models_are_refused() -> None:
    good = spm_model()
    for bad in [
        b"",
        b"text",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\xff" * 100,
        b"\x0a\x05\x0a\x03\xff\xff\xff",
    ]:
        with pytest.raises(TokenizerError):
            SentencePieceTokenizer(bad)
    rng = random.Random(2)
    for _ in range(60):  # cuts and flips end in our own error or in a model, never in a crash
        damaged = bytearray(good[: rng.randrange(1, len(good))])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(TokenizerError):
            SentencePieceTokenizer(bytes(damaged)).encode("the state")
        with contextlib.suppress(ValueError):  # after another field pieces are read field by field
            assert read_model(damaged).pieces == read_model(b"\x12\x00" + damaged).pieces


def test_rewriting_a_sentencepiece_model_changes_what_was_asked() -> None:
    data = spm_model(add_dummy_prefix=True)
    before = read_model(data)
    after = read_model(
        rewrite_model(data, before.starts, control=frozenset({3}), no_dummy_prefix=True)
    )
    assert before.add_dummy_prefix and not after.add_dummy_prefix
    assert [p.text for p in before.pieces] == [p.text for p in after.pieces]
    assert [i for i in range(380) if before.pieces[i] != after.pieces[i]] == [3]


def test_fingerprints_tell_tokenizers_apart() -> None:
    tokenizers = [tokenizer(kind) for kind in KINDS if kind != "spm-unigram"]
    assert len({tok.fingerprint for tok in tokenizers}) == len(tokenizers)
    assert ByteTokenizer().fingerprint == tokenizer("bytes").fingerprint
