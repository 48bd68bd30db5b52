"""Pack conversations and documents into rows of token ids with a loss mask."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import sentencepiece as spm
import torch
from torch import Tensor

from edge.export.calibration.texts import GREETINGS

# Copies of each conversation in an epoch, by source; a fraction is a probability.
MIX = {
    "self_dialogue": 1.0,
    "synthetic_persona_chat": 2.0,
    "taskmaster4": 1.0,
    "gsm8k_chat": 0.35,
    "seed_tasks_chat": 0.5,
    "tldr": 0.05,
    "mbpp_chat": 0.0,
    "greetings": 10.0,
}
# Sources in which both sides are people, so that the user's turns are learned too.
DIALOGUES = {"self_dialogue", "synthetic_persona_chat", "taskmaster4", "greetings"}
DOCUMENT_END = "<|endoftext|>"
FIRST_TEXT = 0.2  # share of book and documentation text in the first epoch

Piece = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class SourcedChat:
    """A conversation as (role, content) pairs, with its source."""

    turns: tuple[tuple[str, str], ...]
    source: str


def read_conversations(path: Path) -> Iterator[SourcedChat]:
    """Read one conversation per line: {"messages": [{"role", "content"}, ...], "source"}."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            turns = tuple((m["role"], m["content"].strip()) for m in record["messages"])
            yield SourcedChat(turns, record.get("source", "greetings"))


def read_documents(path: Path) -> Iterator[str]:
    """Yield documents, each ended by a line `<|endoftext|>`."""
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.rstrip("\n") == DOCUMENT_END:
                yield "".join(lines)
                lines = []
            else:
                lines.append(line)
    if lines:
        yield "".join(lines)


class Codec(Protocol):
    """Encoder of text and of turns of a conversation, and decoder of answers."""

    pad: int

    def text(self, text: str) -> list[int]: ...
    def turn(self, role: str, content: str) -> tuple[list[int], list[int]]:
        """Return the ids before the content, and those of the content with its end mark."""
        ...

    def ended(self, ids: list[int]) -> bool:
        """Return whether an answer is complete."""
        ...

    def decode(self, ids: list[int]) -> str: ...


class TokenCodec:
    """SentencePiece: <|role|> content <|end|>; `</s>` pads and separates conversations."""

    def __init__(self, model: spm.SentencePieceProcessor) -> None:
        self.model = model
        self.pad = int(model.eos_id())
        self.end = int(model.piece_to_id("<|end|>"))

    def text(self, text: str) -> list[int]:
        return list(self.model.encode(text))

    def turn(self, role: str, content: str) -> tuple[list[int], list[int]]:
        head = int(self.model.piece_to_id(f"<|{role}|>"))
        return [head], [*self.text(content), self.end]

    def ended(self, ids: list[int]) -> bool:
        return ids[-1:] == [self.end]

    def decode(self, ids: list[int]) -> str:
        return str(self.model.decode([i for i in ids if i != self.end]))


class ByteCodec:
    """UTF-8 bytes: "User: content\n\nAssistant: content\n\n"; byte 0 pads and separates.

    A blank line ends a turn, so blank lines inside a turn become single line breaks.
    """

    pad = 0

    def text(self, text: str) -> list[int]:
        return list(text.encode())

    def turn(self, role: str, content: str) -> tuple[list[int], list[int]]:
        while "\n\n" in content:
            content = content.replace("\n\n", "\n")
        return self.text(f"{role.capitalize()}: "), self.text(f"{content}\n\n")

    def ended(self, ids: list[int]) -> bool:
        return bytes(ids[-2:]) == b"\n\n"

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def load_tokenizer(path: Path) -> spm.SentencePieceProcessor:
    return spm.SentencePieceProcessor(model_file=str(path))


def make_codec(tokenizer: Path | None) -> Codec:
    return ByteCodec() if tokenizer is None else TokenCodec(load_tokenizer(tokenizer))


def conversation_pieces(
    conversation: SourcedChat, codec: Codec, limit: int, everything: bool = False
) -> list[Piece]:
    """Split a conversation into pieces of at most `limit` ids, at users' turns where possible.

    The mask is True for ids to learn: the assistant's content, and the user's in dialogues between
    people or with `everything`.
    """
    both_sides = everything or conversation.source in DIALOGUES
    pieces: list[Piece] = []
    ids: list[int] = []
    mask: list[bool] = []
    turn_start = 0  # start of the latest user's turn
    for role, content in conversation.turns:
        before, body = codec.turn(role, content)
        if role == "user":
            turn_start = len(ids)
        ids += before + body
        learn = both_sides or role == "assistant"
        mask += [False] * len(before) + [learn] * len(body)
        while len(ids) > limit:
            end = turn_start or limit
            pieces.append((ids[:end][:limit], mask[:end][:limit]))
            ids, mask, turn_start = ids[end:], mask[end:], 0
    pieces.append((ids, mask))
    return [(i, m) for i, m in pieces if any(m[1:])]


