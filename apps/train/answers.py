"""`edge train answers MODEL --prompts FILE… -o ANSWERS`: write a model's answers, in batches.

A token takes a third as long in a batch of sixteen sequences as alone. Every conversation ends with
its first answer. With `--device`, a checkpoint answers in PyTorch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from numpy.typing import NDArray

from edge.apps import exporter, options
from edge.apps.terminal import say
from edge.apps.train.lines import go_on
from edge.errors import InputError
from edge.runtime.model import Model, load, resolve
from edge.runtime.state import State
from edge.text.template import ChatTemplate, Message
from edge.text.tokenizer import Tokenizer

Ids = NDArray[np.int64]

TEMPERATURES = (0.0, 0.0, 0.7, 1.0, 1.0)
LONGEST = 900  # characters of a prompt
FEW = 4  # a batch ends when at most one in FEW of its answers is unfinished


@dataclass(frozen=True)
class Asked:
    """Prompt: its text, its token ids with the template's, and the temperature of its answer."""

    text: str
    ids: tuple[int, ...]
    temperature: float


class Drawn(Protocol):
    """Source of prompts."""

    def draw(self, rng: random.Random) -> str: ...


class Turns:
    """User messages of conversation files, drawn from every "source" equally often."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the files. Raises InputError for lines that are no conversation, or no messages."""
        by_source: dict[str, list[str]] = {}
        for file in files:
            for number, line in enumerate(_read_lines(file), 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    turns = [m["content"] for m in record["messages"] if m["role"] == "user"]
                    texts = by_source.setdefault(str(record.get("source", file.name)), [])
                    texts += [text.strip()[:LONGEST] for text in turns if text.strip()]
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    raise InputError(
                        f"line {number} of {file} is not a conversation",
                        field="--prompts",
                        remedy='give lines of {"messages": [{"role": "user", "content": …}]}',
                    ) from None
        self._turns = [texts for texts in by_source.values() if texts]
        if not self._turns:
            raise InputError("holds no messages of users", field="--prompts")

    def draw(self, rng: random.Random) -> str:
        return rng.choice(rng.choice(self._turns))


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeError) as problem:
        reason = getattr(problem, "strerror", None) or "is not UTF-8"
        raise InputError(f"{file}: {reason}", field="--prompts") from None


