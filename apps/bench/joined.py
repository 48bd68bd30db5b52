"""`python -m edge.apps.bench.joined`: tokens per second of several conversations at once.

Each conversation is a thread that steps its own state, as in `edge serve`. The numbers of
conversations take turns, so that other load on the machine affects all of them.
"""

from __future__ import annotations

import json
import tempfile
import threading
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

import edge
from edge.apps.bench.folder import ModelFolder
from edge.apps.bench.models import SHAPES
from edge.apps.exits import leave
from edge.apps.measure.stopwatch import in_turn, seconds
from edge.apps.measure.table import FigureTable, show
from edge.apps.options import AsJson
from edge.apps.programs import CommandGroup
from edge.cpu import usable_cores
from edge.runtime.joined import JoinedEngine

Facts = dict[str, Any]
COUNTS = (1, 2, 4, 8)
PROMPT, STEPS = 32, 24
app = CommandGroup()


def measured(bundle: Path, threads: int, rounds: int) -> dict[int, float]:
    """Return the median total tokens per second, by number of conversations."""
    engine = JoinedEngine(edge.load(bundle, engine="cpu", threads=threads).engine)
    states = [engine.new_state() for _ in range(max(COUNTS))]
    for state in states:
        engine.run(np.ones((1, PROMPT), np.int64), state, commit=True)
    rates: dict[int, list[float]] = {count: [] for count in COUNTS}
    for number in range(rounds):
        for count in in_turn(COUNTS, number):
            _run_together(engine, states[:count], 4)
            spent = seconds(partial(_run_together, engine, states[:count], STEPS))
            rates[count].append(count * STEPS / spent)
    return {count: median(values) for count, values in rates.items()}


def _run_together(engine: JoinedEngine, states: list[Any], steps: int) -> None:
    def converse(state: Any) -> None:
        token = np.ones((1, 1), np.int64)
        for _ in range(steps):
            token[0, 0] = engine.run_greedy(token, state)[0]
        engine.leave(state)

    threads = [threading.Thread(target=converse, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def table(facts: Facts) -> FigureTable:
    """Return the table: a row per recipe, a column per number of conversations."""
    rows = []
    for recipe, rates in facts["tokens_per_s"].items():
        cells = [f"{rate:.0f} ({rate / rates['1']:.1f} x)" for rate in rates.values()]
        rows.append([recipe, *cells])
    heads = ["tokens/s", *(f"{count} at once" for count in COUNTS)]
    title = f"{facts['shape']}, {facts['threads']} threads, total of all conversations"
    return FigureTable(heads, rows, title=title)


@app.command()
def bench(
    shape: Annotated[str, typer.Option(help=f"Model to make: {', '.join(SHAPES)}.")] = "130m",
    recipes: Annotated[str, typer.Option(help="Recipes of edge export.")] = "w8a8,w4",
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 is one per core.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Folder to keep the models in.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure steps of 1, 2, 4 and 8 conversations at once on the `cpu` engine."""
    threads = threads or usable_cores()
    facts: Facts = {"shape": shape, "threads": threads, "tokens_per_s": {}}
    with tempfile.TemporaryDirectory(prefix="edge-bench-") as temporary:
        folder = ModelFolder(shape, keep or Path(temporary))
        for recipe in recipes.split(","):
            rates = measured(folder.bundle(recipe), threads, rounds)
            facts["tokens_per_s"][recipe] = {str(count): rate for count, rate in rates.items()}
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        show([table(facts)])


if __name__ == "__main__":
    leave(app)
