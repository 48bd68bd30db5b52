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

import hashlib
import math
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from edge.runtime.folding_ops import RANK, RULES, SMALL, KnownConstant, Unbounded
from edge.runtime.graph import integers, name_of, op_of, tensor_values
from edge.runtime.graph_format import Message

# limit on folded elements: a fixed allowance plus a multiple of the weights' elements
_FREE_VALUES, _VALUES_PER_WEIGHT = 1 << 23, 6
_MAX_STEPS, _MAX_DEPTH = 200_000, 32

# a name maps to a constant, to _DYNAMIC for a value computed in runs, or to _OMITTED for an input
# left out
_DYNAMIC, _OMITTED = object(), object()
Scope: TypeAlias = ChainMap[bytes, Any]
UNKNOWN = (Unbounded, ArithmeticError, LookupError, TypeError, ValueError)
_ABSENT: Message = {}  # an attribute that a call leaves out


def is_bounded(model: Message) -> bool:
    """Return whether folding the constants of a graph from `graph.check` stays within the limit."""
    walk = FoldingWalk(model)
    try:
        walk.known()
    except UNKNOWN:
        return False
    return walk.made <= _FREE_VALUES + _VALUES_PER_WEIGHT * walk.stored


class FoldingWalk:
    """A walk through a graph and the functions it calls.

    Attributes:
        made: number of elements that folding creates.
        stored: number of elements in the graph's tensors.
    """

    def __init__(self, model: Message) -> None:
        self._main: Message = model["graph"]
        self._functions = {
            (function.get("domain", b""), function.get("name", b"")): function
            for function in model.get("functions", ())
        }
        self.made, self.stored, self._steps = 0, 0, 0
        self._call_cache: dict[Any, tuple[int, list[Any]]] = {}
        self._digests: dict[int, bytes] = {}

    def known(self) -> Scope:
        """Walk the main graph and return what is known of each of its values.

        Raises one of `UNKNOWN` at the first value without a bound.
        """
        return self._walked(self._main, ChainMap({b"": _OMITTED}), {}, 0)

    def _outputs(
        self, graph: Message, outer: Scope, attributes: Mapping[bytes, Message], depth: int
    ) -> list[Any]:
        scope = self._walked(graph, outer, attributes, depth)
        return [scope.get(name_of(value), _DYNAMIC) for value in graph.get("output", ())]

    def _walked(
        self, graph: Message, outer: Scope, attributes: Mapping[bytes, Message], depth: int
    ) -> Scope:
        """Return the graph's values. `outer`: values in scope; `attributes`: those of the call."""
        scope = outer.new_child({name_of(v): _DYNAMIC for v in graph.get("input", ())})
        for tensor in graph.get("initializer", ()):
            scope[tensor.get("name", b"")] = constant = _tensor_constant(tensor)
            self.stored += constant.count
        self._walk_nodes(graph, scope, attributes, depth)
        return scope

    def _walk_nodes(
        self, graph: Message, scope: Scope, attributes: Mapping[bytes, Message], depth: int
    ) -> None:
        if depth > _MAX_DEPTH:
            raise Unbounded
        for node in graph.get("node", ()):
            self._steps += 1
            if self._steps > _MAX_STEPS or self.made > 1 << 60:
                raise Unbounded
            # ONNX Runtime sorts nodes itself, so a name may not be produced by an earlier node
            inputs = [scope.get(name) for name in node.get("input", ())]
            if None in inputs:
                raise Unbounded
            node_attributes = {
                attribute.get("name", b""): attributes.get(attribute["ref_attr_name"], _ABSENT)
                if "ref_attr_name" in attribute
                else attribute
                for attribute in node.get("attribute", ())
            }
            outputs = self._visit_node(node, inputs, node_attributes, (scope, attributes, depth))
            names = node.get("output", ())
            outputs += [outputs[-1] if outputs else _DYNAMIC] * (len(names) - len(outputs))
            scope.update(zip(names, outputs, strict=False))
            scope[b""] = _OMITTED

    def _visit_node(
        self,
        node: Message,
        inputs: list[Any],
        node_attributes: dict[bytes, Message],
        context: tuple[Scope, Mapping[bytes, Message], int],
    ) -> list[Any]:
        op, (scope, attributes, depth) = op_of(node), context
        if op in self._functions:
            return self._call(op, inputs, node_attributes, depth)
        subgraphs = [attribute["g"] for attribute in node_attributes.values() if "g" in attribute]
        if subgraphs:
            branch_outputs = [
                self._outputs(body, scope, attributes, depth + 1) for body in subgraphs
            ]
            return _if_outputs(branch_outputs) if op[1] == b"If" else [_DYNAMIC]
        if op == (b"", b"Constant"):
            return [_constant_value(node_attributes)]
        if op == (b"", b"Shape") and inputs[:1] == [_DYNAMIC]:
            return [KnownConstant(RANK, (RANK,), False)]
        if _DYNAMIC in inputs or op == (b"", b"SequenceEmpty"):  # only tensors are folded
            return [_DYNAMIC]
        rule = RULES.get(op[1]) if op[0] == b"" else None
        while inputs and inputs[-1] is _OMITTED:
            inputs = inputs[:-1]
        # rules identify inputs by position, so none may be missing in between
        if rule is None or not inputs or (_OMITTED in inputs and op[1] != b"Clip"):
            raise Unbounded
        outputs = rule(inputs, node_attributes)
        self.made += sum(output.count for output in outputs)
        return outputs

    def _call(
        self,
        op: tuple[bytes, bytes],
        inputs: list[Any],
        node_attributes: dict[bytes, Message],
        depth: int,
    ) -> list[Any]:
        digests = [(name, self._digest(each)) for name, each in sorted(node_attributes.items())]
        key = (
            op,
            tuple(digests),
            tuple(r.key if isinstance(r, KnownConstant) else id(r) for r in inputs),
        )
        if key not in self._call_cache:
            function, count_before = self._functions[op], self.made
            names = function.get("input", ())
            scope = ChainMap(dict.fromkeys((*names, b""), _OMITTED))
            scope |= dict(zip(names, inputs, strict=False))
            self._walk_nodes(function, scope, node_attributes, depth + 1)
            outputs = [scope.get(name, _DYNAMIC) for name in function.get("output", ())]
            self._call_cache[key] = self.made - count_before, outputs
            return list(outputs)
        cost, outputs = self._call_cache[key]
        self.made += cost
        return list(outputs)

    def _digest(self, attribute: Message) -> bytes:
        """Return a digest of an attribute, which may be megabytes that every call hands on."""
        key = id(attribute)  # the model keeps it alive
        if key not in self._digests:
            self._digests[key] = hashlib.sha256(repr(attribute).encode()).digest()
        return self._digests[key]


