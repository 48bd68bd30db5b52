"""Print the table of models that fit a board, from a folder of configs:

    python -m edge.apps.info.board_table tests/published

docs/use/models.md has the table; a test compares it with this output.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge.apps.info.boards import MemoryBudget, board
from edge.apps.info.memory import greatest
from edge.apps.info.unexported import BANDWIDTHS, by_recipe, read, state_dtypes
from edge.apps.terminal import say
from edge.apps.units import megabytes
from edge.errors import CheckpointError
from edge.export.checkpoint.layout import Layout
from edge.export.exporter import CHUNK
from edge.runtime.cpu import planning

BOARD = "orin-nano-8gb"
RECIPES = ("w8", "w4")
CONTEXT = 2048
_LONGEST = 1 << 20


def table(folder: Path, name: str = BOARD) -> str:
    """Return a Markdown table of the models that fit the board, smallest first.

    Each has its widest recipe that fits with CONTEXT tokens and no snapshot.
    """
    budget, rows = board(name), []
    for file in sorted(folder.glob("*.json")):
        try:
            layout, _ = read(str(file))
        except CheckpointError:  # an unsupported family
            continue
        if row := _row(file.stem, layout, budget):
            rows.append(row)
    speeds = " | ".join(f"tokens/s at {speed} GB/s" for speed in BANDWIDTHS)
    lines = [f"| model | recipe | weights | total memory | longest context | {speeds} |"]
    lines.append("|---" * (5 + len(BANDWIDTHS)) + "|")
    return "\n".join(lines + [row for _, row in sorted(rows)])


def _row(name: str, layout: Layout, budget: MemoryBudget) -> tuple[int, str] | None:
    for recipe in RECIPES:
        sizes = by_recipe(layout, recipe, budget, context=CONTEXT, snapshots=0)
        if not sizes["fits"]:
            continue
        longest = _longest(layout, recipe, sizes["weight_bytes"], budget)
        speeds = [f"{speed:.3g}" for speed in sizes["predicted_tokens_per_s"].values()]
        total = sizes["plan"]["total"]
        cells = [name, f"`{recipe}`", megabytes(sizes["weight_bytes"]), megabytes(total), longest]
        return total, f"| {' | '.join([*cells, *speeds])} |"
    return None


def _longest(layout: Layout, recipe: str, weights: int, budget: MemoryBudget) -> str:
    """Format the longest context that fits, in tokens, up to the trained context."""
    config, dtypes = layout.config, state_dtypes(layout, recipe)
    if not config.has_attention:
        return "any"

    def fits(context: int) -> bool:
        plan = planning.plan_config(
            config, weights, chunk=CHUNK, capacity=context, program=planning.PROGRAM, dtypes=dtypes
        )
        return plan["total"] <= (budget.available or 0)

    longest = greatest(config.max_context or _LONGEST, 1, fits)
    return f"{longest:,}"


if __name__ == "__main__":
    say(table(Path(sys.argv[1])))
