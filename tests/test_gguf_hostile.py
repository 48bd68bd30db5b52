"""GGUF files that were truncated, damaged or made hostile: refused by name, within bounds."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from edge.errors import CheckpointError, TokenizerError
from edge.export.checkpoint import open_checkpoint
from edge.export.checkpoint.gguf.tokenizer import GgufTokenizer
from edge.text.hf import HfTokenizer
from edge.text.spm import SentencePieceTokenizer
from tests.checkpoints import refusal
from tests.gguf_files import write_gguf
from tests.mutations import mutated
from tests.transformers_checkpoints import save_mamba


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    file = write_gguf(save_mamba(folder / "hf", num_hidden_layers=1), folder / "x.gguf")
    return file.read_bytes()


def try_reading(data: bytes, file: Path) -> CheckpointError | None:
    file.write_bytes(data)
    try:
        list(open_checkpoint(file).tensors())
    except CheckpointError as problem:
        return problem
    return None


def test_cut_anywhere(good: bytes, tmp_path: Path) -> None:
    """All of the last tensor is needed, and none of the padding after it."""
    file = tmp_path / "x.gguf"
    assert try_reading(good, file) is None
    head = good.index(b"blk.0.")
    for end in [*range(0, head, 311), *range(head, len(good) - 32, 997)]:
        problem = try_reading(good[:end], file)
        assert problem is not None and problem.file == str(file), end
        said = ("cut short", "claims", "ends at byte", "cannot be read")
        assert any(words in problem.message for words in said), problem


def test_mutations_are_read_or_refused(good: bytes, tmp_path: Path) -> None:
    rng, refused = random.Random(17), 0
    head = good.index(b"blk.0.") + 2000
    for _ in range(150):
        data = mutated(good[:head], rng) + good[head:]
        refused += try_reading(data, tmp_path / "x.gguf") is not None
    assert 20 < refused < 150


def spoilt(good: bytes, at: int, kind: str, value: int) -> bytes:
    packed = struct.pack(f"<{kind}", value)
    return good[:at] + packed + good[at + len(packed) :]


def value_at(good: bytes, key: bytes) -> int:
    """Return where the type of a key's value is stored."""
    return good.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)


@pytest.mark.parametrize("count", [1 << 20, 1 << 40, (1 << 64) - 1])
def test_counts_that_no_file_holds(count: int, good: bytes, tmp_path: Path) -> None:
    """Nothing is allocated for what a file only claims to hold."""
    tokens = value_at(good, b"tokenizer.ggml.tokens") + 8
    kinds = value_at(good, b"tokenizer.ggml.token_type") + 8
    text = value_at(good, b"tokenizer.ggml.pre") + 4
    tracemalloc.start()
    for at in (8, 16, tokens, kinds, text):  # tensors, keys, texts, numbers, a text's length
        problem = try_reading(spoilt(good, at, "Q", count), tmp_path / "x.gguf")
        assert problem is not None and problem.remedy == "download the file again", at
    assert tracemalloc.get_traced_memory()[1] < 20 * len(good)
    tracemalloc.stop()


def test_tensors_out_of_place(good: bytes, tmp_path: Path) -> None:
    info = good.index(b"blk.0.ssm_in.weight") + len(b"blk.0.ssm_in.weight")
    dims, kind, offset = info + 4, info + 20, info + 24
    cases = {
        "ends at byte": (offset, "Q", 1 << 50),
        "not a multiple of 32": (offset, "Q", 33),
        "unknown type 77": (kind, "I", 77),
        "not whole blocks of 32": (kind, "I", 8),
        "has the shape [96, 0]": (dims, "Q", 0),
        f"has the shape [96, {1 << 62}]": (dims, "Q", 1 << 62),
    }
    for message, (at, form, value) in cases.items():
        problem = try_reading(spoilt(good, at, form, value), tmp_path / "x.gguf")
        assert problem is not None and problem.field == "blk.0.ssm_in.weight", message
        assert message in problem.message
    problem = try_reading(spoilt(good, info, "I", 9), tmp_path / "x.gguf")
    assert problem is not None and "9 dimensions" in problem.message
    # integers are not weights
    problem = try_reading(spoilt(good, kind, "I", 26), tmp_path / "x.gguf")
    assert problem is not None and "not fp32, fp16 or bf16 (1)" in problem.message


