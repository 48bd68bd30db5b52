"""`python -m edge.apps.demo.talks BUNDLE`: conversations with a model, for its drafter to learn.

The runtime generates them, because a drafter must predict the runtime's answers. Users' turns come
from the training data, and the model writes the answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edge.apps.train.lines import go_on
from edge.errors import ContextFullError
from edge.runtime.model import load
from edge.runtime.session import Session

# Relative frequency of the sources of users' turns.
SOURCES = {
    "self_dialogue": 4.0,
    "synthetic_persona_chat": 2.0,
    "taskmaster4": 2.0,
    "gsm8k_chat": 2.0,
    "seed_tasks_chat": 1.0,
    "tldr": 1.0,
    "mbpp_chat": 0.5,
}
# Half of the conversations are greedy, the main use of the drafter.
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
LONGEST_TURN = 600  # characters

Message = dict[str, str]


@dataclass(frozen=True)
class ConversationPlan:
    """Parameters of conversations. A conversation depends on the seed and its index alone."""

    seed: int
    turns: int
    max_tokens: int


def user_turns(path: Path) -> dict[str, list[list[str]]]:
    """Read the users' turns of each conversation, by source, from a file like chat.train.jsonl."""
    by_source: dict[str, list[list[str]]] = {source: [] for source in SOURCES}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            turns = [m["content"].strip() for m in record["messages"] if m["role"] == "user"]
            turns = [text for text in turns if 0 < len(text) <= LONGEST_TURN]
            if turns and record["source"] in by_source:
                by_source[record["source"]].append(turns)
    return {source: talks for source, talks in by_source.items() if talks}


def talk(
    session: Session, prompts: dict[str, list[list[str]]], plan: ConversationPlan, index: int
) -> Iterator[Message]:
    """Yield the messages of one conversation. An unfinished answer ends it."""
    rng = random.Random(f"{plan.seed}/{index}")
    sources = sorted(prompts)
    source = rng.choices(sources, [SOURCES[s] for s in sources])[0]
    turns = rng.choice(prompts[source])
    # start anywhere, because first turns are nearly all greetings
    first = rng.randrange(len(turns))
    temperature = rng.choice(TEMPERATURES)
    seed = rng.getrandbits(32)
    session.reset()
    for text in turns[first : first + plan.turns]:
        try:
            result = session.chat(
                text, max_tokens=plan.max_tokens, temperature=temperature, top_p=1.0, seed=seed
            ).finish()
        except ContextFullError:
            return
        if not result.text.strip():
            return
        yield {"role": "user", "content": text}
        yield {"role": "assistant", "content": result.text}
        if result.finish_reason != "stop":
            return


def main(
    bundle: str,
    data: Annotated[Path, typer.Option(help="Folder with chat.train.jsonl")],
    out: Annotated[Path, typer.Option(help="Output file; continues an earlier run's")],
    talks: Annotated[int, typer.Option(help="Total number of conversations")] = 10_000,
    turns: Annotated[int, typer.Option(help="Maximum answers per conversation")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer")] = 128,
    seed: int = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
) -> None:
    """Let BUNDLE answer the users of the training data. Stop at any time; the same command resumes.

    Each line is a conversation, as in chat.train.jsonl. It is empty if no answer was given.
    """
    session = load(bundle, threads=threads).session(undo_levels=0)
    prompts = user_turns(data / "chat.train.jsonl")
    plan = ConversationPlan(seed, turns, max_tokens)

    def records(done: int) -> Iterator[dict[str, object]]:
        for index in range(done, talks):
            yield {"messages": list(talk(session, prompts, plan, index)), "source": "teacher"}

    go_on(out, records)


if __name__ == "__main__":
    typer.run(main)