def _if_outputs(branch_outputs: list[list[Any]]) -> list[Any]:
    """Return the outputs of an If; one with a constant condition is replaced by a branch."""
    outputs = []
    for candidates in zip(*branch_outputs, strict=False):
        constants = [candidate for candidate in candidates if isinstance(candidate, KnownConstant)]
        identical = all(candidate is candidates[0] for candidate in candidates)
        constant = constants[0] if identical and constants else None
        outputs.append(
            constant or (KnownConstant(max(c.count for c in constants)) if constants else _DYNAMIC)
        )
    return outputs or [_DYNAMIC]


def _tensor_constant(tensor: Message) -> KnownConstant:
    shape = integers(tensor.get("dims", ()))
    if math.prod(shape) <= SMALL and tensor.get("data_type") in _INTEGERS:
        numbers = tensor_values(tensor)
        if len(numbers) == math.prod(shape):
            return KnownConstant.of(np.array(numbers, np.int64).reshape(shape))
    return KnownConstant.shaped(shape)


_INTEGERS = (6, 7)  # TensorProto.DataType: int32, int64


def _constant_value(node_attributes: Mapping[bytes, Message]) -> KnownConstant:
    """Return the value of a Constant node."""
    for name, attribute in node_attributes.items():
        if name == b"value" and "t" in attribute:
            return _tensor_constant(attribute["t"])
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
