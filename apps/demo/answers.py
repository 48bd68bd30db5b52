"""`python -m edge.apps.demo.answers BUNDLE`: first answers of a model, many at once.

Like `edge train answers`, for the drafter of the demonstration to learn from. Some prompts are made
up, and answers are kept as the generated ids.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from edge.apps.demo.data import read_documents
from edge.apps.demo.talks import SOURCES, user_turns
from edge.apps.train.answers import LONGEST, Asked, BundleAuthor, groups, say_all
from edge.apps.train.lines import go_on
from edge.runtime.model import Model, load

# Relative frequency of prompts made from documents, next to `SOURCES` of conversations.
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


class Prompts:
    """Source of prompts: users' turns, passages of documents, and requests about their headings."""

    def __init__(self, data: Path) -> None:
        turns = user_turns(data / "chat.train.jsonl")
        self._turns = {
            source: [t for talk in talks for t in talk] for source, talks in turns.items()
        }
        self._documents = list(read_documents(data / "pretrain.train.txt"))
        titles = re.findall(r"^#+ +([A-Za-z][^\n#{}<>|]{3,50})$", "\n".join(self._documents), re.M)
        self._headings = sorted(set(titles))
        kinds = {s: SOURCES[s] for s in self._turns}
        if self._headings:
            kinds["heading"] = DOCUMENTS["heading"]
        if self._documents:
            kinds["passage"] = DOCUMENTS["passage"]
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def draw(self, rng: random.Random) -> str:
        kind = rng.choices(self._kinds, self._weights)[0]
        if kind == "passage":
            return self.passage(rng)
        if kind == "heading":
            return self.about_heading(rng, REQUESTS)
        return rng.choice(self._turns[kind])

    def turn(self, rng: random.Random, sources: Sequence[str]) -> str:
        """Return a user's turn of one of these sources that the data has."""
        available = [source for source in sources if source in self._turns]
        return rng.choice(self._turns[rng.choice(available)]) if available else ""

    def about_heading(self, rng: random.Random, requests: Sequence[str]) -> str:
        """Return a request about one or two headings; "" if the documents have none."""
        if not self._headings:
            return ""
        request = rng.choice(requests)
        subjects = rng.sample(self._headings, min(2, len(self._headings))) * 2
        return request.format(*subjects)

    def passage(self, rng: random.Random) -> str:
        """Return one to five consecutive sentences from a random place."""
        document = rng.choice(self._documents)
        start = rng.randrange(len(document))
        sentences = re.split(r"(?<=[.?!])\s+", document[start : start + 2 * LONGEST])[1:-1]
        return " ".join(sentences[: rng.randint(1, 5)]).strip()[:LONGEST]


def records(
    model: Model, asked: list[list[Asked]], done: int, seed: int, most: int
) -> Iterator[dict[str, list[list[int]]]]:
    """Yield a record per group from group `done` on: ids of each prompt and of each answer."""
    said = say_all(BundleAuthor(model), asked, done, seed, most)
    for group, answers in zip(asked[done:], said, strict=True):
        yield {"asked": [list(prompt.ids) for prompt in group], "said": answers}


def main(
    bundle: str,
    data: Annotated[Path, typer.Option(help="Folder with chat.* and pretrain.*")],
    out: Annotated[Path, typer.Option(help="Output file; continues an earlier run's")],
    prompts: Annotated[int, typer.Option(help="Number of prompts to draw")] = 40_000,
    together: Annotated[int, typer.Option(help="Answers at once")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer")] = 96,
    seed: int = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
) -> None:
    """Let BUNDLE answer prompts drawn from the training data.

    Stop at any time; the same command resumes. Each line is a group: ids of each prompt and of each
    answer.
    """
    model = load(bundle, threads=threads)
    prompt_groups = groups(model.template, Prompts(data), seed, prompts, together)
    go_on(out, lambda done: records(model, prompt_groups, done, seed, max_tokens))


if __name__ == "__main__":
    typer.run(main)
