"""First answers of a model, many at once: `python -m edge.apps.demo.answers BUNDLE`.

As `edge.apps.demo.talks`, for its drafter to learn from. A token takes a third as long in a run of
sixteen sequences as in a run of one; but they go in step, so their prompts are of one length, and
every conversation ends with its first answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from edge.apps.demo.data import read_documents
from edge.apps.demo.talks import SOURCES, go_on, user_turns
from edge.errors import InputError
from edge.runtime.model import Model, load
from edge.runtime.state import State
from edge.text.template import Message

# How often a prompt is of a document, beside the sources of conversations, which people wrote.
DOCUMENTS = {"passage": 4.0, "heading": 4.0}
REQUESTS = (
    "What is {}?", "What are {}?", "Explain {}.", "Can you explain {} to me?", "Describe {}.",
    "Write an essay about {}.", "Write a short story about {}.", "Write a poem about {}.",
    "Write an email about {}.", "How does one begin with {}?", "How can I improve {}?",
    "Why is {} important? Give some examples.", "Give me three tips for {}.",
    "What are the main differences between {} and {}?", "Compare {} with {}.",
    "What if there had been no {}?", "How do {} and {} influence each other, and why?",
    "Imagine you are an expert in {}. What would you tell people about {}?",
    "Write a function for {} in Python.", "Implement {} in C++. Explain your answer step by step.",
    "Summarize what is known about {} in one paragraph.", "How many {} are there in {}?",
)  # fmt: skip
TEMPERATURES = (0.0, 0.0, 0.7, 1.0, 1.0)
LONGEST = 900  # characters of a prompt
FEW = 4  # a run ends when a quarter of its answers, one in so many, is all that goes on


@dataclass(frozen=True)
class Asked:
    """A prompt: its ids, the template's included, and the heat of its answer."""

    ids: tuple[int, ...]
    temperature: float


class Prompts:
    """What can be asked: users' turns of the data, passages of its documents, and requests about
    their headings.
    """

    def __init__(self, data: Path) -> None:
        turns = user_turns(data / "chat.train.jsonl")
        self._turns = {
            source: [t for talk in talks for t in talk] for source, talks in turns.items()
        }
        self._documents = list(read_documents(data / "pretrain.train.txt"))
        found = re.findall(r"^#+ +([A-Za-z][^\n#{}<>|]{3,50})$", "\n".join(self._documents), re.M)
        self._headings = sorted(set(found))
        kinds = {s: SOURCES[s] for s in self._turns}
        if self._headings:
            kinds["heading"] = DOCUMENTS["heading"]
        if self._documents:
            kinds["passage"] = DOCUMENTS["passage"]
        self._kinds, self._shares = list(kinds), list(kinds.values())

    def draw(self, rng: random.Random) -> str:
        kind = rng.choices(self._kinds, self._shares)[0]
        if kind == "passage":
            return self._passage(rng)
        if kind == "heading":
            request = rng.choice(REQUESTS)
            two = rng.sample(self._headings, min(2, len(self._headings))) * 2
            return request.format(*two)
        return rng.choice(self._turns[kind])

    def _passage(self, rng: random.Random) -> str:
        """One to five sentences from anywhere."""
        document = rng.choice(self._documents)
        start = rng.randrange(len(document))
        sentences = re.split(r"(?<=[.?!])\s+", document[start : start + 2 * LONGEST])[1:-1]
        return " ".join(sentences[: rng.randint(1, 5)]).strip()[:LONGEST]


def groups(model: Model, prompts: Prompts, seed: int, count: int, size: int) -> list[list[Asked]]:
    """`count` prompts drawn, in groups of `size` of one length, shuffled; what is left is dropped.

    Every prompt is there once for each heat at most.
    """
    rng = random.Random(f"{seed}/prompts")
    asked: dict[Asked, None] = {}
    for _ in range(count):
        text = prompts.draw(rng)
        if not text.strip():
            continue
        assert model.template is not None
        ids = model.template.encode([Message("user", text)])
        asked[Asked(tuple(ids), rng.choice(TEMPERATURES))] = None
    lengths: dict[int, list[Asked]] = {}
    for one in asked:
        lengths.setdefault(len(one.ids), []).append(one)
    found = [
        same[start : start + size]
        for same in lengths.values()
        for start in range(0, len(same) - size + 1, size)
    ]
    rng.shuffle(found)
    return found


def answers(
    model: Model, state: State, group: Sequence[Asked], seed: str, most: int
) -> list[list[int]]:
    """An answer each, its end token included where it came to its end; at most `most` tokens."""
    rng = np.random.default_rng(list(seed.encode()))
    state.clear()
    heat = np.array([one.temperature for one in group], np.float32)
    said: list[list[int]] = [[] for _ in group]
    going = list(range(len(group)))
    tokens = np.array([one.ids for one in group], np.int64)
    for start in range(0, tokens.shape[1], model.engine.chunk):
        chunk = tokens[:, start : start + model.engine.chunk]
        logits = model.engine.run(chunk, state, commit=True)
    for _ in range(most):
        chosen = choose(logits[:, -1], heat, rng)
        for row in going:
            said[row].append(int(chosen[row]))
        going = [row for row in going if said[row][-1] not in model.tokenizer.eos]
        if len(going) <= len(group) // FEW:
            break
        logits = model.engine.run(chosen[:, None], state, commit=True)
    return said


def choose(
    logits: NDArray[np.float32], heat: NDArray[np.float32], rng: np.random.Generator
) -> NDArray[np.int64]:
    """A token for each row [B, V]: the likeliest at heat 0, else drawn from all of them."""
    chosen: NDArray[np.int64] = logits.argmax(-1).astype(np.int64)
    for row in np.flatnonzero(heat):
        weights = np.exp((logits[row] - logits[row, chosen[row]]) / heat[row]).cumsum()
        chosen[row] = min(np.searchsorted(weights, rng.random() * weights[-1]), len(weights) - 1)
    return chosen


def records(
    model: Model, asked: list[list[Asked]], done: int, seed: int, most: int
) -> Iterator[dict[str, list[list[int]]]]:
    """A group at a time, from the group `done` on: ids asked and ids said, a list a prompt."""
    if not asked:
        raise InputError("has too few prompts of one length", field="data")
    longest = max(len(one.ids) for group in asked for one in group)
    state = model.engine.new_state(batch=len(asked[0]), window=1, capacity=longest + most)
    for index in range(done, len(asked)):
        said = answers(model, state, asked[index], f"{seed}/{index}", most)
        yield {"asked": [list(one.ids) for one in asked[index]], "said": said}


def main(
    bundle: str,
    data: Annotated[Path, typer.Option(help="Folder with chat.* and pretrain.*")],
    out: Annotated[Path, typer.Option(help="File of the answers; an earlier run's continues")],
    prompts: Annotated[int, typer.Option(help="How many to draw")] = 40_000,
    together: Annotated[int, typer.Option(help="Answers at once")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Longer answers are cut")] = 96,
    seed: int = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
) -> None:
    """Let BUNDLE answer prompts drawn from the training data. Stop at any time; the same command
    goes on. A line is a group: ids asked and ids said, a list a prompt.
    """
    model = load(bundle, threads=threads)
    asked = groups(model, Prompts(data), seed, prompts, together)
    go_on(out, lambda done: records(model, asked, done, seed, max_tokens))


if __name__ == "__main__":
    typer.run(main)
