"""`python -m edge.apps.demo.prompts --data FOLDER`: prompts of many kinds, as chat JSON.

For `edge train answers`, which draws from every kind equally often: the answers teach a drafter of
an instruct model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from edge.apps.demo.answers import REQUESTS, Prompts
from edge.apps.demo.everyday import questions

# Requests about a passage, beside those about a heading.
ABOUT_PASSAGES = (
    "Summarize the following text in one sentence.\n\n{}",
    "Summarize this paragraph:\n{}",
    "Rewrite this text in simple words.\n\n{}",
    "Correct the grammar of this text: {}",
    "What is the main idea of this text?\n{}",
    "List the most important points of the following passage.\n\n{}",
    "Who and what are named in this text? Answer as JSON.\n\n{}",
    "Continue this story.\n\n{}",
    "Is the tone of this text positive or negative? Explain.\n\n{}",
    "Write a title for this text: {}",
)
REQUESTS_FOR_CODE = (
    "Write a Python function to {}.", "Complete this Python function.\n\ndef solve(values):\n"
    '    """{}."""', "Write a C++ program to {}.", "How do I {} in Python? Give an example.",
    "Write a function to {} and explain it step by step.", "Write a shell script to {}.",
)  # fmt: skip
TASKS = (
    "sort a list of {}", "find the largest of {}", "count {} in a file", "read {} from a CSV file",
    "remove duplicate {}", "check whether {} are valid", "compute the average of {}",
    "group {} by their first letter", "search {} by binary search", "merge two lists of {}",
    "print {} in reverse", "convert {} to JSON", "filter {} by a threshold", "split {} into parts",
)  # fmt: skip
OBJECTS = (
    "integers", "words", "dates", "points", "names", "prices", "temperatures", "strings",
    "matrices", "trees", "intervals", "students", "orders", "colors", "brackets", "characters",
    "graphs",
)  # fmt: skip


def kinds(data: Path, rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, prompt), about `count` of every kind that is not a fixed list."""
    drawn = Prompts(data)
    for _ in range(count):
        yield "request", drawn.about_heading(rng, REQUESTS)
        yield "passage", rng.choice(ABOUT_PASSAGES).format(drawn.passage(rng))
        task = rng.choice(TASKS).format(rng.choice(OBJECTS))
        yield "code", rng.choice(REQUESTS_FOR_CODE).format(task)
        for kind, sources in (
            ("problem", ("gsm8k_chat",)),
            ("task", ("mbpp_chat", "seed_tasks_chat", "tldr")),
            ("talk", ("self_dialogue", "synthetic_persona_chat", "taskmaster4")),
        ):
            yield kind, drawn.turn(rng, sources)
    for question in questions():
        yield "everyday", question


def main(
    data: Annotated[Path, typer.Option(help="Folder with chat.* and pretrain.*")],
    count: Annotated[int, typer.Option(help="Prompts of each kind")] = 8000,
    seed: int = 0,
) -> None:
    """Print one prompt per line, without repeats."""
    for kind, prompt in dict.fromkeys(kinds(data, random.Random(seed), count)):
        if prompt.strip():
            message = {"role": "user", "content": prompt}
            print(json.dumps({"messages": [message], "source": kind}))


if __name__ == "__main__":
    typer.run(main)
