"""Compare two engines on this machine, or watch an engine's memory over a long run.

    python -m jetson.verify.engines agree BUNDLE ENGINE OTHER
    python -m jetson.verify.engines grow BUNDLE ENGINE [--tokens N]

Prints one line of JSON. Exit code 0 means right, 1 wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import numpy as np

from edge.apps.measure.agreement import Logits, agreement, run_through
from edge.errors import EdgeError
from edge.runtime import memory
from edge.runtime.model import Model, load

QUESTIONS = ("Hello, how are you?", "What did you do today?", "Do you like music?")
# Nats per token and share of equal best tokens, for any recipe. The demonstration model in w8a8 is
# 6.1e-3 nats from ONNX Runtime, in Triton's interpreter on a CPU and on an H100 alike, with the
# same best tokens: the cause is rounding at ties, not the engine.
KL, TOP1 = 1e-2, 0.9
PROMPT, RUN, STEPS = 19, 4, 8
TOKENS, GROWTH = 20_000, 4 << 20


def agree(bundle: str, engine: str, other: str) -> dict[str, Any]:
    """Compare two engines of one bundle: logits after the same tokens, and greedy answers.

    Logits decide. Answers are only shown, because they may diverge at a tie that rounding decides.
    """
    (logits, answers), (other_logits, other_answers) = (
        _logits_and_answers(bundle, name) for name in (engine, other)
    )
    result = agreement(other_logits, logits)
    return {
        "right": result.kl_nats <= KL and result.top1 >= TOP1,
        "kl": result.kl_nats,
        "top1": result.top1,
        "equal_answers": sum(a == b for a, b in zip(answers, other_answers, strict=True)),
        "answers": {engine: answers, other: other_answers},
    }


def _logits_and_answers(bundle: str, engine: str) -> tuple[Logits, list[str]]:
    """Return logits [T, V] over every kind of run, and answers."""
    with load(bundle, engine=engine) as model:
        return _logits(model), [_answer(model, question) for question in QUESTIONS]


def _logits(model: Model) -> Logits:
    count = PROMPT + RUN + STEPS
    tokens = np.random.default_rng(3).integers(0, model.config.vocab_size, (1, count))
    return run_through(model.engine, tokens, PROMPT, RUN)


def _answer(model: Model, question: str) -> str:
    session = model.session(seed=1)
    generate = session.generate if model.template is None else session.chat
    return "".join(generate(question, max_tokens=32, temperature=0))


def grow(bundle: str, engine: str, tokens: int) -> dict[str, Any]:
    """Measure this process's memory, and the machine's available memory, over many answers.

    On a Jetson the GPU shares the machine's memory, so its leaks lower MemAvailable. Other programs
    change that too, so only this process's own memory decides.
    """
    with load(bundle, engine=engine) as model:
        generated, answers, session = 0, 0, model.session(seed=1)
        generate = session.generate if model.template is None else session.chat
        start: tuple[int, int | None] | None = None
        while generated < tokens:
            # the first quarter of the tokens warms up
            if start is None and 4 * generated >= tokens:
                start = memory.private_bytes(), memory.available_bytes()
            session.reset()
            generation = generate(
                QUESTIONS[answers % len(QUESTIONS)], max_tokens=64, temperature=1.0
            )
            for _ in generation:
                pass
            result = generation.result
            generated += max(1, len(result.tokens) if result else 1)
            answers += 1
        start_bytes, available_before = start or (memory.private_bytes(), memory.available_bytes())
        growth, available_after = memory.private_bytes() - start_bytes, memory.available_bytes()
    return {
        "right": growth <= GROWTH,
        "tokens": generated,
        "answers": answers,
        "grown_bytes": growth,
        "available_fell_bytes": None
        if available_before is None or available_after is None
        else available_before - available_after,
    }


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    agree_parser, grow_parser = verbs.add_parser("agree"), verbs.add_parser("grow")
    for subparser in (agree_parser, grow_parser):
        subparser.add_argument("bundle")
        subparser.add_argument("engine")
    agree_parser.add_argument("other")
    grow_parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    try:
        if options.verb == "agree":
            result = agree(options.bundle, options.engine, options.other)
        else:
            result = grow(options.bundle, options.engine, options.tokens)
    except EdgeError as problem:
        print(problem, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0 if result["right"] else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a driver that hangs while it is unloaded must not hide a result
