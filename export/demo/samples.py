"""Short conversations with a network, for its model card."""

from __future__ import annotations

import torch

from edge.export.demo.data import Codec
from edge.export.network import Network, NetworkState

CONVERSATIONS = (
    ("Hello, how are you?", "What do you like to do for fun?", "Do you have any pets?", "Bye!"),
    ("Who are you?", "What can you do?"),
    ("Have you seen Star Wars?", "Who is your favorite character?"),
    ("I'd like to order a latte please.",),
    ("Tom has 3 apples and buys 5 more. How many apples does he have?",),
)
TOP_P = 0.9


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
