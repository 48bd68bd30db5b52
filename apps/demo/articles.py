"""`python -m edge.apps.demo.articles MODEL -o own.jsonl`: articles that a teacher writes, many at
once, for its hybrid to learn from.

Each article goes on from an opening such as "The history of" with a name or a noun. Beside the
text, `own.npy` has the ids exactly as they were sampled, for `edge distill --text`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from edge.apps.demo.everyday import DATA
from edge.apps.exits import leave
from edge.apps.options import Threads
from edge.apps.programs import CommandGroup
from edge.apps.train.answers import Asked, Author, open_author, say_all
from edge.apps.train.lines import go_on
from edge.errors import InputError
from edge.runtime.model import resolve
from edge.text.tokenizer import Tokenizer

HEATS = (0.7, 1.0)  # lowest and highest temperature of an article
THINGS, PLACES, PEOPLE = 0, 2, 3  # groups of everyday.json whose things are subjects
OF_THINGS = (
    "The history of {}", "{} is", "{} was first", "An introduction to {}", "The importance of {}",
    "In recent years, {}", "{} and its uses", "The science of {}", "A short guide to {}",
    "Many people believe that {}", "Scientists have found that {}", "The main types of {}",
)  # fmt: skip
OF_PLACES = (
    "The history of {}", "{} is a country", "The population of {}", "The geography of {}",
    "The economy of {}", "{} is located in", "The culture of {}", "The climate of {}",
)  # fmt: skip
OF_PEOPLE = (
    "{} was born in", "The life of {}", "{} was a", "The early life of {}", "{} is best known for",
    "The story of {}", "{} (born", "The work of {}",
)  # fmt: skip
OF_NAMES = (
    "{} is a species of", "{} is a village in", "{} is a genus of", "{} was an American",
    "{} is a film directed by", "{} is an album by", "{} was a British", "{} is a river in",
    "The Battle of {}", "{} is a company", "{} High School is", "The {} Bridge is",
)  # fmt: skip
FIRST = (
    "Adam", "Alice", "Anna", "Arthur", "Carl", "Clara", "David", "Edward", "Elena", "Emma", "Frank",
    "George", "Grace", "Henry", "Ida", "James", "Julia", "Louis", "Maria", "Martin", "Nora", "Paul",
    "Peter", "Ruth", "Samuel", "Thomas", "Victor", "Walter",
)  # fmt: skip
LAST = (
    "Adler", "Baker", "Bell", "Brooks", "Carter", "Clarke", "Dean", "Ellis", "Fisher", "Fox",
    "Grant", "Hale", "Hill", "Hunt", "Keller", "Lane", "Marsh", "Miller", "Moore", "Newton", "Page",
    "Reed", "Rossi", "Silva", "Stone", "Turner", "Ward", "Winter", "Young",
)  # fmt: skip

app = CommandGroup()


def openings(rng: random.Random) -> Iterator[str]:
    """Yield openings without end."""
    groups = json.loads(DATA.read_text(encoding="utf-8"))["groups"]
    kinds: list[tuple[tuple[str, ...], list[str]]] = [
        (OF_THINGS, [re.sub("^(a|an|the) ", "", thing) for thing in groups[THINGS]["things"]]),
        (OF_PLACES, groups[PLACES]["things"]),
        (OF_PEOPLE, groups[PEOPLE]["things"]),
        (OF_PEOPLE, [f"{first} {last}" for first in FIRST for last in LAST]),
        (OF_NAMES, [*FIRST, *LAST]),
    ]
    while True:
        forms, subjects = rng.choice(kinds)
        opening = rng.choice(forms).format(rng.choice(subjects))
        yield opening[0].upper() + opening[1:]


def batches(tokenizer: Tokenizer, seed: int, count: int, together: int) -> list[list[Asked]]:
    """Return `count` openings in batches, each with the temperature of its article."""
    rng = random.Random(f"{seed}/articles")
    drawn = openings(rng)
    bos = [] if tokenizer.bos is None or not tokenizer.add_bos else [tokenizer.bos]
    return [
        [
            Asked(text, (*bos, *tokenizer.encode(text)), rng.uniform(*HEATS))
            for _, text in zip(range(min(together, count - start)), drawn, strict=False)
        ]
        for start in range(0, count, together)
    ]


def articles(
    author: Author, asked: list[list[Asked]], done: int, seed: int, length: int
) -> Iterator[dict[str, Any]]:
    """Yield one article of at most `length` tokens at a time, without the first `done`.

    Raises InputError if an opening leaves no room.
    """
    together = len(asked[0])
    lengths = [len(opening.ids) for batch in asked for opening in batch]
    if max(lengths) >= length:
        raise InputError(
            f"{length} tokens leave no room after an opening of {max(lengths)}", field="--length"
        )
    first, offset = divmod(done, together)
    said = say_all(author, asked, first, seed, length - min(lengths))
    for batch, written in zip(asked[first:], said, strict=True):
        for opening, ids in list(zip(batch, written, strict=True))[offset:]:
            whole = [*opening.ids, *ids][:length]
            text = author.tokenizer.decode([i for i in whole if i not in author.tokenizer.eos])
            yield {"text": text, "ids": whole}
        offset = 0


@app.command()
def write(
    model: Annotated[
        str, typer.Argument(help="What writes: a bundle, or with --device a checkpoint.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Text to write (.jsonl); ids go beside it (.npy)")
    ],
    count: Annotated[int, typer.Option(min=1, help="Number of articles.")] = 2048,
    length: Annotated[int, typer.Option(min=2, help="Tokens of an article, with opening.")] = 512,
    together: Annotated[int, typer.Option(min=1, help="Articles written at once.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of openings, temperatures and articles.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="Run a checkpoint in PyTorch on this device, such as cuda.")
    ] = None,
    threads: Threads = None,
) -> None:
    """Let MODEL write articles. Stop at any time; the same command resumes."""
    if output.suffix != ".jsonl":
        raise InputError("must end in .jsonl", file=output, field="--output")
    author = open_author(resolve(model), device, threads)
    asked = batches(author.tokenizer, seed, count, together)
    go_on(output, lambda done: articles(author, asked, done, seed, length))
    with output.open(encoding="utf-8") as lines:
        ids = [token for line in lines for token in json.loads(line)["ids"]]
    np.save(output.with_suffix(".npy"), np.array(ids, np.int32))


if __name__ == "__main__":
    leave(app)
