"""`python -m edge.apps.demo.everyday`: everyday questions and requests, as chat JSON.

About 4,900 of one turn, made of the forms and things of everyday.json and of small sums.
`edge train answers` has a model answer them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

DATA = Path(__file__).with_suffix(".json")


def questions() -> Iterator[str]:
    """Yield every question, a few of them twice."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    for group in data["groups"]:
        for form, thing in product(group["forms"], group["things"]):
            yield form.format(thing)
    yield from data["single"]
    for a, b in product(range(2, 13), repeat=2):
        if (a * 7 + b * 3) % 4 == 0:
            yield f"What is {a} times {b}?"
            yield f"What is {a * 3} plus {b * 2}?"
            yield f"What is {a * 5 + b} minus {b}?"


def main() -> None:
    """Print one conversation per line, in a fixed random order."""
    shuffled = sorted(set(questions()))
    random.Random(0).shuffle(shuffled)
    for number, question in enumerate(shuffled):
        message = {"role": "user", "content": question}
        print(json.dumps({"messages": [message], "source": "everyday", "id": number}))


if __name__ == "__main__":
    main()
