"""Convert a node's launches in the plan to those of its plugin: pointers become places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edge.errors import ExportError
from edge.launch import ITEM_SIZE, Argument, Launch, Pointer, Size, Variant
from edge.plugins.lowering.context import Regime
from edge.plugins.tensorrt import OUT
from edge.plugins.tensorrt.launches import (
    Call,
    Input,
    Kernel,
    NodeLaunches,
    NodeProgram,
    Output,
    Place,
    WorkBuffer,
)
from edge.plugins.tensorrt.operands import Operands, Tensors

_SYMBOLS = "TBLCSA"


class Runs(NamedTuple):
    """The launches of a node in runs of one regime."""

    regime: Regime
    launches: Sequence[tuple[Launch, Variant]]


def node_launches(node: Operands, runs: Sequence[Runs], tensors: Tensors) -> NodeLaunches:
    """Convert a node's launches.

    `runs` are in the order to try them, a tree after the chain with the same number of rows.
    Raises ExportError when a launch points to memory that is neither an input nor an output.
    """
    return _Calls(node, tensors).of(runs)


class _Calls:
    def __init__(self, node: Operands, tensors: Tensors) -> None:
        self._node = node
        self._tensors = tensors
        first = next(i for i, alias in enumerate(node.aliases) if alias < 0)
        self._rows = "".join(map(str, tensors[node.outputs[first]].dims[:2]))
        self._kernels: dict[Kernel, int] = {}
        self._calls: dict[Call, int] = {}
        # value → index, bytes per row, `max_rows` of the regimes that use it
        self._workspace: dict[str, tuple[int, int, list[int | None]]] = {}

    def of(self, runs: Sequence[Runs]) -> NodeLaunches:
        node, tensors = self._node, self._tensors
        programs = _without_duplicates(
            NodeProgram(
                regime.kind == "tree",
                regime.max_rows,
                tuple(self._call(*launch, regime) for launch in launches),
            )
            for regime, launches in runs
        )
        inputs = [tensors[name] for name in node.inputs]
        results = [tensors[name] for name in node.outputs]
        outputs = tuple(
            Output(t.dtype, t.dims, alias) for t, alias in zip(results, node.aliases, strict=True)
        )
        return NodeLaunches(
            inputs=tuple(Input(t.dtype, len(t.dims)) for t in inputs),
            outputs=outputs,
            symbols=self._symbols(outputs, programs),
            rows=self._rows,
            workspace=tuple(
                WorkBuffer(size, None if None in rows else max(filter(None, rows)))
                for _, size, rows in self._workspace.values()
            ),
            kernels=tuple(self._kernels),
            calls=tuple(self._calls),
            programs=programs,
        )

    def _call(self, launch: Launch, variant: Variant, regime: Regime) -> int:
        kernel = Kernel(variant.key, 32 * variant.warps)
        number = self._kernels.setdefault(kernel, len(self._kernels))
        arguments = tuple(self._argument(argument, regime) for argument in launch.arguments)
        return self._calls.setdefault(Call(number, launch.grid, arguments), len(self._calls))

    def _argument(self, argument: Argument, regime: Regime) -> Place | Size | float:
        if not isinstance(argument, Pointer):
            return argument
        name, at = argument.name, argument.at * ITEM_SIZE[self._tensors[argument.name].dtype]
        # a state is written in place: use the output, which is the same memory
        if argument.space in ("state", "log", "cache"):
            name += OUT
        if name in self._node.inputs:
            return Place("input", self._node.inputs.index(name), at)
        if name in self._node.outputs:
            return Place("output", self._node.outputs.index(name), at)
        if argument.space != "value":
            raise ExportError(f"{self._node.op} does not read {name!r}", field=name)
        return Place("workspace", self._workspace_index(name, regime), at)

    def _workspace_index(self, name: str, regime: Regime) -> int:
        tensor = self._tensors[name]
        if "".join(map(str, tensor.dims[:-1])) != self._rows:
            raise ExportError(f"{name!r} does not have one row for each {self._rows}", field=name)
        size = ITEM_SIZE[tensor.dtype] * int(tensor.dims[-1])
        index, _, rows = self._workspace.setdefault(name, (len(self._workspace), size, []))
        rows.append(regime.max_rows)
        return index

    def _symbols(
        self, outputs: Sequence[Output], programs: Sequence[NodeProgram]
    ) -> dict[str, tuple[int, int]]:
        """Return the input and axis that give each symbol the node depends on."""
        sizes = [size for call in self._calls for size in call.grid]
        sizes += [
            argument
            for call in self._calls
            for argument in call.arguments
            if isinstance(argument, Size)
        ]
        used = set(self._rows).union(*(size.of for size in sizes))
        used |= {dim for output in outputs for dim in output.dims if isinstance(dim, str)}
        used |= {"A"} if any(program.tree for program in programs) else set()
        places: dict[str, tuple[int, int]] = {}
        for index, name in enumerate(self._node.inputs):
            for axis, dim in enumerate(self._tensors[name].dims):
                if isinstance(dim, str) and dim in _SYMBOLS:
                    places.setdefault(dim, (index, axis))
        if unknown := used - places.keys():
            raise ExportError(
                f"{self._node.op} has no input of {sorted(unknown)}", field=unknown.pop()
            )
        return {symbol: places[symbol] for symbol in sorted(used)}


def _without_duplicates(programs: Iterable[NodeProgram]) -> tuple[NodeProgram, ...]:
    """Drop programs whose calls equal those of the next one for at least as many rows."""
    candidates = list(programs)
    chains = [program for program in candidates if not program.tree]
    kept = [
        chain
        for chain, following in zip(chains, [*chains[1:], None], strict=True)
        if following is None or following.calls != chain.calls
    ]
    for tree in (program for program in candidates if program.tree):
        rows = tree.max_rows
        equivalent = next(c for c in chains if c.max_rows is None or (rows and c.max_rows >= rows))
        if tree.calls != equivalent.calls:
            kept.append(tree)
    return tuple(kept)
