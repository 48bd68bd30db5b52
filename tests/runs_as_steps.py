"""How often a run of several tokens gives another greedy token than single steps: `python -m
tests.runs_as_steps 100000 RECIPE… [--engine cpu] [--engine ort]`.

Text that no demo model was trained on is read twice: token by token, and in runs as drafting makes
them, of 2 to 8 tokens, some of which are rewound and read again. A recipe is one of `edge export`,
applied to demo-fp16, or the name of a bundle.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import edge
from edge.export.exporter import export_checkpoint
from edge.runtime.model import EMBEDDED, Model, resolve

WINDOW = 8


def measured(model: Model, count: int) -> dict[str, Any]:
    """Return how many of `count` tokens are followed by another token, and how far logits moved."""
    engine, rng = model.engine, random.Random(1)
    text = " ".join(pydoc_data.topics.topics.values())
    ids = model.tokenizer.encode(text[: 6 * count])[:count]
    steps, runs = (engine.new_state(window=WINDOW) for _ in range(2))
    here = other = moved = 0
    most = gap = 0.0
    while here < len(ids) - WINDOW:
        if steps.capacity is not None and steps.position + WINDOW > steps.capacity:
            steps.clear()
            runs.clear()
        size = rng.randint(2, WINDOW)
        kept = rng.randint(1, size)
        rows = engine.run(np.asarray([ids[here : here + size]]), runs, rows="all")[0].copy()
        runs.rewind(size - kept)
        for row, token in zip(rows[:kept], ids[here : here + kept], strict=True):
            step = engine.run(np.asarray([[token]]), steps)[0, 0]
            if row.tobytes() != step.tobytes():
                moved += 1
                most = max(most, float(np.abs(row - step).max()))
                if row.argmax() != step.argmax():
                    other += 1
                    gap = max(gap, float(step.max() - step[row.argmax()]))
        here += kept
    return {"tokens": here, "other": other, "moved": moved, "most": most, "gap": gap}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--engine", action="append")
    given = parser.parse_args()
    print(f"{'recipe':12} {'engine':6} {'tokens':>7} {'other tokens':>12} {'other bits':>10} "
          f"{'most':>8} {'widest gap':>10}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for recipe in given.recipes:
            bundle = resolve(recipe) if recipe in EMBEDDED else Path(folder) / recipe
            if recipe not in EMBEDDED:
                export_checkpoint(resolve("demo-fp16"), bundle, quant=recipe, verify=False)
            for engine in given.engine or ["cpu", "ort"]:
                with edge.load(bundle, engine=engine, threads=1) as model:
                    said = measured(model, given.count)
                print(f"{recipe:12} {engine:6} {said['tokens']:7} {said['other']:12} "
                      f"{said['moved']:10} {said['most']:8.4f} {said['gap']:10.4f}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
