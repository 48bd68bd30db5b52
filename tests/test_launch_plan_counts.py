"""The number of launches of a layer, in a step and in a prefill, by recipe."""

from __future__ import annotations

from collections import Counter

import pytest

from edge.apps.info.launches import layer_of
from edge.launch import LaunchPlan
from tests.lowered_models import lowered
from tests.test_launch_plan import program

# model of tests/lowered_models.py and one of its layers: recipe → (in a step, in a prefill), the
# table of docs/inside/launch-plan.md
COUNTS: dict[tuple[str, int], dict[str, tuple[int, int]]] = {
    ("mamba1 odd", 1): {
        "fp32": (5, 8),
        "fp16": (5, 8),
        "w8": (6, 8),
        "w4": (6, 8),
        "w4a16": (6, 8),
        # one more in a prefill with one group: `widen`
        "w8a8": (6, 9),
        "w8a8-static": (6, 9),
        "w4a8": (7, 9),
        "w8a8-dynamic": (17, 18),
        "w8a8-hadamard": (17, 18),
    },
    ("mamba2", 0): {
        # a scan is three launches in a prefill
        "fp32": (5, 8),
        "fp16": (5, 8),
        "w8": (6, 8),
        "w4": (6, 8),
        "w4a16": (6, 8),
        "w8a8": (5, 9),
        "w8a8-static": (6, 9),
        "w4a8": (6, 9),
        "w8a8-dynamic": (14, 16),
        "w8a8-hadamard": (14, 16),
    },
}
CASES = [(*which, quant) for which, counts in COUNTS.items() for quant in counts]


def counted(plan: LaunchPlan, rows: int | None, layer: int) -> int:
    chosen = program(plan, "chain", rows).launches
    return Counter(layer_of(plan.launches[index]) for index in chosen)[layer]


@pytest.mark.parametrize("model, layer, quant", CASES)
def test_launches_of_a_layer(model: str, layer: int, quant: str) -> None:
    plan = lowered(model, quant)
    expected = COUNTS[model, layer][quant]
    assert (counted(plan, 1, layer), counted(plan, None, layer)) == expected
    # ops fused for one token are also fused for a few
    assert counted(plan, 16, layer) == expected[0]
