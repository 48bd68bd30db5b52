"""Every device op by its plugin, on nodes of small models, beside the references.

Chains and trees of 1 to 34 rows, so that every program runs; states of every kind with pending
tokens. What must not be read is poisoned, and what must not be written is compared.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from edge.plugins.device.statements import DEVICE_OPS, in_place
from edge.runtime.ledger import ADVANCED, KEEP, LAST
from tests.device_ops import Array
from tests.device_reference import Steps
from tests.int8_recurrent import TOLERANCE, Compared
from tests.on_device import NOTES, ON_GPU
from tests.tensorrt.node_cases import NodeCase
from tests.tensorrt.plugin_host import whole
from tests.tensorrt.plugin_models import source
from tests.test_device_ops import memory

# models, recipes and states (`plugin_models.source`) that together have every op
SOURCES: tuple[tuple[str, str, str | None], ...] = (
    ("mamba1", "w8a8", "int8"),
    ("mamba2 groups", "fp32", None),
    ("mamba2 groups", "fp16", None),
    ("mamba1", "fp16", None),
    ("all", "w4a8", None),
    ("mamba2 groups", "w8a8-static", None),
    ("mamba2 groups", "w8a8", "int8"),
    ("mamba1", "w4", None),
    ("mamba1", "w8", None),
    ("mamba1", "w8a8-dynamic", None),
    ("mamba1", "w8a8-hadamard", None),
    ("mamba1", "w8a8", "fp16"),
    ("mamba2", "w8a8", "fp16"),
    ("mamba2 groups", "w8a8", "fp16"),
    ("attention odd", "fp16", None),
    ("parallel", "fp32", None),
    ("plain gate", "w8a8", None),
    ("normed", "fp32", None),
    ("short", "fp32", None),
    ("experts", "fp32", None),
    ("experts", "w8", None),
    ("experts", "w4", None),
    ("experts", "w8a8", None),
    ("experts", "w4a8", None),
    ("deltanet", "fp32", None),
    ("head gate", "fp32", None),
    ("all", "w8a8-llm-int8", None),
    ("mamba1 odd", "w8a8", None),
    ("capped", "fp32", None),
    ("listed", "fp32", None),
)
# in no graph that the exporter makes: in every recipe the scan computes dt itself
_OWN_DT = {f"SelectiveScan{kind}Int8_{bits}" for kind in ("", "Groups") for bits in (8, 16, 32)}
# 4-bit blocks have minimums: those without occur in graphs of earlier bundles
_SYMMETRIC = {
    "EmbedBits_4", "ExpertLinearBits_4", "ExpertLinearInt4", "LinearBits_4", "LinearInt4",
    "LinearInt4Quantize",
}  # fmt: skip
NOWHERE = _OWN_DT | _SYMMETRIC
# their weights may be fp16 too
HALVES = ("Embed", "Linear", "LinearConv")
NAMES = [*sorted(set(DEVICE_OPS) - NOWHERE), *(f"{name} fp16" for name in HALVES)]
RUNS = [
    (Steps((), 0, 0, KEEP, 0, (3,)), 1),
    (Steps((7,), 0, 1, LAST, 9, (0,)), 2),
    (Steps((4, 0, 8), 0, 0, KEEP, 3, (9, 2)), 2),
    (Steps((2, 3, 5, 1), 4, 0, ADVANCED, 11, (8, 0, 9, 4, 6)), 1),
    (Steps((), 0, 1, LAST, 0, (-1,) * 16), 1),
    (Steps((6,), 0, 1, LAST, 12, (-1,) * 17), 1),
    (Steps((6, 5), 0, 1, LAST, 0, (-1,) * 17), 2),
]
TREES = [
    (Steps((), 0, 0, KEEP, 7, (3, 4), (-1, -1)), 2),
    (Steps((1, 5), 2, 1, ADVANCED, 4, (2, 8, 0, 3, 9), (-1, 0, 0, 2, -1)), 1),
]


@functools.cache
def _cases() -> dict[str, NodeCase]:
    """Return the first node of each of NAMES."""
    found: dict[str, NodeCase] = {}
    for each in SOURCES:
        graph = source(*each).graph
        for node in graph.nodes:
            if node.op_type in DEVICE_OPS:
                weights = (graph.constants.get(value) for value in node.input)
                half = any(one is not None and one.tensor.dtype == "f16" for one in weights)
                name = f"{node.op_type} fp16" if half and node.op_type in HALVES else node.op_type
                if name not in found:
                    found[name] = NodeCase(graph, node)
    return found


def _close(case: NodeCase, found: Array, wanted: Array, counted: Compared) -> None:
    if found.dtype == np.int8:
        counted.int8(found, wanted)
    elif found.dtype == np.int32:
        assert np.array_equal(found, wanted)
    else:
        tolerance = TOLERANCE[int(case.attributes.get("state_bits", 32))]
        if case.op.name == "LinearBitsMinimum" and found.size // found.shape[-1] > 16:
            tolerance = 1e-3  # 4-bit weights are rounded to fp16 after scaling
        counted.floats(found, wanted, tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_is_its_reference(name: str) -> None:
    if not ON_GPU and not NOTES:
        whole()
    case, counted = _cases()[name], Compared()
    for steps, batch in (*RUNS, *TREES):
        given = case.given(steps, batch)
        wanted = case.wanted(given, steps)
        found = case.run_plugin(given)
        for output in found:
            before = in_place(case.op).get(output)
            if before is not None:
                memory(found[output], wanted[output], given[before], counted)
            else:
                _close(case, found[output], wanted[output], counted)
    counted.check()
