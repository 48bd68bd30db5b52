"""A bound on the constants that ONNX Runtime folds while it loads a graph, computed beforehand.

ONNX Runtime folds every node whose inputs are constants, and treats shapes it can infer as
constants too. Version 1.23.2 folds constants of any size, 1.31.1 up to a gigabyte each; neither
limits their total, and both allocate outside of any arena. So the graph is walked first, tracking
for each constant its shape, or at least a bound on its elements, and the values of small ones, of
which shapes are made. A constant that cannot be bounded counts as unbounded, and its graph is
loaded without folding: its runs then compute the same values within the memory limit of runs. Only
ops that the exporter's constants need have rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from edge.runtime.folding_ops import RANK, RULES, SMALL, KnownConstant, Unbounded
from edge.runtime.graph import Message, integers, name_of, op_of, tensor_values

# limit on folded elements: a fixed allowance plus a multiple of the weights' elements
_FREE, _OF_WEIGHTS = 1 << 23, 6
_MOST_STEPS, _MOST_DEPTH = 200_000, 32

# a name maps to a constant, to _RUN for a value computed in runs, or to _OMITTED for an input left
# out
_RUN, _OMITTED = object(), object()
Scope = dict[bytes, Any]


def is_bounded(model: Message) -> bool:
    """Return whether folding the constants of a graph from `graph.check` stays within the limit."""
    walk = _Walk(model)
    try:
        walk.graph(model["graph"], {b"": _OMITTED}, {}, 0)
    except (Unbounded, ArithmeticError, LookupError, TypeError, ValueError):
        return False
    return walk.made <= _FREE + _OF_WEIGHTS * walk.stored


class _Walk:
    """A walk through a graph and the functions it calls.

    Attributes:
        made: number of elements that folding creates.
        stored: number of elements in the graph's tensors.
    """

    def __init__(self, model: Message) -> None:
        self._functions = {
            (each.get("domain", b""), each.get("name", b"")): each
            for each in model.get("functions", ())
        }
        self.made, self.stored, self._steps = 0, 0, 0
        self._met: dict[Any, tuple[int, list[Any]]] = {}

    def graph(
        self, graph: Message, outer: Scope, attributes: Mapping[bytes, Message], depth: int
    ) -> list[Any]:
        """Return the graph's outputs. `outer`: values in scope; `attributes`: those of the call."""
        scope = dict(outer)
        scope |= {name_of(each): _RUN for each in graph.get("input", ())}
        for tensor in graph.get("initializer", ()):
            scope[tensor.get("name", b"")] = stored = _stored(tensor)
            self.stored += stored.count
        self._nodes(graph, scope, attributes, depth)
        return [scope.get(name_of(each), _RUN) for each in graph.get("output", ())]

    def _nodes(
        self, graph: Message, scope: Scope, attributes: Mapping[bytes, Message], depth: int
    ) -> None:
        if depth > _MOST_DEPTH:
            raise Unbounded
        for node in graph.get("node", ()):
            self._steps += 1
            if self._steps > _MOST_STEPS or self.made > 1 << 60:
                raise Unbounded
            # ONNX Runtime sorts nodes itself, so a name may not be produced by an earlier node
            reads = [scope.get(name) for name in node.get("input", ())]
            if None in reads:
                raise Unbounded
            own = {
                each.get("name", b""): attributes.get(each["ref_attr_name"], {})
                if "ref_attr_name" in each
                else each
                for each in node.get("attribute", ())
            }
            made = self._node(node, reads, own, (scope, attributes, depth))
            names = node.get("output", ())
            made += [made[-1] if made else _RUN] * (len(names) - len(made))
            scope.update(zip(names, made, strict=False))
            scope[b""] = _OMITTED

    def _node(
        self,
        node: Message,
        reads: list[Any],
        own: dict[bytes, Message],
        place: tuple[Scope, Mapping[bytes, Message], int],
    ) -> list[Any]:
        op, (scope, attributes, depth) = op_of(node), place
        if op in self._functions:
            return self._call(op, reads, own, depth)
        bodies = [each["g"] for each in own.values() if "g" in each]
        if bodies:
            ends = [self.graph(body, scope, attributes, depth + 1) for body in bodies]
            return _either(ends) if op[1] == b"If" else [_RUN]
        if op == (b"", b"Constant"):
            return [_literal(own)]
        if op == (b"", b"Shape") and reads[:1] == [_RUN]:
            return [KnownConstant(RANK, (RANK,), False)]
        if _RUN in reads or op == (b"", b"SequenceEmpty"):  # only tensors are folded
            return [_RUN]
        rule = RULES.get(op[1]) if op[0] == b"" else None
        while reads and reads[-1] is _OMITTED:
            reads = reads[:-1]
        # rules identify inputs by position, so none may be missing in between
        if rule is None or not reads or (_OMITTED in reads and op[1] != b"Clip"):
            raise Unbounded
        made = rule(reads, own)
        self.made += sum(each.count for each in made)
        return made

    def _call(
        self, op: tuple[bytes, bytes], reads: list[Any], own: dict[bytes, Message], depth: int
    ) -> list[Any]:
        said = repr(sorted(own.items()))
        key = op, said, tuple(r.key if isinstance(r, KnownConstant) else id(r) for r in reads)
        if key not in self._met:
            function, before = self._functions[op], self.made
            names = function.get("input", ())
            scope = dict.fromkeys(names, _OMITTED) | dict(zip(names, reads, strict=False))
            scope[b""] = _OMITTED
            self._nodes(function, scope, own, depth + 1)
            made = [scope.get(name, _RUN) for name in function.get("output", ())]
            self._met[key] = self.made - before, made
            return list(made)
        cost, made = self._met[key]
        self.made += cost
        return list(made)


def _either(ends: list[list[Any]]) -> list[Any]:
    """Return the outputs of an If; one with a constant condition is replaced by a branch."""
    made = []
    for each in zip(*ends, strict=False):
        constants = [end for end in each if isinstance(end, KnownConstant)]
        one = all(end is each[0] for end in each)
        known = constants[0] if one and constants else None
        made.append(
            known or (KnownConstant(max(c.count for c in constants)) if constants else _RUN)
        )
    return made or [_RUN]


def _stored(tensor: Message) -> KnownConstant:
    shape = integers(tensor.get("dims", ()))
    if math.prod(shape) <= SMALL and tensor.get("data_type") in _INTEGERS:
        numbers = tensor_values(tensor)
        if len(numbers) == math.prod(shape):
            return KnownConstant.of(np.array(numbers, np.int64).reshape(shape))
    return KnownConstant.shaped(shape)


_INTEGERS = (6, 7)  # TensorProto.DataType: int32, int64


def _literal(own: Mapping[bytes, Message]) -> KnownConstant:
    """Return the value of a Constant node."""
    for name, attribute in own.items():
        if name == b"value" and "t" in attribute:
            return _stored(attribute["t"])
        if name == b"value_int":
            return KnownConstant.of(integers([attribute.get("i", 0)])[0])
        if name == b"value_ints":
            return KnownConstant.of(integers(attribute.get("ints", ())))
        if name == b"value_floats":
            return KnownConstant(
                sum(len(f) if isinstance(f, bytes) else 1 for f in attribute["floats"])
            )
        if name == b"value_float":
            return KnownConstant.shaped(())
    raise Unbounded
