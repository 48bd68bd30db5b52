"""`python -m edge.apps.bench.constrained`: cost per token of constraining an answer to a grammar,
and the gain where the grammar leaves no choice.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from edge.apps.exits import leave
from edge.apps.measure.machine import machine, stamp
from edge.apps.measure.statistics import percentile
from edge.apps.measure.stopwatch import result_and_seconds, seconds, without_collections
from edge.apps.measure.table import FigureTable, show
from edge.apps.options import AsJson
from edge.apps.programs import CommandGroup
from edge.runtime.constrain.mask import GrammarVocabulary
from edge.runtime.constrain.statement import constraint_of
from edge.runtime.model import Model, load
from edge.runtime.session import Session
from edge.text.byte import ByteTokenizer

Facts = dict[str, Any]
IDS = 50_000
ROUNDS = 5
GOAL_US = 50.0
SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["move_forward", "turn_left", "turn_right", "stop"]},
        "distance_cm": {"type": "integer", "minimum": 0, "maximum": 500},
        "speed": {"enum": ["slow", "normal", "fast"]},
        "reason": {"type": "string", "maxLength": 40},
        "targets": {"type": "array", "items": {"enum": ["ball", "box", "door"]}, "maxItems": 2},
    },
    "required": ["action", "distance_cm", "speed", "reason", "targets"],
    "additionalProperties": False,
}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "JSON schema": {"json_schema": SCHEMA},
    "any JSON object": {"json_schema": {"type": "object"}},
    "choices": {"choices": ["move forward", "move back", "turn left", "turn right", "stop"]},
    "regex": {"regex": r"(forward|back) [0-9]{1,3} cm at (slow|full) speed"},
}
app = CommandGroup()


class MadeUpTokenizer(ByteTokenizer):
    """All bytes, and made-up words, numbers and punctuation. The last id ends an answer."""

    def __init__(self, size: int) -> None:
        super().__init__(eos=(size - 1,))
        self.vocab_size = size
        self.fingerprint = hashlib.sha256(b"made up").hexdigest()
        self._pieces = [*dict.fromkeys(_pieces(size))]

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token] if token < self.vocab_size - 1 else b""

    def id_to_piece(self, token: int) -> str:
        return repr(self.token_bytes(token))


def _pieces(size: int) -> Iterator[bytes]:
    rng = random.Random(0)
    letters, marks = b"etaoinshrdlucmfwypvbgkjqxz", b".,:;\"{}[]()_-\n '/"
    weights = [1 / (1 + rank) for rank in range(len(letters))]
    seen = {bytes((value,)) for value in range(256)}
    yield from (bytes((value,)) for value in range(256))
    while len(seen) < size - 1:
        word = bytes(rng.choices(letters, weights, k=rng.randrange(2, 9)))
        kind = rng.random()
        piece = (
            b" " + word if kind < 0.6
            else word if kind < 0.85
            else str(rng.randrange(1000)).encode() if kind < 0.9
            else bytes(rng.choices(marks, k=rng.randrange(2, 4)))
        )  # fmt: skip
        if piece not in seen:
            seen.add(piece)
            yield piece


def masks(size: int = IDS) -> Facts:
    """Measure microseconds per token to follow the grammar and mask logits [size], by form."""
    vocabulary = GrammarVocabulary(MadeUpTokenizer(size))
    logits = np.random.default_rng(1).standard_normal((64, size)).astype(np.float32)
    return {"ids": size, "forms": {name: _mask_cost(vocabulary, dict(form), logits)
                                   for name, form in FORMS.items()}}  # fmt: skip


def _mask_cost(vocabulary: GrammarVocabulary, form: dict[str, Any], logits: Any) -> Facts:
    constraint = constraint_of(form)
    assert constraint is not None
    compile_s = seconds(partial(vocabulary.mask, constraint, False))
    token_s: list[float] = []
    with without_collections():
        for number in range(ROUNDS):
            mask = vocabulary.mask(constraint, False)
            for step in range(200):
                row = logits[(step + 7 * number) % len(logits)]
                allowed, masking_s = result_and_seconds(partial(mask.allowed, row))
                token = int(allowed.argmax())  # the sampler's work, not counted
                token_s.append(masking_s + seconds(partial(mask.say, token)))
                if mask.complete or token in vocabulary.ends:
                    break
    return {
        "compile_ms": 1e3 * compile_s,
        "tokens": len(token_s),
        "median_us": 1e6 * percentile(token_s, 0.5),
        "p90_us": 1e6 * percentile(token_s, 0.9),
    }


@contextmanager
def _without_forced_drafts() -> Iterator[None]:
    """Disable drafts of forced tokens within the block."""
    from edge.runtime.speculate.decode import Speculative
    from edge.runtime.speculate.draft import NOTHING

    original = Speculative.forced
    Speculative.forced = lambda self: NOTHING  # type: ignore[method-assign]
    try:
        yield
    finally:
        Speculative.forced = original  # type: ignore[method-assign]


def jumps(model: Model, rounds: int = ROUNDS) -> Facts:
    """Measure milliseconds of greedy answers, best of the rounds.

    Forced tokens are verified in one run, and for comparison step by step.
    """
    session = model.session(undo_levels=0)
    with without_collections():
        return {name: _jump_gain(session, dict(form), rounds) for name, form in FORMS.items()}


def _jump_gain(session: Session, form: dict[str, Any], rounds: int) -> Facts:
    times: dict[str, list[float]] = {"jump": [], "steps": []}
    texts, result = set(), None
    for number in range(rounds + 1):
        for way in ("jump", "steps") if number % 2 else ("steps", "jump"):
            session.reset()
            ask = session.generate if session.model.template is None else session.chat
            if way == "steps":
                with _without_forced_drafts():
                    answer = ask("What now?", temperature=0, max_tokens=96, **form).finish()
            else:
                result = answer = ask("What now?", temperature=0, max_tokens=96, **form).finish()
            texts.add(answer.text)
            stamps = answer.timings.token_s
            if number:  # the first round warms up
                times[way].append(stamps[-1] - stamps[0])
    assert result is not None and result.speculation is not None
    jump, steps = min(times["jump"]), min(times["steps"])
    return {
        "tokens": len(result.tokens),
        "forced": result.speculation.accepted,
        "ms": 1e3 * jump,
        "ms_without": 1e3 * steps,
        "speedup": steps / jump if jump > 0 else None,
        "same": len(texts) == 1,
    }


def mask_table(facts: Facts) -> FigureTable:
    """Return the table of the overhead."""
    rows = [
        (name, f"{cost['compile_ms']:.1f}", f"{cost['median_us']:.0f}", f"{cost['p90_us']:.0f}")
        for name, cost in facts["forms"].items()
    ]
    title = f"form of an answer, {facts['ids']} ids; {GOAL_US:.0f} µs expected"
    return FigureTable(("form", "compile, ms", "per token, µs", "p90, µs"), rows, title=title)


def jump_table(facts: Facts, name: str) -> FigureTable:
    """Return the table of the gain."""
    rows = [
        (form, str(gain["tokens"]), str(gain["forced"]), f"{gain['ms_without']:.1f}",
         f"{gain['ms']:.1f}", "–" if gain["speedup"] is None else f"{gain['speedup']:.2f}",
         "yes" if gain["same"] else "NO")
        for form, gain in facts.items()
    ]  # fmt: skip
    head = ("form", "tokens", "forced", "by steps, ms", "in runs, ms", "times", "same")
    return FigureTable(head, rows, title=f"forced tokens in one run, {name}")


@app.command()
def bench(
    bundles: Annotated[list[str] | None, typer.Argument(help="Bundles to measure.")] = None,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    engine: Annotated[str, typer.Option()] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure the mask at 50,000 ids, and the gain of forced tokens with these bundles."""
    facts: Facts = {"date": stamp(), "machine": machine(), "masks": masks(), "jumps": {}}
    for name in bundles or ["demo"]:
        facts["jumps"][name] = jumps(load(name, threads=threads, engine=engine))
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        show([mask_table(facts["masks"]),
              *(jump_table(gains, name) for name, gains in facts["jumps"].items())])  # fmt: skip


if __name__ == "__main__":
    leave(app)
