"""Calibration text: the sequences of a file, and what is refused."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import ExportError
from edge.export.calibration.texts import (
    GREETINGS,
    CalibrationText,
    TextReader,
    TokenSource,
    checkpoint_reader,
    read_text,
)
from edge.export.checkpoint import open_checkpoint
from edge.text.byte import ByteTokenizer
from edge.text.template import ChatTemplate, Message
from tests.state_spaces_checkpoints import save_mambabyte
from tests.test_text_template import DEMO
from tests.text_samples import KINDS, tokenizer
from tests.transformers_checkpoints import save_mamba

BYTES = TextReader(ByteTokenizer())
TALK = [("user", "a robot walks"), ("assistant", "and then it stops")]


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(path: Path, *objects: Any) -> Path:
    return written(path, "".join(f"{json.dumps(value)}\n" for value in objects))


def talk(turns: list[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def strings(text: CalibrationText) -> list[str]:
    return [bytes(row.tolist()).decode() for row in text.sequences]


def numbers(count: int) -> str:
    """Return numbered lines of eight bytes each."""
    return "".join(f"{i:07}\n" for i in range(count))


def test_a_small_file_is_cut_end_to_end(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", numbers(10) + "rest")
    text = read_text(path, BYTES, 20, 16)
    assert strings(text) == [f"{i:07}\n{i + 1:07}\n" for i in range(0, 10, 2)]
    assert text.sequences.dtype == np.int64
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert text.record() == {
        "text": "a.txt", "sha256": digest, "sequences": 5, "sequences_asked": 20, "length": 16,
    }  # fmt: skip


def test_fewer_sequences_than_there_are_come_evenly_from_all_of_it(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", numbers(60))
    found = [int(s.split()[0]) for s in strings(read_text(path, BYTES, 4, 8))]
    assert found == [0, 15, 30, 45]


def test_a_large_file_is_read_where_its_sequences_are(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", numbers(100_000))
    text = read_text(path, BYTES, 10, 24)
    found = [[int(number) for number in s.split()] for s in strings(text)]
    assert [row[0] for row in found] == [i * 10_000 for i in range(10)]
    assert all(row == [row[0], row[0] + 1, row[0] + 2] for row in found)
    again = read_text(path, BYTES, 10, 24)
    np.testing.assert_array_equal(text.sequences, again.sequences)


def test_little_of_a_large_file_is_held_and_tokenized(tmp_path: Path) -> None:
    class Counting(ByteTokenizer):
        encoded = 0

        def encode(self, text: str) -> list[int]:
            self.encoded += len(text)
            return super().encode(text)

    path = written(tmp_path / "a.txt", numbers(1_000_000))
    counting = Counting()
    tracemalloc.start()
    read_text(path, TextReader(counting), 10, 24)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counting.encoded < 10 * 400 and peak < 4_000_000 < path.stat().st_size


@pytest.mark.parametrize("kind", KINDS)
def test_the_beginning_of_a_block_has_the_tokens_of_the_whole(kind: str, tmp_path: Path) -> None:
    """Only it is tokenized, where words behind it show that the rest changes nothing."""
    rng, alphabet = np.random.default_rng(0), "abcdeé 東,.\n\n  "
    drawn = "".join(rng.choice(list(alphabet), 30_000))
    content = drawn[:10_000] + "x" * 40_000 + drawn[10_000:] * 20
    path = written(tmp_path / "a.txt", content)
    reader = TextReader(tokenizer(kind))
    with path.open("rb") as file:
        source, used = TokenSource(file, path, reader), 0
        for start in range(0, len(content.encode()), 7001):
            whole = next(source.pieces(start))
            for wanted in (1, 16, 100):
                found = next(source.pieces(start, wanted))
                assert found[:wanted] == whole[:wanted]
                used += len(found) == wanted
    assert used > 100


@pytest.mark.parametrize("filler", ["é", "東"])
def test_text_without_spaces_is_cut_between_characters(filler: str, tmp_path: Path) -> None:
    content = ("x" + filler * 40_000).encode()
    path = written(tmp_path / "a.txt", content)
    whole = read_text(path, BYTES, 10_000, 12)
    assert bytes(whole.sequences.ravel().tolist()) == content[: whole.sequences.size]
    assert len(content) - whole.sequences.size < 12
    spread = read_text(path, BYTES, 3, 6)
    wide = filler.encode()
    assert [bytes(row.tolist())[: len(wide)] for row in spread.sequences[1:]] == [wide, wide]


def test_conversations_go_through_the_template(tmp_path: Path) -> None:
    spm = tokenizer("spm")
    template = ChatTemplate(DEMO, spm)
    path = jsonl(tmp_path / "a.jsonl", *[talk(TALK)] * 3)
    ids = template.encode([Message(*turn) for turn in TALK], add_generation_prompt=False)
    assert spm.special_ids.intersection(ids)
    text = read_text(path, TextReader(spm, template), 3, len(ids))
    assert text.sequences.tolist() == [ids] * 3


def test_without_a_template_a_conversation_is_its_turns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", talk(TALK))
    said = "User: a robot walks\n\nAssistant: and then it stops\n\n"
    assert strings(read_text(path, BYTES, 1, len(said))) == [said]


def test_objects_may_have_text(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "one "}, {"text": "two é"}, talk([("user", "3")]))
    joined = "one two éUser: 3\n\n"
    assert strings(read_text(path, BYTES, 1, len(joined.encode()))) == [joined]


def test_a_large_file_of_objects_is_read_at_whole_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *({"text": f"{i:07}\n"} for i in range(50_000)))
    found = [int(s.split()[0]) for s in strings(read_text(path, BYTES, 5, 16))]
    assert found == [0, 10_000, 20_000, 30_000, 40_000]


def test_a_text_begins_with_what_begins_one(tmp_path: Path) -> None:
    reader = TextReader(ByteTokenizer(bos=7, add_bos=True))
    path = jsonl(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "cd"})
    assert read_text(path, reader, 1, 6).sequences.tolist() == [[7, 97, 98, 7, 99, 100]]
    path = written(tmp_path / "a.txt", "ab\ncd")
    assert read_text(path, reader, 1, 6).sequences.tolist() == [[7, *b"ab\ncd"]]


def test_the_default_is_the_demonstration_models_greetings() -> None:
    text = read_text(None, BYTES, 8, 128)
    assert text.file == GREETINGS.name and text.sequences.shape == (8, 128)
    assert strings(text)[0].startswith("User: Hello, how are you?\n\nAssistant: I'm doing well")
    assert len({row.tobytes() for row in text.sequences}) == 8


def test_a_checkpoint_reads_with_its_own_tokenizer(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_mamba(tmp_path / "hf"))
    reader = checkpoint_reader(checkpoint, checkpoint.config)
    assert reader.template is None
    assert reader.tokenizer.decode(reader.document("a robot walks")) == "a robot walks"
    assert len(reader.document("a robot walks")) < len("a robot walks")
    checkpoint = open_checkpoint(save_mambabyte(tmp_path / "bytes"))
    assert checkpoint_reader(checkpoint, checkpoint.config).document("é") == [0xC3, 0xA9]


def test_text_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    def refused(path: Path, match: str) -> None:
        with pytest.raises(ExportError, match=match) as caught:
            read_text(path, BYTES, 4, 16)
        assert caught.value.field == "calibrate" and caught.value.file == str(path)
        assert caught.value.remedy

    refused(written(tmp_path / "a.txt", ""), "holds no text")
    refused(written(tmp_path / "b.jsonl", "\n\n"), "holds no text")
    refused(written(tmp_path / "c.txt", "15 bytes of it!"), "has 15 tokens, too few .* of 16")
    refused(jsonl(tmp_path / "d.jsonl", {"text": "short"}), "has 5 tokens, too few")
    refused(written(tmp_path / "e.jsonl", '{"text": "a"}\nno'), "line at byte 14 is not JSON")
    for value in ({"words": "a"}, [1], "text", {"messages": ["a"]}, {"messages": 3}):
        refused(jsonl(tmp_path / "f.jsonl", value), 'line at byte 0 has neither "messages"')
    refused(jsonl(tmp_path / "g.jsonl", {"text": "\ud800"}), "cannot be tokenized")
    refused(written(tmp_path / "h.jsonl", "[" * 100_000), "is not JSON")
    refused(tmp_path / "missing.txt", "cannot be read: No such file")
    refused(tmp_path, "cannot be read: Is a directory")
    with pytest.raises(ExportError, match="0 sequences of 16"):
        read_text(None, BYTES, 0, 16)


@pytest.mark.parametrize("at", [0, 5, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 700_001])
def test_the_first_byte_that_is_not_utf8_is_named(at: int, tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"x" * at + b"\xff" + b"x" * 700_000)
    with pytest.raises(ExportError, match=f"is not UTF-8 at byte {at} "):
        read_text(path, BYTES, 4, 16)


@pytest.mark.parametrize("at", [10, (1 << 18) - 1, (1 << 18) - 2])
def test_a_character_that_is_cut_off_is_named(at: int, tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"x" * at + "東".encode()[:2])
    with pytest.raises(ExportError, match=f"is not UTF-8 at byte {at} "):
        read_text(path, BYTES, 4, 16)
    path = written(tmp_path / "b.txt", b"x" * at + "東".encode()[:2] + b"x" * 400_000)
    with pytest.raises(ExportError, match=f"is not UTF-8 at byte {at} "):
        read_text(path, BYTES, 4, 16)
    whole = written(tmp_path / "c.txt", b"x" * at + "東".encode() + b"x" * 400_000)
    assert read_text(whole, BYTES, 4, 16).sequences.shape == (4, 16)


def test_a_large_file_without_tokens_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", "\n" * 2000)
    with pytest.raises(ExportError, match="has no 16 tokens in a row"):
        read_text(path, BYTES, 4, 16)
