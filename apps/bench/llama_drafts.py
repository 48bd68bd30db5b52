"""`python -m edge.apps.bench.llama_drafts BUNDLE GGUF`: look-ups here and in llama.cpp.

The same model as our bundle and as a GGUF file answers the same prompts greedily, with and without
look-up in the prompt. Each program is compared with itself, in turn within one run.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol

import typer

from edge.apps.bench.drafts import (
    FILES,
    FOLDER_VARIABLE,
    LOOPING,
    LOOPS,
    OPEN,
    PUBLIC,
    REPEATS,
    fitting,
    prompt_sets,
)
from edge.apps.bench.peers import INSTALL_LLAMA
from edge.apps.exits import leave
from edge.apps.measure.machine import OtherLoad, installed
from edge.apps.measure.statistics import percentile
from edge.apps.measure.stopwatch import PAUSE, Say, in_turn, without_collections
from edge.apps.measure.table import FigureTable, show, two
from edge.apps.options import AsJson, numbers
from edge.apps.profile.drafts import repeated_share
from edge.apps.programs import CommandGroup
from edge.cpu import usable_cores
from edge.errors import EngineError, InputError
from edge.runtime.model import Model, load
from edge.runtime.session_options import SessionOptions
from edge.text.template import Message

PLAIN, BANDIT = "plain", "look-up, bandit"
EDGE, LLAMA = "edge", "llama.cpp"
LONGEST_NGRAM = 2  # llama-cpp-python's default
app = CommandGroup()


@app.command()
def bench(
    target: Annotated[str, typer.Argument(help="Our bundle of the model.")],
    gguf: Annotated[Path, typer.Argument(help="The same model as a GGUF file.")],
    data: Annotated[
        Path | None,
        typer.Option(envvar=FOLDER_VARIABLE, help=f"Folder with any of {', '.join(FILES.values())}."
                     ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of every set.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens in an answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, after one answer to warm up.")] = 1,
    look_ups: Annotated[str, typer.Option(help="Lengths of fixed drafts.")] = "2,10",
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is one per core.")] = 0,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure greedy look-up drafting of both programs against their own plain answers."""
    lengths = numbers(look_ups, int, "--look-ups", "2,10")
    if not installed("llama-cpp-python"):
        raise InputError("needs llama-cpp-python", field=LLAMA, remedy=INSTALL_LLAMA)
    if not gguf.is_file():
        raise InputError("is not a file", file=gguf, remedy="give the model as a GGUF file")

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    others, used = OtherLoad(), threads or usable_cores()
    model = load(target, threads=used)
    texts, absent = prompt_sets(data, prompts, fitting(model))
    sets = {name: tuple(encoded(model, text) for text in each) for name, each in texts.items()}
    longest = max(len(ids) for each in sets.values() for ids in each)
    writers = make_writers(model, gguf, lengths, longest + tokens + max(lengths) + 1, used)
    results = answer_all(writers, sets, tokens, rounds, say)
    facts = others.facts() | {
        "target": target,
        "gguf": gguf.name,
        "versions": {name: installed(name) for name in ("mamba-edge", "llama-cpp-python")},
        "threads": used,
        "rounds": rounds,
        "tokens": tokens,
        "rows": [asdict(row) for row in rows_of(results)],
        "absent": absent,
    }
    if as_json:
        print(json.dumps(facts, indent=1, allow_nan=False))
    else:
        show(parts(facts))


def encoded(model: Model, text: str) -> list[int]:
    """Return the token ids of a prompt as a user's first message, or of a running text."""
    if model.template is None:
        return list(model.tokenizer.encode(text))
    return list(model.template.encode([Message("user", text)]))


# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftedAnswer:
    """One answer.

    Attributes:
        tokens: its token ids, with the end token if it was reached.
        seconds: seconds from the first token to the last.
        rounds: number of runs that verified a draft.
        drafted_tokens: tokens that these runs yielded, the target's own included.
    """

    tokens: tuple[int, ...]
    seconds: float
    rounds: int = 0
    drafted_tokens: int = 0


class Writer(Protocol):
    """A program with the model loaded that answers prompts in one way."""

    def write(self, prompt: Sequence[int], most: int) -> DraftedAnswer:
        """Return the greedy answer of at most `most` tokens to a prompt."""
        ...


class EdgeWriter:
    """This runtime: without drafts, or with look-ups of some length, or chosen by the bandit."""

    def __init__(self, model: Model, way: str, length: int | None = None) -> None:
        options: SessionOptions = {"undo_levels": 1}
        if way != PLAIN:
            options |= {"draft": "ngram", "draft_tokens": length}
        self._session = model.session(**options)

    def write(self, prompt: Sequence[int], most: int) -> DraftedAnswer:
        self._session.reset()
        result = self._session.generate(
            prompt, max_tokens=most, temperature=0, repetition_penalty=1
        ).finish()
        stamps, figures = result.timings.token_s, result.speculation
        rounds, accepted = (figures.rounds, figures.accepted) if figures else (0, 0)
        seconds = stamps[-1] - stamps[0] if stamps else 0.0
        return DraftedAnswer(result.tokens, seconds, rounds, rounds + accepted)


