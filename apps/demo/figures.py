"""What a model card says of a network: its perplexity on held-out text, and short conversations."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from edge.apps.demo.data import (
    Codec,
    Rows,
    conversation_pieces,
    document_pieces,
    pack,
    read_conversations,
    read_documents,
)
from edge.export.distill.loss import head_loss
from edge.export.network import Network, NetworkState

CONVERSATIONS = (
    ("Hello, how are you?", "What do you like to do for fun?", "Do you have any pets?", "Bye!"),
    ("Who are you?", "What can you do?"),
    ("Have you seen Star Wars?", "Who is your favorite character?"),
    ("I'd like to order a latte please.",),
    ("Tom has 3 apples and buys 5 more. How many apples does he have?",),
)
TOP_P = 0.9


@dataclass(frozen=True)
class Figures:
    """`bytes` counts the UTF-8 bytes of the text that the predicted tokens stand for."""

    nats: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    def summary(self) -> dict[str, float]:
        return asdict(self) | {
            "perplexity": round(self.perplexity, 4),
            "bits_per_byte": round(self.bits_per_byte, 4),
            "bytes_per_token": round(self.bytes / self.tokens, 3),
        }


def chat_rows(path: Path, codec: Codec, width: int, limit: int | None = None) -> tuple[Rows, int]:
    """Conversations as rows with every turn predicted, and the bytes of the turns' contents."""
    pieces, size = [], 0
    for index, conversation in enumerate(read_conversations(path)):
        if limit is not None and index == limit:
            break
        pieces += conversation_pieces(conversation, codec, width, everything=True)
        size += sum(len(content.encode()) for _, content in conversation.turns)
    return pack(pieces, width, codec.pad), size


def text_rows(path: Path, codec: Codec, width: int, limit: int | None = None) -> tuple[Rows, int]:
    """Documents as rows (the first `limit` characters of each), and their bytes."""
    documents = [d[:limit] for d in read_documents(path)]
    rows = pack(document_pieces(documents, codec, width), width, codec.pad)
    return rows, sum(len(d.encode()) for d in documents)


@torch.no_grad()
def measure(
    network: Network, rows: Rows, size: int, dtype: torch.dtype = torch.float32, batch: int = 8
) -> Figures:
    """Mean loss over the rows; each row starts from an empty state."""
    device = network.embedding.weight.device
    nats, tokens = 0.0, 0
    for start in range(0, len(rows.ids), batch):
        ids = torch.from_numpy(rows.ids[start : start + batch].astype(np.int64)).to(device)
        mask = torch.from_numpy(rows.mask[start : start + batch]).to(device)[:, 1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype != torch.float32):
            hidden, _ = network.hidden(ids[:, :-1])
        weight = (network.lm_head or network.embedding).weight
        nats += float(head_loss(hidden[mask], weight, ids[:, 1:][mask], dtype))
        tokens += int(mask.sum())
    return Figures(nats, tokens, size)


def choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """Greedy at temperature 0, else from the most likely tokens that hold TOP_P. logits [V]."""
    if temperature == 0:
        return int(logits.argmax())
    likely, ids = (logits / temperature).softmax(-1).sort(descending=True)
    likely = likely * (likely.cumsum(0) - likely < TOP_P)
    return int(ids[torch.multinomial(likely, 1, generator=generator)])


@torch.no_grad()
def converse(
    network: Network, codec: Codec, turns: tuple[str, ...], temperature: float, limit: int = 160
) -> list[tuple[str, str]]:
    """(what the user says, the network's answer) for each turn, in one running state."""
    device = network.embedding.weight.device
    generator = torch.Generator(device).manual_seed(0)
    state: NetworkState | None = None
    said = []
    for turn in turns:
        head, content = codec.turn("user", turn)
        ids = [*head, *content, *codec.turn("assistant", "")[0]]
        answer: list[int] = []
        while not codec.ended(answer) and len(answer) < limit:
            logits, state = network(torch.tensor([ids], device=device), state)
            answer.append(choose(logits[0, -1], temperature, generator))
            ids = answer[-1:]
        _, state = network(torch.tensor([ids], device=device), state)
        said.append((turn, codec.decode(answer).strip()))
    return said
