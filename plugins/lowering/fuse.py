"""Nodes that one kernel runs together: pairs of nodes, rewritten as one.

Only values with a single reader disappear. What a pair is called and what it reads:

    LinearInt8, Quantize              LinearInt8Quantize; the same for LinearInt4. In every regime,
                                      the others where there are few rows.
    LinearInt8Quantize, Conv…Int8     LinearInt8QuantizeConv: (product's inputs, convolution's but
                                      x) → (product, convolved, conv_states); `start` is the first
                                      column that the convolution reads
    Linear, CausalConv1d              LinearConv, likewise
    LinearInt8Quantize, Selective…    SelectiveScanInt8Dt: (scan's inputs, product's but y_scale);
                                      the product is the scan's dt, whose name stands for no value
    Linear, SelectiveScan             SelectiveScanDt, likewise
    GatedRMSNormInt8, HadamardQ…      GatedRMSNormInt8HadamardQuantize: (norm's inputs, rotation's
                                      but x)

And the rows that the head reads (`Gather` by the input `rows`) are picked by the norm behind them,
which gets the attribute `rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from edge.plugins.lowering.context import Constant, Node

# A pair's second node → (first node, what both become), or None where they are no such pair.
Rule = Callable[["_Graph", Node], tuple[Node, Node] | None]


class _Graph:
    """Who makes a value, and who reads it."""

    def __init__(
        self,
        nodes: Iterable[Node],
        outputs: Collection[str],
        constants: Mapping[str, Constant],
    ) -> None:
        self.constants = constants
        self._made: dict[str, Node] = {}
        self._readers: dict[str, int] = dict.fromkeys(outputs, 2)  # nothing alone reads an output
        for node in nodes:
            self._made |= dict.fromkeys(node.outputs, node)
            for name in node.inputs:
                self._readers[name] = self._readers.get(name, 0) + 1

    def maker(self, value: str, *ops: str) -> Node | None:
        """The node that makes `value` for a single reader, if it is one of `ops`."""
        node = self._made.get(value)
        alone = self._readers.get(value) == 1
        return node if node is not None and node.op in ops and alone else None


def fuse(
    nodes: Sequence[Node],
    outputs: Collection[str],
    constants: Mapping[str, Constant],
    *,
    known: Collection[str],
    few: bool,
) -> list[Node]:
    """`nodes` with pairs joined, in order; `known` are the ops that there are kernels of.

    `few`: also those pairs that are made for a handful of rows.
    """
    found = list(nodes)
    for rule in (*_ALWAYS, *(_FEW if few else ())):
        graph = _Graph(found, outputs, constants)
        instead: dict[str, Node] = {}
        gone: set[str] = set()
        for second in found:
            pair = rule(graph, second)
            if pair is None or pair[1].op not in known:
                continue
            first, joined = pair
            # what the first one made is still read: the pair runs where it ran
            stays = first if first.outputs[0] in joined.outputs else second
            names = (first.name, second.name) if rule in _FEW else ()
            instead[stays.name] = replace(joined, pair=names)
            gone |= {first.name, second.name} - {stays.name}
        found = [instead.get(node.name, node) for node in found if node.name not in gone]
    return found


def wanted_rows(nodes: Sequence[Node], outputs: Collection[str]) -> list[Node]:
    """The norm before the head picks the wanted rows itself: it gets the attribute `rows`."""
    graph = _Graph(nodes, outputs, {})
    gone: set[str] = set()
    found: list[Node] = []
    for node in nodes:
        gathers = [graph.maker(name, "Gather") for name in node.inputs[:2]]
        picked = [g for g in gathers if g is not None and g.inputs[1] == "rows"]
        if node.op.startswith("Add") and "Norm" in node.op and len(picked) == 2:
            gone |= {gather.name for gather in picked}
            inputs = (*(gather.inputs[0] for gather in picked), *node.inputs[2:])
            node = replace(node, inputs=inputs, attributes={**node.attributes, "rows": True})
        found.append(node)
    return [node for node in found if node.name not in gone]


def _requantize(graph: _Graph, node: Node) -> tuple[Node, Node] | None:
    if node.op != "Quantize":
        return None
    first = graph.maker(node.inputs[0], "LinearInt8", "LinearInt4")
    if first is None:
        return None
    return first, replace(
        node,
        op=f"{first.op}Quantize",
        inputs=(*first.inputs, node.inputs[1]),
        attributes=first.attributes,
    )


def _convolve(graph: _Graph, node: Node) -> tuple[Node, Node] | None:
    """The product's value goes through a Split, of which the convolution reads one part."""
    product = {"CausalConv1d": "Linear", "CausalConv1dInt8": "LinearInt8Quantize"}.get(node.op)
    split = graph.maker(node.inputs[0], "Split") if product else None
    first = graph.maker(split.inputs[0], product) if split and product else None
    parts = graph.constants.get(split.inputs[1]) if split else None
    if first is None or split is None or parts is None:
        return None
    widths = [int(width) for width in parts.array()]
    start = sum(widths[: split.outputs.index(node.inputs[0])])
    return first, replace(
        node,
        op=f"{first.op}Conv",
        inputs=(*first.inputs, *node.inputs[1:]),
        outputs=(*first.outputs, *node.outputs),
        attributes={"start": start},
    )


def _step_size(graph: _Graph, node: Node) -> tuple[Node, Node] | None:
    if node.op == "SelectiveScan":
        first = graph.maker(node.inputs[1], "Linear")
        extra = 2
    elif node.op == "SelectiveScanInt8":
        first = graph.maker(node.inputs[2], "LinearInt8Quantize")
        extra = 4
    else:
        return None
    if first is None:
        return None
    return first, replace(node, op=f"{node.op}Dt", inputs=(*node.inputs, *first.inputs[:extra]))


def _rotate(graph: _Graph, node: Node) -> tuple[Node, Node] | None:
    if node.op != "HadamardQuantize":
        return None
    first = graph.maker(node.inputs[0], "GatedRMSNormInt8")
    if first is None:
        return None
    return first, replace(
        node,
        op="GatedRMSNormInt8HadamardQuantize",
        inputs=(*first.inputs, *node.inputs[1:]),
        attributes=first.attributes,
    )


_ALWAYS: tuple[Rule, ...] = (_requantize,)
_FEW: tuple[Rule, ...] = (_convolve, _step_size, _rotate)
