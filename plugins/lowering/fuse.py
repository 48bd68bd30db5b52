"""Nodes that one kernel runs together, rewritten as one before the walk.

Each folder's `lowering.py` says in `PAIRS` which. Only values with a single reader disappear. And
the rows that the head reads (`Gather` by the input `rows`) are picked by the norm behind them,
which gets the attribute `rows`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edge.plugins.catalogue import parts
from edge.plugins.lowering.context import Constant, Node


class Links:
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
            self._made |= dict.fromkeys(node.outputs.values(), node)
            for name in node.inputs.values():
                self._readers[name] = self._readers.get(name, 0) + 1

    def maker(self, value: str, op: str) -> Node | None:
        """The node that makes `value` for a single reader, if it is one of `op`."""
        node = self._made.get(value)
        alone = self._readers.get(value) == 1
        return node if node is not None and node.op == op and alone else None


@dataclass(frozen=True)
class Pair:
    """A node of `second` and those of `first` that make some of its inputs, as one node of `op`.

    It reads what they read but for the values between them, and has the attributes of both.

    Attributes:
        through: inputs of `second` that nodes of `first` make, each a node of its own: its first
            input is then called so, and all its others must be the same for all of them.
        first_names, second_names: other names of inputs and outputs in the pair.
        split: `second` reads some columns of what `first` makes: the attribute `start` says from
            where on. What `first` makes is an output of the pair.
        few: only where there are few rows.
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
        """The nodes before and the pair, if `node` is the second of one."""
        if node.op != self.second:
            return None
        found = [self._first(links, node.inputs[name]) for name in self.through]
        firsts = [first for first, _ in found if first is not None]
        read = [self._read(first, name) for first, name in zip(firsts, self.through, strict=False)]
        inputs: dict[str, str] = {}
        for each in read:
            if any(inputs.get(name, value) != value for name, value in each.items()):
                return None
            inputs |= each
        kinds = [{n: v for n, v in first.attributes.items() if n not in node.attributes}
                 for first in firsts]  # fmt: skip
        if len(firsts) < len(self.through) or any(kind != kinds[0] for kind in kinds):
            return None
        own = {self.second_names.get(n, n): v for n, v in node.inputs.items()
               if n not in self.through}  # fmt: skip
        outputs = {self.second_names.get(n, n): v for n, v in node.outputs.items()}
        attributes = {**firsts[0].attributes, **node.attributes}
        if self.split:
            outputs = {**firsts[0].outputs, **outputs}
            attributes["start"] = found[0][1]
        joined = replace(
            node,
            op=self.op,
            inputs={**inputs, **own},
            outputs=outputs,
            attributes=attributes,
            pair=(*(first.name for first in firsts), node.name) if self.few else (),
        )
        return firsts, joined

    def _first(self, links: Links, value: str) -> tuple[Node | None, int]:
        """The node that makes `value`, and the column that it starts at in what that makes."""
        if not self.split:
            return links.maker(value, self.first), 0
        split = links.maker(value, "Split")
        parts = links.constants.get(split.inputs["split"]) if split else None
        if split is None or parts is None:
            return None, 0
        widths = [int(width) for width in parts.array()]
        start = sum(widths[: list(split.outputs.values()).index(value)])
        return links.maker(split.inputs["input"], self.first), start

    def _read(self, first: Node, through: str) -> dict[str, str]:
        names = dict(self.first_names)
        if len(self.through) > 1:
            names[next(iter(first.inputs))] = through
        return {names.get(n, n): v for n, v in first.inputs.items()}


def pairs() -> list[Pair]:
    """Those of every row count before those of few rows."""
    found = [pair for module in parts("lowering").values() for pair in getattr(module, "PAIRS", ())]
    return sorted(found, key=lambda pair: pair.few)


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
    for pair in pairs():
        if pair.op not in known or (pair.few and not few):
            continue
        links = Links(found, outputs, constants)
        instead: dict[str, Node] = {}
        gone: set[str] = set()
        for second in found:
            made = pair.join(links, second)
            if made is None:
                continue
            firsts, joined = made
            # what the first one made is still read: the pair runs where it ran
            stays = firsts[0] if pair.split else second
            instead[stays.name] = joined
            gone |= {each.name for each in (*firsts, second)} - {stays.name}
        found = [instead.get(node.name, node) for node in found if node.name not in gone]
    return found


def wanted_rows(nodes: Sequence[Node], outputs: Collection[str]) -> list[Node]:
    """The norm before the head picks the wanted rows itself: it gets the attribute `rows`."""
    links = Links(nodes, outputs, {})
    gone: set[str] = set()
    found: list[Node] = []
    for node in nodes:
        gathers = {
            name: gather
            for name in ("x", "added")
            if (gather := links.maker(node.inputs.get(name, ""), "Gather"))
            and gather.inputs["indices"] == "rows"
        }
        if node.op.startswith("Add") and "Norm" in node.op and len(gathers) == 2:
            gone |= {gather.name for gather in gathers.values()}
            picked = {name: gather.inputs["data"] for name, gather in gathers.items()}
            node = replace(
                node,
                inputs={**node.inputs, **picked},
                attributes={**node.attributes, "rows": True},
            )
        found.append(node)
    return [node for node in found if node.name not in gone]
