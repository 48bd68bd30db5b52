"""The model card (README.md) of a demonstration checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

SOURCES = """\
| part | repository | commit | licence |
|---|---|---|---|
| Classic books | mlschmitt/classic-books-markdown | 944882722e9a | public domain |
| digital.gov | GSA/digitalgov.gov | 4979583206d9 | CC0 1.0 |
| 18F | 18F/18f.gsa.gov | 0a55c75e6d9b | CC0 1.0 |
| plainlanguage.gov | GSA/plainlanguage.gov | 43230773bd7c | CC0 1.0 |
| The Rust book | rust-lang/book | 917544888a55 | MIT or Apache-2.0 |
| Rust by Example | rust-lang/rust-by-example | 898f0ac14792 | MIT or Apache-2.0 |
| Comprehensive Rust | google/comprehensive-rust | 351fafafa965 | CC BY 4.0, Apache-2.0 |
| ROS 2 documentation | ros2/ros2_documentation | b5b8578c2505 | CC BY 4.0 |
| Nav2 documentation | ros-navigation/docs.nav2.org | 9d30140f309a | Apache-2.0 |
| MoveIt 2 tutorials | moveit/moveit2_tutorials | b0ba2a971d18 | BSD-3-Clause |
| F´ documentation | nasa/fprime | 40583c14800c | Apache-2.0 |
| MicroPython documentation | micropython/micropython | 1c3c201149f3 | MIT |
| Jetson Inference | dusty-nv/jetson-inference | 45da40a8f3c1 | MIT (NVIDIA) |
| Jetson Containers | dusty-nv/jetson-containers | dd206bfe71f9 | MIT (NVIDIA) |
| IoT for Beginners | microsoft/IoT-For-Beginners | 8bd535533b39 | MIT (Microsoft) |
| Self-dialogue corpus | jfainberg/self_dialogue_corpus | 113a1b0ff103 | BSD-3-Clause |
| Synthetic-Persona-Chat | google-research-datasets/Synthetic-Persona-Chat | 1f367a0f05d3 | CC BY 4.0 |
| Taskmaster-4 | google-research-datasets/Taskmaster | d92cb6af3005 | CC BY 4.0 (Google) |
| GSM8K (training part) | openai/grade-school-math | 3101c7d50724 | MIT (OpenAI) |
| MBPP (the drafter's lessons only) | OckBench/OckBench, of google-research | b72752a0ba59 | CC BY 4.0 (Google) |
| tldr pages | tldr-pages/tldr | 08e345f42639 | CC BY 4.0 |
| Self-Instruct seed tasks | yizhongw/self-instruct | 0b26ccaa4159 | Apache-2.0 |
| Greetings | this project, export/calibration/greetings.jsonl |  | Apache-2.0 |
"""  # noqa: E501
ABOUT = {
    "bamba": (
        "Demonstration chat model",
        "A hybrid of Mamba-2 and attention for small talk, in the layout of transformers' Bamba.",
    ),
    "mamba2": (
        "Demonstration drafter",
        "A small Mamba-2 that shares the chat model's tokenizer and proposes tokens to it.",
    ),
    "mambabyte": (
        "Demonstration byte model",
        "A model over raw UTF-8 bytes, ids 0 to 255, in the layout of state-spaces/mamba.",
    ),
    "mamba": (
        "A small Mamba",
        "A Mamba with the chat model's tokenizer, trained to be measured.",
    ),
}
LIMITS = """\
## What it cannot do

It was trained for minutes to two hours on a CPU, to show that the runtime works. It knows next to
nothing: it makes small talk in English, invents facts about itself and the world, follows
the form of a sum and gets the result wrong, and loses the thread after a few turns. It has had no
safety training. Do not rely on anything it says.
"""


def _figures(card: dict[str, Any]) -> str:
    lines = [
        "| text | loss per token (nats) | perplexity per token | bytes per token | bits per byte |",
        "|---|---|---|---|---|",
    ]
    for key, title in (
        ("chat_valid", "chat.valid"),
        ("chat_valid_sample", "chat.valid, first conversations"),
        ("pretrain_valid", "pretrain.valid, first 4,096 characters of each document"),
    ):
        if key in card:
            figures = card[key]
            nats = figures["nats"] / figures["tokens"]
            lines.append(
                f"| {title} | {nats:.3f} | {figures['perplexity']:.2f} "
                f"| {figures['bytes_per_token']:.2f} | {figures['bits_per_byte']:.3f} |"
            )
    if "teacher" in card:
        teacher = card["teacher"]
        same, overlap = teacher["same_choice"], teacher["overlap"]
        lines.append(
            f"\nIt learned its teacher's distribution at {teacher['ids']:,} ids of "
            f"{teacher['talks']:,} talks. In others "
            f"{same:.1%} of its likeliest tokens are its teacher's, "
            f"and {overlap:.1%} of the two distributions is the same: the share of drafted tokens "
            "that is accepted, greedily and at temperature 1."
        )
    return "\n".join(lines)


def _samples(card: dict[str, Any]) -> str:
    parts = []
    for title, conversations in card.get("samples", {}).items():
        parts.append(f"\n## What it says ({title})\n")
        for turns in conversations:
            for user, answer in turns:
                parts.append(f"> **User:** {user}  ")
                parts.append("> **Assistant:** " + answer.replace("\n", "  \n> ") + "  ")
            parts.append("")
    return "\n".join(parts)


def card_text(card: dict[str, Any]) -> str:
    """Return README.md for a card's figures (see `edge.apps.demo.train.describe`)."""
    title, about = ABOUT[card["family"]]
    training = (
        f"{card['parameters']:,} parameters. Trained for {card['steps']:,} steps of "
        f"{card['batch_rows']} rows of {card['row_ids'] - 1} ids, {card['tokens_seen']:,} ids in "
        f"all (padding included), {card['wall_seconds'] / 60:.0f} minutes on {card['machine']}."
    )
    if "notes" in card:
        training += f" {card['notes']}"
    return f"""---
license: apache-2.0
---
# {title}

{about}

{training}

## Figures

Bits per byte include the loss of end marks, but count only the bytes of the turns' text. A row
starts from an empty state.

{_figures(card)}

{LIMITS}{_samples(card)}
## Data

The weights are under the project's licence; they were trained on these sources. Slurs, e-mail
addresses, repeats and every 13-word overlap with the evaluation texts were removed from them.

{SOURCES}"""


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
    """Loss on a text. `bytes`: UTF-8 bytes of the text that the predicted tokens stand for."""

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
    """Pack conversations with every turn predicted. Return rows, and bytes of the contents."""
    pieces, size = [], 0
    for index, conversation in enumerate(read_conversations(path)):
        if limit is not None and index == limit:
            break
        pieces += conversation_pieces(conversation, codec, width, everything=True)
        size += sum(len(content.encode()) for _, content in conversation.turns)
    return pack(pieces, width, codec.pad), size


def text_rows(path: Path, codec: Codec, width: int, limit: int | None = None) -> tuple[Rows, int]:
    """Pack the first `limit` characters of each document. Return rows, and their bytes."""
    documents = [d[:limit] for d in read_documents(path)]
    rows = pack(document_pieces(documents, codec, width), width, codec.pad)
    return rows, sum(len(d.encode()) for d in documents)


@torch.no_grad()
def measure(
    network: Network, rows: Rows, size: int, dtype: torch.dtype = torch.float32, batch: int = 8
) -> Figures:
    """Measure the loss over rows. Each row starts from an empty state."""
    device = network.embedding.weight.device
    nats, tokens = 0.0, 0
    for start in range(0, len(rows.ids), batch):
        ids = torch.from_numpy(rows.ids[start : start + batch].astype(np.int64)).to(device)
        mask = torch.from_numpy(rows.mask[start : start + batch]).to(device)[:, 1:]
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype != torch.float32):
            hidden, _ = network.hidden(ids[:, :-1])
        nats += float(head_loss(hidden[mask], network.head_weight, ids[:, 1:][mask], dtype))
        tokens += int(mask.sum())
    return Figures(nats, tokens, size)


def choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """Sample a token from logits [V], greedy at temperature 0, else from the nucleus of TOP_P."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, ids = (logits / temperature).softmax(-1).sort(descending=True)
    probabilities = probabilities * (probabilities.cumsum(0) - probabilities < TOP_P)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def converse(
    network: Network, codec: Codec, turns: tuple[str, ...], temperature: float, limit: int = 160
) -> list[tuple[str, str]]:
    """Return (the user's text, the network's answer) for each turn, in one running state."""
    device = network.embedding.weight.device
    generator = torch.Generator(device).manual_seed(0)
    state: NetworkState | None = None
    exchanges = []
    for turn in turns:
        head, content = codec.turn("user", turn)
        ids = [*head, *content, *codec.turn("assistant", "")[0]]
        answer: list[int] = []
        while not codec.ended(answer) and len(answer) < limit:
            logits, state = network(torch.tensor([ids], device=device), state)
            answer.append(choose(logits[0, -1], temperature, generator))
            ids = answer[-1:]
        _, state = network(torch.tensor([ids], device=device), state)
        exchanges.append((turn, codec.decode(answer).strip()))
    return exchanges
