"""Fuse nodes that one kernel runs together, before the walk.

`PAIRS` in each folder's `lowering.py` lists them. Only values with a single reader disappear. Also,
the norm before the head picks the wanted rows itself: it gets the attribute `rows` in place of the
`Gather` nodes before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge.plugins.catalogue import parts
from edge.plugins.lowering.context import Constant, Node


class Links:
    """The node that produces each value, and the number of its readers."""

    def __init__(
        self,
        nodes: Iterable[Node],
        outputs: Collection[str],
        constants: Mapping[str, Constant],
    ) -> None:
        self.constants = constants
        self._producers: dict[str, Node] = {}
        # an output of the graph never counts as having a single reader
        self._readers: dict[str, int] = dict.fromkeys(outputs, 2)
        for node in nodes:
            self._producers |= dict.fromkeys(node.outputs.values(), node)
            for name in node.inputs.values():
                self._readers[name] = self._readers.get(name, 0) + 1

    def maker(self, value: str, op: str) -> Node | None:
        """Return the node that produces `value`, if its op is `op` and `value` has one reader."""
        node = self._producers.get(value)
        single_reader = self._readers.get(value) == 1
        return node if node is not None and node.op == op and single_reader else None


@dataclass(frozen=True)
class Pair:
    """A rule that fuses a `second` node and the `first` nodes that feed it into one node of `op`.

    The pair reads all their inputs except the values between them, and has the attributes of both.

    Attributes:
        through: inputs of `second`, each produced by a `first` node of its own. If there are
            several, each name here renames the first input of its node, and the other inputs must
            be the same for all of the nodes.
        first_names, second_names: new names of inputs and outputs in the pair.
        split: `second` reads some columns of the output of `first`, from the attribute `start` on.
            The output of `first` is then also an output of the pair.
        few: fuse only for few rows.
    """

    op: str
    first: str
    second: str
    through: tuple[str, ...]
    first_names: Mapping[str, str] = field(default_factory=dict)
    second_names: Mapping[str, str] = field(default_factory=dict)
    split: bool = False
    few: bool = False

    def join(self, links: Links, node: Node) -> tuple[list[Node], Node] | None:
        """Return the `first` nodes and the pair, or None if `node` does not complete one."""
        if node.op != self.second:
            return None
        sources = [self._find_first(links, node.inputs[name]) for name in self.through]
        firsts = [first for first, _ in sources if first is not None]
        renamed = [
            self._renamed_inputs(first, name)
            for first, name in zip(firsts, self.through, strict=False)
        ]
        inputs: dict[str, str] = {}
        for mapping in renamed:
            if any(inputs.get(name, value) != value for name, value in mapping.items()):
                return None
            inputs |= mapping
        extras = [{n: v for n, v in first.attributes.items() if n not in node.attributes}
                  for first in firsts]  # fmt: skip
        if len(firsts) < len(self.through) or any(extra != extras[0] for extra in extras):
            return None
        second_inputs = {self.second_names.get(n, n): v for n, v in node.inputs.items()
                         if n not in self.through}  # fmt: skip
        outputs = {self.second_names.get(n, n): v for n, v in node.outputs.items()}
        attributes = {**firsts[0].attributes, **node.attributes}
        if self.split:
            outputs = {**firsts[0].outputs, **outputs}
            attributes["start"] = sources[0][1]
        joined = replace(
            node,
            op=self.op,
            inputs={**inputs, **second_inputs},
            outputs=outputs,
            attributes=attributes,
            pair=(*(first.name for first in firsts), node.name) if self.few else (),
        )
        return firsts, joined

    def _find_first(self, links: Links, value: str) -> tuple[Node | None, int]:
        """Return the node that produces `value`, and the column of its output `value` starts at."""
        if not self.split:
            return links.maker(value, self.first), 0
        split = links.maker(value, "Split")
        parts = links.constants.get(split.inputs["split"]) if split else None
        if split is None or parts is None:
            return None, 0
        widths = [int(width) for width in parts.array()]
        start = sum(widths[: list(split.outputs.values()).index(value)])
        return links.maker(split.inputs["input"], self.first), start

    def _renamed_inputs(self, first: Node, through: str) -> dict[str, str]:
        names = dict(self.first_names)
        if len(self.through) > 1:
            names[next(iter(first.inputs))] = through
        return {names.get(n, n): v for n, v in first.inputs.items()}


def pairs() -> list[Pair]:
    """Return all pairs, those for any number of rows first."""
    rules = [pair for module in parts("lowering").values() for pair in getattr(module, "PAIRS", ())]
    return sorted(rules, key=lambda pair: pair.few)


def fuse(
    nodes: Sequence[Node],
    outputs: Collection[str],
    constants: Mapping[str, Constant],
    *,
    known: Collection[str],
    few: bool,
) -> list[Node]:
    """Return `nodes` with pairs fused, in order.

    `known` are the ops that have kernels. `few` also applies the pairs for few rows.
    """
    remaining = list(nodes)
    for pair in pairs():
        if pair.op not in known or (pair.few and not few):
            continue
        links = Links(remaining, outputs, constants)
        replacements: dict[str, Node] = {}
        removed: set[str] = set()
        for second in remaining:
            match = pair.join(links, second)
            if match is None:
                continue
            firsts, joined = match
            # the output of a split first node has other readers: the pair runs in its place
            anchor = firsts[0] if pair.split else second
            replacements[anchor.name] = joined
            removed |= {part.name for part in (*firsts, second)} - {anchor.name}
        remaining = [
            replacements.get(node.name, node) for node in remaining if node.name not in removed
        ]
    return remaining


def wanted_rows(nodes: Sequence[Node], outputs: Collection[str]) -> list[Node]:
    """Let the norm before the head pick the wanted rows: it gets the attribute `rows`."""
    links = Links(nodes, outputs, {})
    removed: set[str] = set()
    kept: list[Node] = []
    for node in nodes:
        gathers = {
            name: gather
            for name in ("x", "added")
            if (gather := links.maker(node.inputs.get(name, ""), "Gather"))
            and gather.inputs["indices"] == "rows"
        }
        if node.op.startswith("Add") and "Norm" in node.op and len(gathers) == 2:
            removed |= {gather.name for gather in gathers.values()}
            picked = {name: gather.inputs["data"] for name, gather in gathers.items()}
            node = replace(
                node,
                inputs={**node.inputs, **picked},
                attributes={**node.attributes, "rows": True},
            )
        kept.append(node)
    return [node for node in kept if node.name not in removed]
