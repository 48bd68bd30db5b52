"""A long life (rows 52 and 53 of the fault table): memory, files and threads stay constant, and a
session then answers like a new one.

EDGE_SOAK_TOKENS=1000000 makes it a million tokens, which takes some minutes;
docs/inside/threat-model.md has figures.
"""

from __future__ import annotations

import gc
import json
import os
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import edge
from edge.errors import StateError
from edge.runtime import memory
from edge.runtime.model import Model
from edge.runtime.session import Session
from tests.faulty_calls import in_child
from tests.session_models import states

TOKENS = int(os.environ.get("EDGE_SOAK_TOKENS", "30000"))
LONGEST = 3000  # tokens of a conversation; its transcript is kept, 8 to 36 bytes a token
GROWTH = 3 << 19  # bindings are cached for each position of the ring in use, at most 256
WORDS = ["hello", "robot", "please", "count", "to", "seven", "and", "tell", "me", "why", "🤖", "é"]
Turn = dict[str, Any]


class Talk:
    """A session that is used in every way, and those of its turns that are still in effect."""

    def __init__(self, model: Model, rng: random.Random, folder: Path) -> None:
        self.model, self.rng, self.folder = model, rng, folder
        self.tokens = 0
        self.begin()

    def begin(self) -> None:
        self.session = self.model.session(undo_levels=2)
        self.turns: list[Turn] = []

    def say(self) -> None:
        rng = self.rng
        turn: Turn = {
            "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 60))),
            "max_tokens": rng.randint(1, 60),
            "temperature": rng.choice([0.0, 0.8, 3.0]),
            "seed": rng.randrange(1 << 30),
            "cancel": rng.choice([None, None, None, 1, 3]),
        }
        self.tokens += said(self.session, turn)
        self.turns.append(turn)

    def other(self) -> None:
        rng, session = self.rng, self.session
        verb = rng.randrange(6)
        if verb == 0 and self.turns and session.undo_levels:
            session.undo()
            self.turns.pop()
        elif verb == 1:
            snapshot = session.snapshot()
            self.tokens += said(session, {"text": "what?", "max_tokens": 5, "seed": 1})
            session.restore(snapshot)
        elif verb == 2:
            session.save(self.folder / "state")
            self.session = self.model.session(undo_levels=2)
            self.session.load(self.folder / "state")
        elif verb == 3 and session.undo_levels:
            session.cancel()  # nothing is running, so nothing happens
        elif verb == 4:
            with suppress(StateError):
                session.load(__file__)
        if len(self.session.tokens) > LONGEST:
            if rng.random() < 0.5:
                self.begin()
            else:
                self.session.reset()
                self.session.undo()
                self.session.reset()
                self.turns.clear()


def said(session: Session, turn: Turn) -> int:
    """Take a turn; return the number of tokens."""
    options = {key: turn[key] for key in ("max_tokens", "temperature", "seed") if key in turn}
    answer = session.chat(turn["text"], **options)
    for number, _ in enumerate(answer):
        if number == turn.get("cancel"):
            answer.cancel()
    return answer.result.prompt_tokens + len(answer.result.tokens)


def figures(talk: Talk) -> dict[str, int]:
    """Return the resources of the process, with a new session instead of a long one."""
    talk.begin()
    gc.collect()
    memory.trim()
    return {
        "memory": memory.private_bytes(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def live(tokens: str) -> None:
    count, began, used = int(tokens), time.monotonic(), time.process_time()
    seen: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as name:
        talk = Talk(edge.load("demo-draft", threads=1), random.Random(7), Path(name))
        for part in (1, 2):
            while talk.tokens < part * count // 2:
                talk.say()
                if talk.rng.random() < 0.4:
                    talk.other()
            seen.append(figures(talk))
        for _ in range(12):
            talk.say()
            talk.other()
        left = sorted(entry.name for entry in Path(name).iterdir())
    # on another, unused engine
    new = edge.load("demo-draft", threads=1).session()
    for turn in talk.turns:
        said(new, turn)
    ours, theirs = (states(s) for s in (talk.session, new))
    print(json.dumps({
        "tokens": talk.tokens, "half": seen[0], "end": seen[1], "left": left,
        "seconds": round(time.monotonic() - began), "cpu": round(time.process_time() - used),
        "turns": len(talk.turns), "same_tokens": talk.session.tokens == new.tokens,
        "same_messages": talk.session.messages == new.messages,
        "same_state": all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs),
    }))  # fmt: skip


def test_rows_52_and_53_a_long_life_leaves_nothing_behind() -> None:
    seen = json.loads(in_child(live, TOKENS, environment={"OMP_NUM_THREADS": "1"}, timeout=7200))
    print(seen)
    assert seen["tokens"] >= TOKENS and seen["turns"] > 0
    assert seen["end"]["memory"] - seen["half"]["memory"] <= GROWTH, seen
    assert seen["end"]["files"] == seen["half"]["files"], seen
    assert seen["end"]["threads"] == seen["half"]["threads"], seen
    assert set(seen["left"]) <= {"state", "state~"}
    assert seen["same_tokens"] and seen["same_messages"] and seen["same_state"], seen