class LlamaWriter:
    """llama.cpp through llama-cpp-python, without drafts or with its prompt look-up decoding."""

    def __init__(
        self, path: Path, model: Model, capacity: int, threads: int, length: int | None = None
    ) -> None:
        """Load the file. `model`: our bundle of it, `length`: longest draft.

        Raises EngineError if llama.cpp cannot load it, InputError if it is another model.
        """
        llama: Any = importlib.import_module("llama_cpp")
        speculative: Any = importlib.import_module("llama_cpp.llama_speculative")
        self._look_up: CountedLookUp | None = None
        if length is not None:
            self._look_up = CountedLookUp(
                speculative.LlamaPromptLookupDecoding(LONGEST_NGRAM, length)
            )
        try:
            self._llama = llama.Llama(
                str(path), n_ctx=capacity, n_batch=capacity, n_threads=threads,
                n_threads_batch=threads, draft_model=self._look_up, verbose=False,
                # llama.cpp's default, not the package's: without it a run rounds unlike its steps
                flash_attn=True,
            )  # fmt: skip
        except ValueError as problem:
            raise EngineError(f"llama.cpp: {problem}", file=path) from None
        if self._llama.n_vocab() != model.config.vocab_size:
            raise InputError(
                f"has {self._llama.n_vocab()} tokens, not the bundle's {model.config.vocab_size}",
                file=path, remedy="give the GGUF file that the bundle was made of",
            )  # fmt: skip
        self._ends = frozenset(model.tokenizer.eos)

    def write(self, prompt: Sequence[int], most: int) -> DraftedAnswer:
        written: list[int] = []
        stamps: list[float] = []
        drafts: list[tuple[int, int]] = []
        if self._look_up is not None:
            self._look_up.drafts = drafts
        self._llama.reset()
        for token in self._llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            stamps.append(time.perf_counter())
            written.append(int(token))
            if token in self._ends or len(written) == most:
                break
        rounds, tokens = verified(drafts, len(prompt) + len(written))
        return DraftedAnswer(tuple(written), stamps[-1] - stamps[0], rounds, tokens)


class CountedLookUp:
    """Drafter of llama-cpp-python that also notes each draft.

    Attributes:
        drafts: of each draft, the tokens of text before it and its own.
    """

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.drafts: list[tuple[int, int]] = []

    def __call__(self, input_ids: Any, /, **options: Any) -> Any:
        draft = self._drafter(input_ids, **options)
        self.drafts.append((len(input_ids), len(draft)))
        return draft


def verified(drafts: Sequence[tuple[int, int]], end: int) -> tuple[int, int]:
    """Return the runs that verified a draft, and the tokens they yielded.

    Args:
        drafts: of each draft, the tokens of text before it and its own, which may be none.
        end: tokens of text after the last run.
    """
    places = [*(start for start, _ in drafts), end]
    runs = zip(drafts, pairwise(places), strict=True)
    yields = [after - before for (_, length), (before, after) in runs if length]
    return len(yields), sum(yields)


Ways = dict[tuple[str, str], Writer]


def make_writers(
    model: Model, gguf: Path, lengths: Sequence[int], capacity: int, threads: int
) -> Ways:
    """Return every way of both programs, by program and way. A program's plain way comes first."""
    fixed = {f"look-up of {length}": length for length in lengths}
    ways: Ways = {(EDGE, PLAIN): EdgeWriter(model, PLAIN)}
    ways |= {(EDGE, way): EdgeWriter(model, way, length) for way, length in fixed.items()}
    ways[EDGE, BANDIT] = EdgeWriter(model, BANDIT)
    ways[LLAMA, PLAIN] = LlamaWriter(gguf, model, capacity, threads)
    for way, length in fixed.items():
        ways[LLAMA, way] = LlamaWriter(gguf, model, capacity, threads, length)
    return ways


# -- measurement ----------------------------------------------------------------------------------

# set → (program, way) → rounds → answers by prompt
Results = Mapping[str, Mapping[tuple[str, str], list[list[DraftedAnswer]]]]


def answer_all(
    ways: Ways,
    sets: Mapping[str, Sequence[Sequence[int]]],
    most: int,
    rounds: int,
    say: Say,
) -> Results:
    """Answer every prompt in every way, in turn, with a different way first each time."""
    results: dict[str, dict[tuple[str, str], list[list[DraftedAnswer]]]] = {}
    with without_collections():
        for writer in ways.values():
            writer.write(next(iter(sets.values()))[0], most)
        for name, prompts in sets.items():
            results[name] = {way: [[] for _ in range(rounds)] for way in ways}
            for number in range(rounds):
                say(f"{name}, round {number + 1} of {rounds}")
                for index, prompt in enumerate(prompts):
                    for way in in_turn([*ways], number + index):
                        time.sleep(PAUSE)
                        results[name][way][number].append(ways[way].write(prompt, most))
    return results