def test_what_is_no_gguf(good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    cases = {
        "does not begin with GGUF": b"PK\x03\x04" + good[4:],
        "big-endian": good[:4] + struct.pack(">I", 3) + good[8:],
        "is of version 1": spoilt(good, 4, "I", 1),
        "cannot be read": b"",
    }
    for message, data in cases.items():
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(file)
    file.write_bytes(good)
    twice = good.replace(b"mamba.ssm.inner_size", b"mamba.ssm.state_size")
    assert "appears twice" in str(try_reading(twice, file))


def test_nan_is_found(good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(spoilt(good, len(good) - 64, "f", float("nan")))  # type: ignore[arg-type]
    assert "NaN or infinite" in refusal(file, read=True).message


# -- text ------------------------------------------------------------------------------------------

_BPE: dict[str, Any] = {
    "model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1],
    "merges": ["a b"], "bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 2,
}  # fmt: skip
_PIECES: dict[str, Any] = {
    "model": "llama", "tokens": ["<unk>", "<s>", "a"], "token_type": [2, 3, 1],
    "scores": [0.0, 0.0, -1.0], "bos_token_id": 1, "unknown_token_id": 0, "add_bos_token": True,
    "add_space_prefix": True, "remove_extra_whitespaces": False,
}  # fmt: skip
_ODD: tuple[Any, ...] = (
    0, 1, -1, 1 << 63, (1 << 64) - 1, 0.5, float("nan"), float("inf"), 1e300, "", "x", True, False,
    [], [0], ["a"], [[]], [1, 1, 1], [-1, 1, 1], [7, 1, 1], [1 << 63, 1, 1], [True, True, True],
    [1e300, 0.0, 0.0], [float("nan")] * 3, [float("-inf")] * 3, [(1 << 64) - 1] * 3,
    ["a", "a", "a"], ["", "", ""], ["\0", "\x1b]52;c;x\x07", "\u202e"], ["b a"], [" "], ["a  b"],
    ["a" * 100_000] * 3, ["zz zz"], ["a b"] * 1000,
)  # fmt: skip


@pytest.mark.parametrize("good", [_BPE, _PIECES], ids=["bpe", "pieces"])
def test_every_value_of_every_key_of_text(good: dict[str, Any], tmp_path: Path) -> None:
    """A tokenizer, or an error; a bundle made with the tokenizer is read or refused."""
    made = refused = 0
    for name in [*good, "scores", "merges", "pre", "chat_template"]:
        for value in _ODD:
            known = {f"tokenizer.ggml.{key}": said for key, said in (good | {name: value}).items()}
            known["tokenizer.chat_template"] = value if name == "chat_template" else None
            text = GgufTokenizer(tmp_path / "x.gguf", known, 3)
            with contextlib.suppress(CheckpointError):
                text.generation()
            files = text.write(tmp_path)
            if text.refused is not None:
                assert len(str(text.refused)) < 1000
                refused += 1
                continue
            with contextlib.suppress(TokenizerError):
                read = HfTokenizer if files[0].suffix == ".json" else SentencePieceTokenizer
                read(files[0].read_bytes()).encode("ab \0")
                made += 1
    assert made > 20 and refused > 50
    told = {"scores": [1e300, 0.0, 0.0], "token_type": [-1, 1, 1], "model": ["llama"], "pre": [0]}
    for name, value in told.items():
        known = {f"tokenizer.ggml.{key}": said for key, said in (good | {name: value}).items()}
        problem = GgufTokenizer(tmp_path / "x.gguf", known, 3).refused
        if name in good:
            assert problem is not None and problem.field == f"tokenizer.ggml.{name}"
