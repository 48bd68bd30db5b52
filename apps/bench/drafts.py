"""`python -m edge.apps.bench.drafts`: what every way of drafting gains, on which texts."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from edge.apps.bench import simulated
from edge.apps.bench.draft_prompts import FILES, FOLDER_VARIABLE, PUBLIC, REPEATS, prompt_sets
from edge.apps.bench.draft_table import Report, rows_of
from edge.apps.bench.shapes import SHAPES, shape_named
from edge.apps.exits import exit_code_of
from edge.apps.measure.machine import OtherLoad
from edge.apps.measure.stopwatch import Say, without_collections
from edge.apps.options import read_shape
from edge.apps.profile.draft_costs import DraftCosts
from edge.apps.profile.draft_costs import measure as measure_costs
from edge.apps.profile.drafts import (
    NONE,
    Contest,
    Drafted,
    DraftRequest,
    DraftSide,
    steps_ahead,
)
from edge.errors import InputError
from edge.runtime.model import Model, load

if TYPE_CHECKING:
    from edge.apps.bench.peers import Workspace

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
ACCEPTANCE = 0.7
SIMULATED_DEPTHS = (2, 4)


@app.command()
def bench(
    target: Annotated[str, typer.Option(help="Who answers: a bundle or a demonstration.")] = "demo",
    draft: Annotated[str, typer.Option(help="Who drafts, of the same tokenizer.")] = "demo-draft",
    data: Annotated[
        Path | None,
        typer.Option(envvar=FOLDER_VARIABLE, help=f"Folder of {', '.join(FILES.values())}; those "
                     "absent are left out."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of every set.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Most of an answer.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Of every prompt, after one to warm up.")] = 3,
    chain: Annotated[int, typer.Option(min=1, help="Tokens of the fixed draft.")] = 3,
    tree: Annotated[str, typer.Option(help="Children at each depth of the tree.")] = "2,1,1",
    temperatures: Annotated[str, typer.Option(help="To sample with; 0 is greedy.")] = "0,1",
    threads: Annotated[int, typer.Option(min=0, help="0 is what the runtime takes.")] = 0,
    simulate: Annotated[
        str, typer.Option(help=f"Shape of the simulation: none, {', '.join(SHAPES)}.")
    ] = "130m",
    recipe: Annotated[
        str, typer.Option(help="Its recipes. A run of several tokens gives the bits of steps in "
                          "fp32 and w8a8; in others 'same' says how far.")
    ] = "fp32,w8a8",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:  # fmt: skip
    """Measure drafting by a chain, a tree, the bandit and look-up, in turn with none, and hold a
    drafter of known acceptance against the papers' formula.
    """
    shape = read_shape(None, tree, False)
    heats, recipes = _numbers(temperatures), tuple(dict.fromkeys(recipe.split(",")))
    if simulate != NONE:
        _check_simulation(simulate, recipes)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    report = Report(target, draft, threads, rounds, tokens)
    others = OtherLoad()
    _real(report, data, prompts, chain, shape or (), heats, say)
    if simulate != NONE:
        report.simulated = _simulated(simulate, recipes, threads, tokens, rounds, say)
        report.shape = simulate
    report.others = others.share()
    if as_json:
        print(json.dumps(report.to_dict(), indent=1, allow_nan=False))
    else:
        report.show(Console())


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text!r:.40} is no list of numbers", field="--temperatures") from None


def _real(
    report: Report, data: Path | None, prompts: int, chain: int, tree: tuple[int, ...],
    temperatures: tuple[float, ...], say: Say,
) -> None:  # fmt: skip
    """Fill in the rows of all sets and temperatures."""
    model = load(report.target, threads=report.threads or None)
    drafter = load(report.draft, threads=report.threads or None)
    sets, report.absent = prompt_sets(data, prompts)
    found: dict[tuple[str, float], dict[str, DraftSide]] = {}
    ways: dict[tuple[str, float], dict[str, tuple[DraftRequest, Model | Literal["ngram"]]]] = {}
    with without_collections():
        for temperature in temperatures:
            for name, texts in sets.items():
                say(f"{name} at temperature {temperature:g}")
                this = ways[name, temperature] = {
                    "chain": (DraftRequest(report.draft, chain, None, texts, name), drafter),
                    "tree": (DraftRequest(report.draft, None, tree, texts, name), drafter),
                    "bandit": (DraftRequest(report.draft, None, None, texts, name), drafter),
                    "n-gram": (DraftRequest("ngram", None, None, texts, name), "ngram"),
                }
                sampling = {
                    "temperature": temperature, "max_tokens": report.tokens, "seed": 0,
                }  # fmt: skip
                contest = Contest(model, this, sampling)
                found[name, temperature] = contest.answers(report.rounds, 1)
        say("runs of both models, one by one")
        sides = [side for ways in found.values() for side in ways.values()]
        shapes = {shape for side in sides for shape in side.speculation.shapes}
        costs = measure_costs(model.engine, drafter.engine, shapes, 5 * report.rounds + 10)
    for temperature in temperatures:
        public = [name for name in sets if name != REPEATS]
        if len(public) > 1:
            found[PUBLIC, temperature] = _together([found[name, temperature] for name in public])
            ways[PUBLIC, temperature] = ways[public[0], temperature]
        for name in (*sets, PUBLIC):
            if (side := found.get((name, temperature))) is None:
                continue
            drafted = {
                way: Drafted(
                    request, side[NONE], side[way], _of(costs, who), steps_ahead(model, who)
                )
                for way, (request, who) in ways[name, temperature].items()
            }
            report.rows += rows_of(name, temperature, side[NONE], drafted)


def _together(sets: Sequence[dict[str, DraftSide]]) -> dict[str, DraftSide]:
    """The same rounds with the prompts of several sets in each."""
    return {
        way: DraftSide([
            [run for runs in several for run in runs]
            for several in zip(*(side[way].rounds for side in sets), strict=True)
        ])
        for way in sets[0]
    }  # fmt: skip


def _of(costs: DraftCosts, who: Model | Literal["ngram"]) -> DraftCosts:
    return costs.without_drafter() if who == "ngram" else costs


def _check_simulation(shape: str, recipes: Sequence[str]) -> None:
    """Refuse what there is not before anything is measured."""
    from edge.export.recipes import recipe

    shape_named(shape)
    for name in recipes:
        recipe(name, "--recipe")


def _simulated(
    shape: str, recipes: Sequence[str], threads: int, tokens: int, rounds: int, say: Say
) -> list[simulated.Simulated]:
    from edge.apps.bench.peers import Workspace

    found: list[simulated.Simulated] = []
    with tempfile.TemporaryDirectory(prefix="edge-bench-") as folder:
        workspace = Workspace(shape_named(shape), Path(folder))
        for recipe in recipes:
            say(f"making {shape} with random weights in {recipe}")
            model = load(_random_bundle(workspace, recipe), threads=threads or None)
            found += simulated.simulate(
                model.engine, SIMULATED_DEPTHS, acceptance=ACCEPTANCE, tokens=tokens,
                rounds=rounds, recipe=recipe, say=say,
            )  # fmt: skip
    return found


def _random_bundle(workspace: Workspace, recipe: str) -> Path:
    """Scales of activations are found on a little text: they make no run quicker or slower."""
    from edge.export.checkpoint import open_checkpoint
    from edge.export.exporter import export_checkpoint
    from edge.export.recipes import mixture

    source, out = workspace.checkpoint, workspace.path / f"simulated-{recipe}"
    needs_text = bool(mixture(open_checkpoint(source).config, recipe).observations())
    export_checkpoint(
        source, out, quant=recipe, verify=False,
        calibrate_sequences=2 if needs_text else None, calibrate_length=64 if needs_text else None,
    )  # fmt: skip
    return out


if __name__ == "__main__":
    sys.exit(exit_code_of(app))
