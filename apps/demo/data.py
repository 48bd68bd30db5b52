"""Conversations and documents as packed rows of token ids with a loss mask."""

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

# How often an epoch holds a conversation of each source; a fraction is a chance.
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
# Both sides are people talking: the user's words are worth learning too.
DIALOGUES = {"self_dialogue", "synthetic_persona_chat", "taskmaster4", "greetings"}
DOCUMENT_END = "<|endoftext|>"
FIRST_TEXT = 0.2  # share of the first epoch that is book and documentation text

Piece = tuple[list[int], list[bool]]


@dataclass(frozen=True)
class SourcedChat:
    """Turns as (role, content) pairs, and the collection they came from."""

    turns: tuple[tuple[str, str], ...]
    source: str


def read_conversations(path: Path) -> Iterator[SourcedChat]:
    """One conversation a line: {"messages": [{"role", "content"}, ...], "source"}."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            turns = tuple((m["role"], m["content"].strip()) for m in record["messages"])
            yield SourcedChat(turns, record.get("source", "greetings"))


def read_documents(path: Path) -> Iterator[str]:
    """Documents that end with a line `<|endoftext|>`."""
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
    """Turns text into ids, and turns of a conversation into ids with a loss mask."""

    pad: int

    def text(self, text: str) -> list[int]: ...
    def turn(self, role: str, content: str) -> tuple[list[int], list[int]]:
        """Ids of what comes before the content, and of the content with its end."""
        ...

    def ended(self, ids: list[int]) -> bool:
        """Whether an answer is over."""
        ...

    def decode(self, ids: list[int]) -> str: ...


class TokenCodec:
    """SentencePiece: <|role|> content <|end|>; `</s>` pads and parts conversations."""

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
    """UTF-8 bytes: "User: content\n\nAssistant: content\n\n"; byte 0 pads and parts conversations.

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
    """The conversation as pieces of at most `limit` ids, each beginning with a user's turn.

    True in the mask marks ids to be learned: the assistant's content, and the user's in dialogues
    between people or where `everything` is asked for.
    """
    talk = everything or conversation.source in DIALOGUES
    pieces: list[Piece] = []
    ids: list[int] = []
    mask: list[bool] = []
    cut = 0  # where the latest user's turn begins
    for role, content in conversation.turns:
        before, inside = codec.turn(role, content)
        if role == "user":
            cut = len(ids)
        ids += before + inside
        learn = talk or role == "assistant"
        mask += [False] * len(before) + [learn] * len(inside)
        while len(ids) > limit:
            at = cut or limit
            pieces.append((ids[:at][:limit], mask[:at][:limit]))
            ids, mask, cut = ids[at:], mask[at:], 0
    pieces.append((ids, mask))
    return [(i, m) for i, m in pieces if any(m[1:])]


def carelessly_typed(conversation: SourcedChat) -> list[SourcedChat]:
    """The conversation as it is, and with the user typing in lower case, without end marks."""
    ways: list[Callable[[str], str]] = [
        lambda text: text,
        str.lower,
        lambda text: text.rstrip(".!?"),
        lambda text: text.lower().rstrip(".!?"),
    ]
    variants = {
        tuple((role, way(text) if role == "user" else text) for role, text in conversation.turns)
        for way in ways
    }
    return [SourcedChat(turns, conversation.source) for turns in sorted(variants)]


def document_pieces(documents: Iterable[str], codec: Codec, limit: int) -> list[Piece]:
    """Documents cut into consecutive pieces of `limit` ids, all to be learned."""
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
    """ids [rows, width]; mask [rows, width], True where the id is to be predicted."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, part: slice) -> Batch:
        ids = torch.from_numpy(self.ids[part].astype(np.int64))
        return Batch(ids, torch.from_numpy(self.mask[part]))


@dataclass(frozen=True)
class Batch:
    """What one step learns: ids int64 and mask bool, [batch, width].

    `taught`: the teacher's hidden [n, E] before each id that mask[:, 1:] marks, where there is one.
    """

    ids: Tensor
    mask: Tensor
    taught: Tensor | None = None

    def to(self, device: str) -> Batch:
        taught = None if self.taught is None else self.taught.to(device)
        return Batch(self.ids.to(device), self.mask.to(device), taught)


def pack(pieces: Sequence[Piece], width: int, pad: int, open_rows: int = 64) -> Rows:
    """Best-fit packing: each piece whole into the fullest open row with room, parted by `pad`."""
    done: list[Piece] = []
    rows: list[Piece] = []
    for ids, mask in pieces:
        fits = [row for row in rows if len(row[0]) + 1 + len(ids) <= width]
        if fits:
            row = max(fits, key=lambda r: len(r[0]))
            row[0].extend([pad, *ids])
            row[1].extend([False, *mask])
            continue
        if len(rows) == open_rows:
            fullest = max(range(open_rows), key=lambda i: len(rows[i][0]))
            done.append(rows.pop(fullest))
        rows.append((list(ids), list(mask)))
    done += rows
    out_ids = np.full((len(done), width), pad, np.int32)
    out_mask = np.zeros((len(done), width), np.bool_)
    for index, (ids, mask) in enumerate(done):
        out_ids[index, : len(ids)] = ids
        out_mask[index, : len(mask)] = mask
    return Rows(out_ids, out_mask)


class TrainingData:
    """Epochs of packed rows, each a function of the seed and the epoch's number alone."""

    def __init__(
        self,
        data: Path,
        codec: Codec,
        width: int,
        seed: int = 0,
        talk_only: bool = False,
        greet: float = 1,
    ) -> None:
        """`talk_only`: dialogues between people alone, no instructions, books or documentation.
        `greet`: how much more often than in MIX the greetings come.
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
        """Random documents that make up FIRST_TEXT of the first epoch."""
        wanted = int(chat_ids * FIRST_TEXT / (1 - FIRST_TEXT))
        pieces: list[Piece] = []
        got = 0
        for document in rng.sample(self.documents, len(self.documents)):
            if got >= wanted:
                break
            start = rng.randrange(max(1, len(document) - 20_000))
            found = document_pieces([document[start : start + 20_000]], self.codec, self.width)
            got += sum(len(ids) for ids, _ in found)
            pieces += found
        return pieces