def carelessly_typed(conversation: SourcedChat) -> list[SourcedChat]:
    """Return distinct variants: unchanged, user in lower case, without end punctuation, or both."""
    edits: list[Callable[[str], str]] = [
        lambda text: text,
        str.lower,
        lambda text: text.rstrip(".!?"),
        lambda text: text.lower().rstrip(".!?"),
    ]
    variants = {
        tuple((role, edit(text) if role == "user" else text) for role, text in conversation.turns)
        for edit in edits
    }
    return [SourcedChat(turns, conversation.source) for turns in sorted(variants)]


def document_pieces(documents: Iterable[str], codec: Codec, limit: int) -> list[Piece]:
    """Split documents into consecutive pieces of `limit` ids, all to be learned."""
    pieces: list[Piece] = []
    for document in documents:
        ids = codec.text(document)
        for start in range(0, len(ids), limit):
            part = ids[start : start + limit]
            if len(part) > 1:
                pieces.append((part, [True] * len(part)))
    return pieces


@dataclass(frozen=True)
class Rows:
    """Packed rows: ids [rows, width], and mask [rows, width], True for ids to predict."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, part: slice) -> Batch:
        ids = torch.from_numpy(self.ids[part].astype(np.int64))
        return Batch(ids, torch.from_numpy(self.mask[part]))


@dataclass(frozen=True)
class Batch:
    """Rows of one training step: ids int64 and mask bool, [batch, width].

    `taught`: the teacher's hidden states [n, E] before each id that mask[:, 1:] marks, or None.
    """

    ids: Tensor
    mask: Tensor
    taught: Tensor | None = None

    def to(self, device: str) -> Batch:
        taught = None if self.taught is None else self.taught.to(device)
        return Batch(self.ids.to(device), self.mask.to(device), taught)


def pack(pieces: Sequence[Piece], width: int, pad: int, open_rows: int = 64) -> Rows:
    """Pack by best fit: each piece goes whole into the fullest row with room. `pad` separates."""
    closed: list[Piece] = []
    rows: list[Piece] = []
    for ids, mask in pieces:
        candidates = [row for row in rows if len(row[0]) + 1 + len(ids) <= width]
        if candidates:
            row = max(candidates, key=lambda r: len(r[0]))
            row[0].extend([pad, *ids])
            row[1].extend([False, *mask])
            continue
        if len(rows) == open_rows:
            fullest = max(range(open_rows), key=lambda i: len(rows[i][0]))
            closed.append(rows.pop(fullest))
        rows.append((list(ids), list(mask)))
    closed += rows
    out_ids = np.full((len(closed), width), pad, np.int32)
    out_mask = np.zeros((len(closed), width), np.bool_)
    for index, (ids, mask) in enumerate(closed):
        out_ids[index, : len(ids)] = ids
        out_mask[index, : len(mask)] = mask
    return Rows(out_ids, out_mask)


class TrainingData:
    """Epochs of packed rows. An epoch depends on the seed and its number alone."""

    def __init__(
        self,
        data: Path,
        codec: Codec,
        width: int,
        seed: int = 0,
        talk_only: bool = False,
        greet: float = 1,
    ) -> None:
        """Read the training data.

        Args:
            talk_only: leave out books and documentation.
            greet: factor on the frequency of greetings in MIX.
        """
        self.codec, self.width, self.seed = codec, width, seed
        mix = MIX | {"greetings": MIX["greetings"] * greet}
        chats = list(read_conversations(data / "chat.train.jsonl"))
        for greeting in read_conversations(GREETINGS):
            chats += carelessly_typed(greeting)
        self.chats = [
            (mix.get(c.source, 1.0), pieces)
            for c in chats
            if mix.get(c.source, 1.0) > 0 and (pieces := conversation_pieces(c, codec, width))
        ]
        self.documents = [] if talk_only else list(read_documents(data / "pretrain.train.txt"))

    def epoch(self, number: int) -> Rows:
        rng = random.Random(f"{self.seed}/{number}")
        pieces: list[Piece] = []
        for copies, conversation in self.chats:
            whole = int(copies)
            for _ in range(whole + (rng.random() < copies - whole)):
                pieces += conversation
        if number == 0:
            pieces += self._text(rng, sum(len(ids) for ids, _ in pieces))
        rng.shuffle(pieces)
        rows = pack(pieces, self.width, self.codec.pad)
        order = np.random.default_rng([self.seed, number]).permutation(len(rows.ids))
        return Rows(rows.ids[order], rows.mask[order])

    def _text(self, rng: random.Random, chat_ids: int) -> list[Piece]:
        """Return pieces of random documents that make up FIRST_TEXT of the first epoch."""
        target = int(chat_ids * FIRST_TEXT / (1 - FIRST_TEXT))
        pieces: list[Piece] = []
        count = 0
        for document in rng.sample(self.documents, len(self.documents)):
            if count >= target:
                break
            start = rng.randrange(max(1, len(document) - 20_000))
            excerpt = document_pieces([document[start : start + 20_000]], self.codec, self.width)
            count += sum(len(ids) for ids, _ in excerpt)
            pieces += excerpt
        return pieces
