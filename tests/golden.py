"""The golden sentence: the first 32 greedy tokens of each embedded bundle, in `golden.json`.

    python -m tests.golden [ENGINE]     checks all bundles through ort, cpu, cuda or tensorrt

Every engine must produce these tokens. Engines add floating-point numbers in different orders, so
the prompts were chosen to leave room: the two largest logits are at least 0.26 apart at every token
(0.46 for demo-draft), while `cuda` is within 0.005 of `ort` in the floating-point bundles. For
`demo`, in w8a8, single logits differ by up to 0.46, because one value that rounds the other way
moves all later ones; the largest stays the largest at each of its 32 tokens.

Needs neither torch nor pytest: it also runs on the oldest runtime and on an emulated aarch64.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

import edge

FILE = Path(__file__).with_name("golden.json")


@dataclass(frozen=True)
class Sentence:
    """One bundle's golden sentence.

    Attributes:
        prompt: the user's message.
        prompt_ids: the message in the bundle's chat template.
        ids: the 32 tokens that follow.
        answer: the text that a chat shows for them.
    """

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    answer: str

    def check(self, logits: ArrayLike, first: int = 0) -> None:
        """Compare logits [T, V] of tokens `first`, `first + 1`, … with the sentence.

        Raises AssertionError naming the first token that differs, and by how much.
        """
        for at, row in enumerate(np.asarray(logits, np.float64), start=first):
            wanted, found = self.ids[at], int(row.argmax())
            if wanted != found:
                gap = row[found] - row[wanted]
                raise AssertionError(f"token {at} is {found}, not {wanted}, by a logit of {gap:g}")


def _read() -> dict[str, Sentence]:
    bundles = json.loads(FILE.read_text(encoding="utf-8"))["bundles"]
    return {name: Sentence(**found) for name, found in bundles.items()}


SENTENCES = _read()


def check(name: str, model: edge.Model) -> None:
    """Check the prompt, then the sentence step by step, then the sentence in a chat."""
    sentence = SENTENCES[name]
    assert model.template is not None
    engine = model.engine
    state = engine.new_state(window=1, capacity=64)
    feed = sentence.prompt_ids
    for at, token in enumerate(sentence.ids):
        sentence.check(engine.run(np.array([feed]), state, commit=True)[0, -1:], at)
        feed = [token]
    said = model.session().chat(sentence.prompt, max_tokens=len(sentence.ids), temperature=0)
    result = said.finish()
    if result.text != sentence.answer or list(result.tokens) != sentence.ids[: len(result.tokens)]:
        raise AssertionError(f"{name} answers {result.text!r}, not {sentence.answer!r}")


def main(engine: str = "ort") -> None:
    for name in SENTENCES:
        with edge.load(name, engine=engine, threads=1) as model:
            check(name, model)
    print(f"ok: {', '.join(SENTENCES)} say the golden sentence on {engine}")


if __name__ == "__main__":
    main(*sys.argv[1:])