@dataclass(frozen=True)
class LlamaRow:
    """One way of one program on one set of prompts; see `DraftRow`.

    Attributes:
        speedup: relative to the program's own plain way.
        same: prompts whose answer is the program's plain one, token for token, in every round.
    """

    prompts: str
    count: int
    program: str
    way: str
    tokens_per_s: float
    acceptance_length: float | None = None
    speedup: float | None = None
    median_prompt: float | None = None
    slowest_tenth: float | None = None
    same: int | None = None


def rows_of(results: Results) -> Iterator[LlamaRow]:
    """Yield a row per set, program and way, then of all public sets, by whether answers loop.

    An answer of a single token has no time, so its prompt is left out of that program's rows.
    """
    public = [name for name in results if name != REPEATS] or [*results]
    ways = [*next(iter(results.values()))]
    merged = {
        way: [
            [*chain.from_iterable(parts)]
            for parts in zip(*(results[name][way] for name in public), strict=True)
        ]
        for way in ways
    }
    for name, answers in (*results.items(), (PUBLIC, merged), (OPEN, merged), (LOOPING, merged)):
        for program, way in ways:
            plain, drafted = answers[program, PLAIN], answers[program, way]
            chosen = [
                index
                for index, answer in enumerate(plain[0])
                if min(run[index].seconds for run in (*plain, *drafted)) > 0
                and (name not in (OPEN, LOOPING) or _loops(answer) == (name == LOOPING))
            ]
            if chosen:
                only = [[[run[i] for i in chosen] for run in side] for side in (plain, drafted)]
                yield _row(name, program, way, *only)


def _loops(answer: DraftedAnswer) -> bool:
    return repeated_share(answer.tokens) > LOOPS


def _row(
    name: str,
    program: str,
    way: str,
    plain: list[list[DraftedAnswer]],
    drafted: list[list[DraftedAnswer]],
) -> LlamaRow:
    rates = [_rate(run) for run in drafted]
    row = LlamaRow(name, len(plain[0]), program, way, median(rates))
    if way == PLAIN:
        return row
    by_prompt = [
        median(_rate([run[i]]) / _rate([own[i]]) for run, own in zip(drafted, plain, strict=True))
        for i in range(len(plain[0]))
    ]
    written = [answer for run in drafted for answer in run]
    rounds = sum(answer.rounds for answer in written)
    return LlamaRow(
        name, row.count, program, way, row.tokens_per_s,
        sum(answer.drafted_tokens for answer in written) / rounds if rounds else None,
        median(rate / _rate(own) for rate, own in zip(rates, plain, strict=True)),
        median(by_prompt), percentile(by_prompt, 0.1),
        sum(
            all(run[i].tokens == own[i].tokens for run, own in zip(drafted, plain, strict=True))
            for i in range(row.count)
        ),
    )  # fmt: skip


def _rate(answers: Sequence[DraftedAnswer]) -> float:
    """Return tokens per second after the first token of each answer."""
    return sum(len(a.tokens) - 1 for a in answers) / sum(a.seconds for a in answers)


# -- terminal -------------------------------------------------------------------------------------

_LEGEND = (
    "length  tokens per verify run, the target's own included",
    "×  tokens/s relative to the same program's plain way, all prompts together",
    "p50, p10  × that half of the prompts reach, and all but the slowest tenth",
    "same  answers that equal the same program's plain answer, token for token",
    "loops  prompts whose plain answer repeats half of its 4-grams; no loops: others",
)


def parts(facts: Mapping[str, Any]) -> Iterator[FigureTable | str]:
    """Yield the table, its legend, and absent test sets."""
    others, versions = facts["used_by_others"], facts["versions"]
    yield (
        f"{facts['target']} here, {facts['gguf']} in llama-cpp-python "
        f"{versions['llama-cpp-python']}: answers of at most {facts['tokens']} tokens"
    )
    yield (
        f"rounds {facts['rounds']}, threads {facts['threads']} on {facts['machine']['cpu']}, "
        f"{others:.0%} of it in use by others"
    )
    if not facts["trustworthy"]:
        yield "the machine was busy with something else: do not trust the times"
    cells = [
        (f"{row['count']} {row['prompts']}", row["program"], row["way"],
         two(row["acceptance_length"]), f"{row['tokens_per_s']:.0f}", two(row["speedup"]),
         two(row["median_prompt"]), two(row["slowest_tenth"]),
         "" if row["same"] is None else f"{row['same']} of {row['count']}")
        for row in facts["rows"]
    ]  # fmt: skip
    head = ("prompts", "program", "way", "length", "t/s", "×", "p50", "p10", "same")
    yield FigureTable(head, cells, words=(0, 1, 2))
    yield from _LEGEND
    yield from (f"absent  {name}: {reason}" for name, reason in facts["absent"].items())


if __name__ == "__main__":
    leave(app)
