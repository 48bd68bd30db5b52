"""`python -m edge.apps.bench.drafts`: gain of every way of drafting, by kind of text.

The repository has no data sets. Public test sets are read from a folder under their usual names,
and missing ones are reported. Repetitive texts are made up.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import typer

from edge.apps.exits import leave
from edge.apps.measure.machine import OtherLoad
from edge.apps.measure.stopwatch import Say, without_collections
from edge.apps.measure.table import FigureTable, show, two
from edge.apps.options import AsJson, numbers, read_shape
from edge.apps.profile.draft_costs import measure as measure_costs
from edge.apps.profile.drafts import (
    NONE,
    Contest,
    Drafted,
    DraftRequest,
    DraftSide,
    steps_ahead,
)
from edge.apps.programs import CommandGroup
from edge.apps.prompts import read_prompts
from edge.errors import InputError
from edge.runtime.model import Model, load
from edge.text.template import Message

# way of drafting → drafter, tokens of a chain, branches of a tree
Ways = Mapping[str, tuple[str, int | None, tuple[int, ...] | Literal["ucb"] | None]]
WAYS = ("chain", "tree", "ucb", "bandit", "n-gram")
Facts = Mapping[str, Any]
app = CommandGroup()


@app.command()
def bench(
    target: Annotated[str, typer.Option(help="Target: a bundle or demonstration model.")] = "demo",
    draft: Annotated[str, typer.Option(help="Drafter with the same tokenizer.")] = "demo-draft",
    data: Annotated[
        Path | None,
        typer.Option(envvar=FOLDER_VARIABLE, help=f"Folder with any of {', '.join(FILES.values())}."
                     ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of every set.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens in an answer.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, after one of warm-up.")] = 3,
    chain: Annotated[int, typer.Option(min=1, help="Tokens of the fixed draft.")] = 3,
    tree: Annotated[str, typer.Option(help="Children at each depth of the tree.")] = "2,1,1",
    temperatures: Annotated[str, typer.Option(help="Sampling temperatures; 0 is greedy.")] = "0,1",
    threads: Annotated[int, typer.Option(min=0, help="0 is the runtime's default.")] = 0,
    ways: Annotated[str | None, typer.Option(help=f"Any of {', '.join(WAYS)}.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure drafting by a chain, a tree, the bandit and look-up, in turn with none."""
    shape = read_shape(None, tree, False)
    values = numbers(temperatures, float, "--temperatures", "0,1")
    names = WAYS if ways is None else ways.split(",")
    if wrong := [way for way in names if way not in WAYS]:
        raise InputError(f"unknown way {wrong[0]!r:.40} (choose {', '.join(WAYS)})", field="--ways")

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    others = OtherLoad()
    model, drafter = (load(bundle, threads=threads or None) for bundle in (target, draft))
    sets, absent = prompt_sets(data, prompts, fitting(model))
    all_ways: Ways = dict(zip(WAYS, (
        (draft, chain, None), (draft, None, shape or ()), (draft, None, "ucb"),
        (draft, None, None), ("ngram", None, None),
    ), strict=True))  # fmt: skip
    selected = {way: settings for way, settings in all_ways.items() if way in names}
    rows = [*_measure_ways(model, drafter, sets, selected, values, tokens, rounds, say)]
    facts = others.facts() | {
        "target": target,
        "draft": draft,
        "threads": threads,
        "rounds": rounds,
        "tokens": tokens,
        "rows": [asdict(row) for row in rows],
        "absent": absent,
    }
    if as_json:
        print(json.dumps(facts, indent=1, allow_nan=False))
    else:
        show(parts(facts))


# -- real drafts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftRow:
    """One way of drafting on one set of prompts.

    Attributes:
        tokens_per_s: median over rounds.
        speedup: tokens/s relative to no drafting, over all prompts within each round; median over
            rounds.
        median_prompt, slowest_tenth: speedup that half of the prompts reach, and nine of ten. The
            speedup of a prompt is a median over rounds.
        theoretical: speedup by the papers' formula, from acceptance and costs.
        overhead_share: share of time outside model runs.
    """

    prompts: str
    count: int
    temperature: float
    way: str
    tokens_per_s: float
    acceptance_length: float | None = None
    speedup: float | None = None
    median_prompt: float | None = None
    slowest_tenth: float | None = None
    theoretical: float | None = None
    overhead_share: float | None = None


