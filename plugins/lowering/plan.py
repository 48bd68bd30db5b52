"""Lower a bundle's graph to its launch plan, by one walk over the nodes for each regime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from onnx import ModelProto

from edge.errors import ExportError
from edge.launch import Launch, LaunchPlan, Pointer, Program, Weight
from edge.plugins.lowering.context import Lower, Lowering, Node, Regime, Tables
from edge.plugins.lowering.fuse import fuse, wanted_rows
from edge.plugins.lowering.graph import Graph, live, read_graph
from edge.plugins.lowering.lowerings import LOWER

# Maximum rows of a run for the kernels of a step: a decoded token, its drafts, a small batch.
FEW_ROWS = 16
REGIMES = (
    Regime("chain", 1),
    Regime("chain", FEW_ROWS),
    Regime("tree", FEW_ROWS),
    Regime("chain", None),
)
LOGITS, PICKED = "logits", "picked"


class LoweringError(ExportError):
    """No kernel runs a node of the graph, at least not in this form; `field` names the node."""


class Walk(NamedTuple):
    """One regime's walk over the nodes.

    Attributes:
        at: state of the lowering after the walk.
        nodes: every node with the indices of its launches; the last node picks a token.
    """

    regime: Regime
    at: Lowering
    nodes: tuple[tuple[Node, tuple[int, ...]], ...]


class Lowered(NamedTuple):
    """A graph, the walks over it in the order of REGIMES, and their shared tables."""

    graph: Graph
    tables: Tables
    walks: tuple[Walk, ...]


def lower(
    model: bytes | ModelProto, folder: str | Path, *, ops: Mapping[str, Lower] = LOWER
) -> LaunchPlan:
    """Lower the graph `model`, whose weights.bin is in `folder`, to its plan.

    The same graph gives the same plan. `ops` maps op names to lowerings.

    Raises LoweringError when no kernel can run some node.
    """
    return plan_of(walked(model, folder, ops=ops))


def walked(
    model: bytes | ModelProto, folder: str | Path, *, ops: Mapping[str, Lower] = LOWER
) -> Lowered:
    """Walk over the graph in every regime: `lower` without building the plan. Raises as it does."""
    try:
        graph = read_graph(model, folder)
        tables = Tables()
        tables.weights |= {
            name: Weight(dtype=constant.dtype, offset=graph.offsets[name], elements=constant.size)
            for name, constant in graph.constants.items()
            if name in graph.offsets
        }
        walks = tuple(_walk(graph, ops, regime, tables) for regime in REGIMES)
        return Lowered(graph, tables, walks)
    except LoweringError:
        raise
    except ExportError as problem:
        raise LoweringError(
            problem.message, file=problem.file, field=problem.field, remedy=problem.remedy
        ) from problem


def plan_of(lowered: Lowered) -> LaunchPlan:
    """Build the plan: one program for each walk, and one that only settles the states."""
    graph, tables, walks = lowered
    programs = [_program(walk) for walk in walks]
    launches = tuple(launch for _, launch in tables.launches.values())
    # settling uses the kernels for any number of rows
    settling = tuple(index for index in programs[-1].launches if launches[index].settles)
    programs.append(Program(kind="settle", max_rows=None, launches=settling))
    return LaunchPlan(
        variants=tuple(variant for _, variant in tables.variants.values()),
        launches=launches,
        programs=tuple(programs),
        values=tables.values,
        inputs=tables.inputs,
        weights=_used_weights(tables.weights, launches),
        inline=tables.inline,
        logs=tables.logs,
        taps=taps(graph),
        rotations=graph.rotations,
        inverses=dict(graph.inverses),
    )


def _program(walk: Walk) -> Program:
    *computed, (_, picks) = walk.nodes
    return Program(
        kind=walk.regime.kind,
        max_rows=walk.regime.max_rows,
        launches=tuple(index for _, launches in computed for index in launches),
        picks=picks,
    )


def _walk(graph: Graph, ops: Mapping[str, Lower], regime: Regime, tables: Tables) -> Walk:
    nodes = fuse(
        wanted_rows(graph.nodes, graph.outputs),
        graph.outputs,
        graph.constants,
        known=ops.keys(),
        few=not regime.many,
    )
    at = Lowering(regime, tables, graph.constants)
    launched: list[tuple[Node, tuple[int, ...]]] = []
    for node in live(nodes, graph.outputs):
        before = len(at.order)
        if node.op not in ops:
            raise LoweringError(f"no kernel runs {node.op}", field=node.name)
        try:
            ops[node.op](at, node)
        except ExportError as problem:
            location = "" if problem.field == node.name else f"{problem.field}: "
            raise LoweringError(f"{location}{problem.message}", field=node.name) from problem
        launched.append((node, tuple(at.order[before:])))
    logits = at.view(LOGITS)
    if (logits.buffer, logits.dtype, logits.rows, logits.offset) != (LOGITS, "f32", "LB", 0):
        raise LoweringError("must be fp32, one row for each wanted token", field=LOGITS)
    before = len(at.order)
    pick = Node("Greedy", PICKED, {"logits": LOGITS}, {"picked": PICKED}, {})
    LOWER[pick.op](at, pick)
    launched.append((pick, tuple(at.order[before:])))
    return Walk(regime, at, tuple(launched))


def _used_weights(weights: Mapping[str, Weight], launches: tuple[Launch, ...]) -> dict[str, Weight]:
    used = {
        argument.name
        for launch in launches
        for argument in launch.arguments
        if isinstance(argument, Pointer) and argument.space == "weight"
    }
    return {name: weight for name, weight in weights.items() if name in used}


def taps(graph: Graph) -> tuple[int, ...]:
    """Return the distinct widths K of the convolutions, whose weights are [K, 1, C]."""
    widths = {
        graph.constants[node.inputs["weight"]].shape[0]
        for node in graph.nodes
        if "conv_state" in node.inputs
    }
    return tuple(sorted(widths))
