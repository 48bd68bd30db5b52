"""Fixtures for the training of the demo models: a little data, and its tokenizer."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest

from edge.apps.demo import train as training
from edge.apps.demo.cards import converse
from edge.apps.demo.tokenizer import train_tokenizer

WORDS = ["the", "cat", "dog", "bird", "sees", "hears", "a", "red", "green", "house", "tree", "runs"]


@pytest.fixture(autouse=True)
def short_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample only a few characters from the network at the end of its training."""
    monkeypatch.setattr(training, "converse", partial(converse, limit=8))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a data folder laid out like the real one, with a few sentences in it."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)

    def sentence() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(4, 9))).capitalize() + "."

    for part, size in (("train", 60), ("valid", 4)):
        chats = [
            {
                "source": "self_dialogue",
                "messages": [
                    {"role": "user", "content": sentence()},
                    {"role": "assistant", "content": sentence()},
                ],
            }
            for _ in range(size)
        ]
        lines = "".join(json.dumps(chat) + "\n" for chat in chats)
        (folder / f"chat.{part}.jsonl").write_text(lines)
        documents = "".join(f"{sentence()}\n{sentence()}\n<|endoftext|>\n" for _ in range(size))
        (folder / f"pretrain.{part}.txt").write_text(documents)
    return folder


@pytest.fixture(scope="module")
def tokenizer(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(data, tmp_path_factory.mktemp("tokenizer"), vocab=330)