def _measure_ways(
    model: Model,
    drafter: Model,
    sets: Mapping[str, tuple[str, ...]],
    ways: Ways,
    temperatures: Sequence[float],
    tokens: int,
    rounds: int,
    say: Say,
) -> Iterator[DraftRow]:
    """Measure every way on every set at every temperature, then on all public sets together."""
    results: dict[tuple[str, float], dict[str, DraftSide]] = {}
    with without_collections():
        for temperature in temperatures:
            for name, texts in sets.items():
                say(f"{name} at temperature {temperature:g}")
                sampling = {"temperature": temperature, "max_tokens": tokens, "seed": 0}
                requests = {
                    way: (DraftRequest(draft, chain, tree, texts, name), _drafter(draft, drafter))
                    for way, (draft, chain, tree) in ways.items()
                }
                results[name, temperature] = Contest(model, requests, sampling).answers(rounds, 1)
        say("single runs of both models")
        shapes = {
            shape
            for sides in results.values()
            for side in sides.values()
            for shape in side.speculation.shapes
        }
        costs = measure_costs(model.engine, drafter.engine, shapes, 5 * rounds + 10)
    public = [name for name in sets if name != REPEATS]
    for temperature in temperatures:
        if len(public) > 1:
            results[PUBLIC, temperature] = _merge([results[name, temperature] for name in public])
        for name, looping in ((OPEN, False), (LOOPING, True)):
            public_sides = (
                results.get((PUBLIC, temperature)) or results[next(iter(sets)), temperature]
            )
            if (selected := those(public_sides, looping)) is not None:
                results[name, temperature] = selected
        for name in (*sets, PUBLIC, OPEN, LOOPING):
            if (sides := results.get((name, temperature))) is None:
                continue
            plain = sides[NONE]
            count = len(plain.rounds[0])
            yield DraftRow(name, count, temperature, NONE, median(plain.rates()))
            for way, (draft, chain, tree) in ways.items():
                request = DraftRequest(draft, chain, tree, sets.get(name, ()), name)
                way_costs = costs.without_drafter() if draft == "ngram" else costs
                runs_cost = steps_ahead(model, _drafter(draft, drafter))
                drafted = Drafted(request, plain, sides[way], way_costs, runs_cost)
                yield DraftRow(
                    name, count, temperature, way, median(drafted.drafted.rates()),
                    drafted.speculation.acceptance_length, drafted.speedup, drafted.median_prompt,
                    drafted.slowest_tenth, drafted.theoretical, drafted.drafted.overhead_share,
                )  # fmt: skip


def _drafter(draft: str, drafter: Model) -> Model | Literal["ngram"]:
    return "ngram" if draft == "ngram" else drafter


def _merge(sets: Sequence[dict[str, DraftSide]]) -> dict[str, DraftSide]:
    """Merge the rounds of several sets, so that each has the prompts of all sets."""
    return {
        way: DraftSide([
            [run for runs in rounds for run in runs]
            for rounds in zip(*(side[way].rounds for side in sets), strict=True)
        ])
        for way in sets[0]
    }  # fmt: skip


def those(sides: dict[str, DraftSide], looping: bool) -> dict[str, DraftSide] | None:
    """Select the prompts whose plain answer loops, or the others; None without any."""
    first = sides[NONE].rounds[0]
    indices = [index for index, run in enumerate(first) if (run.repeated > LOOPS) == looping]
    if not indices:
        return None
    return {
        way: DraftSide([[runs[index] for index in indices] for runs in side.rounds])
        for way, side in sides.items()
    }


# -- prompts --------------------------------------------------------------------------------------

FOLDER_VARIABLE = "EDGE_EVAL_DATA"
FILES = {
    "MT-bench": "mt_bench.jsonl",
    "Vicuna": "vicuna_bench.jsonl",
    "GSM8K": "gsm8k.test.jsonl",
    "HumanEval": "humaneval.jsonl.gz",
    "WikiText": "wikitext2.test.txt",
}
REPEATS = "repeats"
PUBLIC = "public"  # the prompts of all files together
OPEN, LOOPING = "no loops", "loops"  # the public prompts, by their plain answer
LOOPS = 0.5  # share of repeated 4-grams above which an answer loops
_WORDS = 48  # words of an article to continue from

