"""`python -m edge.apps.bench`: check, measure in turn, report."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from edge.apps.bench.models import SHAPES
from edge.apps.bench.peers import DEFAULT, PEERS
from edge.apps.bench.run import parts, right, run, write_models
from edge.apps.exits import REFUSED, leave
from edge.apps.measure.table import show
from edge.apps.options import AsJson
from edge.apps.programs import CommandGroup
from edge.cpu import usable_cores
from edge.errors import InputError

app = CommandGroup()


@app.command()
def bench(
    shape: Annotated[str, typer.Option(help=f"Model to make: {', '.join(SHAPES)}.")] = "130m",
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 7,
    threads: Annotated[int, typer.Option(min=0, help="Threads per peer; 0 is one per core.")] = 0,
    peers: Annotated[str, typer.Option(help=f"Any of {', '.join(PEERS)}.")] = ",".join(DEFAULT),
    profile: Annotated[
        bool, typer.Option("--profile", help="Break down our time even if every goal is met.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Folder to keep the models in and to reuse them from.")
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only write the models into --keep.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure decode, prefill and a short run, in turn with the installed peers.

    Exit code 1: one of our results is wrong.
    """
    if prepare:
        if keep is None:
            raise InputError(
                "--prepare needs a folder for the models",
                field="--keep",
                remedy="give --keep FOLDER",
            )
        write_models(shape, _names(peers), keep)
        return
    with tempfile.TemporaryDirectory(prefix="edge-bench-") as temporary:
        facts = run(
            shape,
            _names(peers),
            keep or Path(temporary),
            threads=threads or usable_cores(),
            rounds=rounds,
            profiled=profile,
            command=shlex.join(["python", "-m", "edge.apps.bench", *sys.argv[1:]]),
            say=lambda text: print(text, file=sys.stderr),
        )
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        show(parts(facts))
    if not right(facts):
        raise typer.Exit(REFUSED)


def _names(peers: str) -> list[str]:
    return [name for name in (part.strip() for part in peers.split(",")) if name]


if __name__ == "__main__":
    leave(app)