class Author(Protocol):
    """A model that reads several sequences in step and chooses the next token of each."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    def begin(self, batch: int, longest: int, seed: str) -> None:
        """Forget what was read; `batch` sequences of at most `longest` tokens follow."""
        ...

    def choose(self, tokens: Ids, heat: NDArray[np.float32]) -> Ids:
        """Read tokens [B, T]; return the next of each sequence [B], at temperatures `heat` [B]."""
        ...


class BundleAuthor:
    """A bundle, on its engine."""

    def __init__(self, model: Model) -> None:
        self.tokenizer, self.template, self._engine = model.tokenizer, model.template, model.engine
        self._state: State | None = None
        self._size = (0, 0)

    def begin(self, batch: int, longest: int, seed: str) -> None:
        if self._state is None or self._size != (batch, longest):
            self._state = self._engine.new_state(batch=batch, window=1, capacity=longest)
            self._size = (batch, longest)
        self._state.clear()
        self._rng = np.random.default_rng(list(seed.encode()))

    def choose(self, tokens: Ids, heat: NDArray[np.float32]) -> Ids:
        assert self._state is not None
        for start in range(0, tokens.shape[1], self._engine.chunk):
            chunk = tokens[:, start : start + self._engine.chunk]
            logits = self._engine.run(chunk, self._state, commit=True)
        return choose(logits[:, -1], heat, self._rng)


def groups(
    template: ChatTemplate | None, prompts: Drawn, seed: int, count: int, size: int
) -> list[list[Asked]]:
    """Draw `count` prompts; return shuffled groups of `size` prompts of nearly equal length.

    A prompt occurs at most once per temperature. An incomplete group, of the longest, is dropped.
    """
    if template is None:
        raise InputError("has no chat template", field="bundle")
    rng = random.Random(f"{seed}/prompts")
    drawn: dict[Asked, None] = {}
    for _ in range(count):
        text = prompts.draw(rng)
        if not text.strip():
            continue
        ids = template.encode([Message("user", text)])
        drawn[Asked(text, tuple(ids), rng.choice(TEMPERATURES))] = None
    by_length = sorted(drawn, key=lambda prompt: len(prompt.ids))
    batches = [
        by_length[start : start + size] for start in range(0, len(by_length) - size + 1, size)
    ]
    rng.shuffle(batches)
    return batches


def answers(
    author: Author, group: Sequence[Asked], seed: str, longest: int, most: int
) -> list[list[int]]:
    """Return one answer per prompt, of at most `most` tokens, with its end token if reached.

    The sequences go in step, so an answer begins while longer prompts are still being read.
    """
    heat = np.array([prompt.temperature for prompt in group], np.float32)
    written: list[list[int]] = [[] for _ in group]
    unfinished = set(range(len(group)))
    shortest = min(len(prompt.ids) for prompt in group)
    author.begin(len(group), longest, seed)
    chosen = author.choose(np.array([prompt.ids[:shortest] for prompt in group], np.int64), heat)
    for position in range(shortest, longest + 1):
        for row, prompt in enumerate(group):
            if position < len(prompt.ids):
                chosen[row] = prompt.ids[position]
            elif row in unfinished:
                written[row].append(int(chosen[row]))
                if written[row][-1] in author.tokenizer.eos or len(written[row]) == most:
                    unfinished.discard(row)
        if len(unfinished) <= len(group) // FEW or position == longest:
            break
        chosen = author.choose(chosen[:, None], heat)
    return written


def choose(logits: NDArray[np.float32], heat: NDArray[np.float32], rng: np.random.Generator) -> Ids:
    """Choose a token per row of logits [B, V]: the likeliest at temperature 0, else sampled."""
    chosen: Ids = logits.argmax(-1).astype(np.int64)
    for row in np.flatnonzero(heat):
        weights = np.exp((logits[row] - logits[row, chosen[row]]) / heat[row]).cumsum()
        chosen[row] = min(np.searchsorted(weights, rng.random() * weights[-1]), len(weights) - 1)
    return chosen


def _too_few() -> InputError:
    return InputError(
        "has too few prompts to fill a batch of --together", field="--prompts",
        remedy="give more prompts, a larger --count, or a smaller --together",
    )  # fmt: skip


def say_all(
    author: Author, asked: list[list[Asked]], done: int, seed: int, most: int
) -> Iterator[list[list[int]]]:
    """Yield the answers of one group at a time as token ids, from group `done` on."""
    if not asked:
        raise _too_few()
    longest = max(len(prompt.ids) for group in asked for prompt in group) + most
    for index in range(done, len(asked)):
        yield answers(author, asked[index], f"{seed}/{index}", longest, most)


def conversations(
    author: Author, asked: list[list[Asked]], done: int, seed: int, most: int
) -> Iterator[dict[str, Any]]:
    """Yield one prompt and its answer at a time, without the first `done`."""
    if not asked:
        raise _too_few()
    group, offset = divmod(done, len(asked[0]))
    for index, written in enumerate(say_all(author, asked, group, seed, most), group):
        for prompt, ids in list(zip(asked[index], written, strict=True))[offset:]:
            answer = author.tokenizer.decode([i for i in ids if i not in author.tokenizer.eos])
            turns = (("user", prompt.text), ("assistant", answer))
            messages = [{"role": role, "content": content} for role, content in turns]
            yield {"messages": messages, "temperature": prompt.temperature}
        offset = 0


def write_answers(
    model: Annotated[
        str, typer.Argument(help="What answers: a bundle, or with --device a checkpoint.")
    ],
    prompts: Annotated[
        list[Path],
        typer.Option(help="Conversations (.jsonl) with the user messages; may be repeated."),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="Answers to write (.jsonl); resumes an earlier run."),
    ],
    count: Annotated[int, typer.Option(min=1, help="Number of prompts to draw.")] = 10_000,
    together: Annotated[int, typer.Option(min=1, help="Answers generated at once.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 96,
    seed: Annotated[int, typer.Option(help="Seed of prompts, temperatures and answers.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="Run a checkpoint in PyTorch on this device, such as cuda.")
    ] = None,
    threads: options.Threads = None,
) -> None:
    """Write a model's answers for drafters and hybrids to learn from.

    Stop at any time: the same command resumes. Two of five answers are greedy, the others are
    sampled at temperature 0.7 or 1.
    """
    source = Turns(prompts)
    author = open_author(resolve(model), device, threads)
    batches = groups(author.template, source, seed, count, together)
    if not batches:  # before the file is created
        raise _too_few()
    go_on(output, lambda done: conversations(author, batches, done, seed, max_tokens))
    say(output)


def open_author(path: Path, device: str | None, threads: int | None) -> Author:
    is_bundle = (path / "manifest.json").is_file()
    if device is None and path.exists() and not is_bundle:
        raise InputError(
            f"{path} is not a bundle", field="model",
            remedy="answer in PyTorch by --device cpu or cuda if it is a checkpoint",
        )  # fmt: skip
    if device is None:
        return BundleAuthor(load(path, threads=threads))
    if is_bundle:
        raise InputError(
            f"{path} is a bundle, which runs on an engine", field="--device",
            remedy="leave it out, or give a checkpoint",
        )  # fmt: skip
    exporter.needs("a checkpoint's answers")
    from edge.export.distill.author import CheckpointAuthor

    with options.named_as_options():
        return CheckpointAuthor(path, device, threads)