# made up for look-up drafting, which helps with text that repeats the prompt
REPEATING = (
    "Repeat after me, word for word: The red ball is in the green box. The green box is on the big "
    "table. The big table is in the little house.",
    "Change the name count to total and write the code again:\n"
    "def add(values):\n    count = 0\n    for value in values:\n        count = count + value\n"
    "    return count\n",
    "Say this three times: Once upon a time there was a little cat who liked to sit in the sun.",
    "Correct the spelling and write it again: The dog ran to the parc. The dog saw a bird in the "
    "parc. The bird flew away from the parc.",
)


def fitting(model: Model) -> Callable[[str], bool]:
    """Return whether a prompt, and two tokens to time, fit into a session of the model."""
    capacity = model.session(undo_levels=1).capacity

    def fits(prompt: str) -> bool:
        if capacity is None:
            return True
        template = model.template
        encoded = (
            model.tokenizer.encode(prompt) if template is None
            else template.encode([Message("user", prompt)])
        )  # fmt: skip
        return len(encoded) + 2 <= capacity

    return fits


def prompt_sets(
    folder: Path | None, count: int, fits: Callable[[str], bool] = bool
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return up to `count` fitting prompts, spread over each set, and why other sets are absent."""
    sets, absent = {}, {}
    for name, file in FILES.items():
        read: Callable[[Path], tuple[str, ...]] = _articles if name == "WikiText" else read_prompts
        if folder is None:
            absent[name] = f"no folder of test sets: give --data or {FOLDER_VARIABLE}"
            continue
        try:
            fit = tuple(filter(fits, read(folder / file)))
        except InputError as problem:
            absent[name] = str(problem)
            continue
        if fit:
            sets[name] = spread(fit, count)
        else:
            absent[name] = "no prompt fits into the target's context"
    sets[REPEATS] = spread(REPEATING, count)
    return sets, absent


def spread(prompts: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Pick `count` prompts at even distances, because test sets are sorted by kind."""
    if len(prompts) <= count:
        return prompts
    return tuple(prompts[index * len(prompts) // count] for index in range(count))


def _articles(path: Path) -> tuple[str, ...]:
    """Read the first words of all sufficiently long paragraphs."""
    lines = [line.split(" ") for line in read_prompts(path) if not line.startswith("=")]
    articles = tuple(" ".join(words[:_WORDS]) for words in lines if len(words) > 2 * _WORDS)
    if not articles:
        raise InputError("holds no long paragraph", file=path)
    return articles


# -- terminal -------------------------------------------------------------------------------------

_LEGEND = (
    "length  tokens per verify run",
    "×  tokens/s relative to none, all prompts together; calc: by the papers' formula",
    "p50, p10  × that half of the prompts reach, and all but the slowest tenth",
    "own  share of time outside model runs",
    "loops  prompts whose plain answer repeats half of its 4-grams; no loops: others",
)


def parts(facts: Facts) -> Iterator[FigureTable | str]:
    """Yield the table, its legend, and absent test sets."""
    others = facts["used_by_others"]
    yield (
        f"{facts['target']} with {facts['draft']}: answers of at most {facts['tokens']} tokens, "
        f"{facts['rounds']} rounds; {facts['threads'] or 'default'} threads on "
        f"{facts['machine']['cpu']}, {others:.0%} of it in use by others"
    )
    if not facts["trustworthy"]:
        yield "the machine was busy with something else: do not trust the times"
    yield _table(facts["rows"])
    yield from _LEGEND
    yield from (f"absent  {name}: {reason}" for name, reason in facts["absent"].items())


def _table(rows: Sequence[Facts]) -> FigureTable:
    cells = [
        (f"{row['count']} {row['prompts']}", f"{row['temperature']:g}", row["way"],
         two(row["acceptance_length"]), f"{row['tokens_per_s']:.0f}", two(row["speedup"]),
         two(row["median_prompt"]), two(row["slowest_tenth"]), two(row["theoretical"]),
         "" if row["overhead_share"] is None else f"{row['overhead_share']:.0%}")
        for row in rows
    ]  # fmt: skip
    head = ("prompts", "T", "drafts", "length", "t/s", "×", "p50", "p10", "calc", "own")
    return FigureTable(head, cells)


if __name__ == "__main__":
    leave(app)
