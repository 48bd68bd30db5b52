"""SentencePiece's normalizer is bounded as that of a `tokenizer.json`, and its errors are typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from edge.errors import InputError, TokenizerError
from edge.protobuf import BYTES, put
from edge.text.hf_checks import MAX_GROWN, MAX_STRING
from edge.text.spm import SentencePieceTokenizer
from tests.text_samples import spm_model


def growing(folder: Path, times: int) -> bytes:
    """Train a model whose normalizer turns each `a` into `times` characters."""
    rules = folder / f"{times}.tsv"
    rules.write_text("0061\t" + " ".join(["0078"] * times) + "\n")
    return spm_model(normalization_rule_tsv=str(rules))


def with_table(table: bytes) -> bytes:
    return spm_model() + put(3, BYTES, put(2, BYTES, table))


def test_tables_that_make_text_long_are_refused(tmp_path: Path) -> None:
    assert SentencePieceTokenizer(growing(tmp_path, MAX_STRING)).encode("a")
    for times in (MAX_STRING + 1, 20_000):
        with pytest.raises(TokenizerError, match=f"replaces a character by {times}"):
            SentencePieceTokenizer(growing(tmp_path, times))


@pytest.mark.parametrize(
    "table",
    [
        b"\0", b"\0\4\0\0", (1 << 31).to_bytes(4, "little") + b"\0" * 2048,
        (1023).to_bytes(4, "little") + b"\0" * 2048,
        (1024).to_bytes(4, "little") + b"\0" * 1024 + b"\xff\0",
        (1024).to_bytes(4, "little") + b"\0" * 1024 + b"a\0" + b"x" * 300 + b"\0",
    ],
)  # fmt: skip
def test_malformed_tables_are_refused(table: bytes) -> None:
    with pytest.raises(TokenizerError, match="precompiled_charsmap"):
        SentencePieceTokenizer(with_table(table))


def test_text_that_grows_too_long_is_refused(tmp_path: Path) -> None:
    tok = SentencePieceTokenizer(growing(tmp_path, 200))
    assert len(tok.encode("ab")) > 1
    for text in ("a" * (MAX_GROWN // 800 + 1), "b" * 100_000 + "a" * 30_000):
        with pytest.raises(InputError, match="can expand"):
            tok.encode(text)
    with pytest.raises(InputError, match="can expand"):
        SentencePieceTokenizer(spm_model()).encode("é" * (MAX_GROWN // 4 + 1))


def test_text_that_could_grow_but_does_not_is_encoded() -> None:
    tok = SentencePieceTokenizer(spm_model(normalization_rule_name="nmt_nfkc"))
    text = "the state " * 30_000
    assert len(text) * 18 * 4 > MAX_GROWN
    assert tok.decode(tok.encode(text)) == text


def test_samples_that_grow_too_long_are_refused(tmp_path: Path) -> None:
    """The library encodes them while it loads the file."""

    def with_samples(text: bytes) -> bytes:
        return growing(tmp_path, 200) + put(4, BYTES, put(1, BYTES, put(1, BYTES, text)))

    with pytest.raises(TokenizerError, match="samples of"):
        SentencePieceTokenizer(with_samples(b"a" * (MAX_GROWN // 200 + 1)))


@pytest.mark.parametrize("raised", [MemoryError, RuntimeError, OverflowError, BaseException])
def test_whatever_the_library_raises_is_typed(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    tok = SentencePieceTokenizer(spm_model())

    def failing(self: object, text: str) -> list[int]:
        raise raised("no")

    monkeypatch.setattr(SentencePieceProcessor, "encode", failing)
    with pytest.raises(TokenizerError, match="cannot encode a text"):
        tok.encode("a")
    raised = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        tok.encode("a")
