"""Run one `edge` function in ONNX Runtime, and random trees to run it over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from edge.export.graph.run import session_options
from edge.ops import DOMAIN, VERSION, Op
from edge.plugins.onnx import OPSETS, Flavour, function, op_of

Array = NDArray[Any]
LENGTHS = (1, 2, 3, 5, 7, 63, 64, 65)
# the inputs of logged tokens: name → the input whose rows they are
LOGS = {"x_log": "x", "dt_log": "dt", "B_log": "B"}


def one_op_model(
    name: str,
    flavour: Flavour,
    attributes: Iterable[tuple[str, float]],
    types: Iterable[np.dtype[Any]],
    constants: Mapping[str, Array] = MappingProxyType({}),
) -> ModelProto:
    """Return a model of one op; `types` of the inputs in the statement's order; `constants` are in
    the graph.
    """
    op = op_of(name)
    node = helper.make_node(
        name,
        [v.name for v in op.inputs],
        [v.name for v in op.outputs],
        domain=DOMAIN,
        **dict(attributes),
    )
    inputs = []
    for value, dtype in zip(op.inputs, types, strict=True):
        rank = None if "..." in value.shape else [None] * len(value.shape)
        kind = helper.np_dtype_to_tensor_dtype(dtype)
        if value.name not in constants:
            inputs.append(helper.make_tensor_value_info(value.name, kind, rank))
    outputs = [ValueInfoProto(name=v.name) for v in op.outputs]
    stored = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = helper.make_graph([node], "one", inputs, outputs, stored)
    imports = [helper.make_opsetid(d, v) for d, v in (OPSETS | {DOMAIN: VERSION}).items()]
    return helper.make_model(
        graph, functions=[function(name, flavour)], opset_imports=imports, ir_version=10
    )


def _session(model: ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(
        model.SerializeToString(), session_options(threads=1), providers=["CPUExecutionProvider"]
    )


@cache
def _cached_session(
    name: str,
    flavour: Flavour,
    attributes: tuple[tuple[str, float], ...],
    types: tuple[np.dtype[Any], ...],
) -> ort.InferenceSession:
    return _session(one_op_model(name, flavour, attributes, types))


def _poisoned(like: Array) -> Array:
    """Return NaN, or a number that no test expects everywhere."""
    return np.full(like.shape, np.nan if like.dtype.kind == "f" else 77, like.dtype)


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield these nodes and those of the graphs inside them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_nodes(attribute.g.node)


def inputs_of(op: Op, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs of an op, in its order; logs that `feeds` lacks are empty."""
    none = {log: feeds[of][:0] for log, of in LOGS.items() if of in feeds}
    return {v.name: np.array((none | dict(feeds))[v.name], order="C") for v in op.inputs}


def logged(feeds: Mapping[str, Array], count: int) -> dict[str, Array]:
    """Return the same tokens for a Mamba-2 scan, the first `count` of them logged."""
    logs = {log: feeds[of][:count] for log, of in LOGS.items()}
    own = {name: feeds[name][count:] for name in ("x", "dt", "B", "C")}
    return {**feeds, **logs, **own}


def run_op(
    name: str,
    flavour: Flavour,
    inputs: Mapping[str, Array],
    constant: bool = False,
    **attributes: float,
) -> dict[str, Array]:
    """Return outputs by name, written into poisoned buffers. `…_out` shares its input's buffer.

    `constant` keeps weights in the graph, as models do. It also tests what ONNX Runtime folds,
    packs or chooses on loading, and takes one session per call.
    """
    feeds = inputs_of(op_of(name), inputs)
    what = name, flavour, tuple(attributes.items()), tuple(a.dtype for a in feeds.values())
    if constant:
        weights = {v.name: feeds[v.name] for v in op_of(name).inputs if v.role == "weight"}
        session = _session(one_op_model(*what, weights))
    else:
        session = _cached_session(*what)
    used = {i.name for i in session.get_inputs()}
    results = session.run(None, {n: a for n, a in feeds.items() if n in used})
    names = [o.name for o in session.get_outputs()]
    outputs = {
        n: feeds[n.removesuffix("_out")] if n.endswith("_out") else _poisoned(found)
        for n, found in zip(names, results, strict=True)
    }
    binding = session.io_binding()
    for n, a in feeds.items():
        if n in used:
            binding.bind_input(n, "cpu", 0, a.dtype.type, a.shape, a.ctypes.data)
    for n, a in outputs.items():
        binding.bind_output(n, "cpu", 0, a.dtype.type, a.shape, a.ctypes.data)
    session.run_with_iobinding(binding)
    return outputs


def random_parents(steps: int, rng: np.random.Generator) -> list[int]:
    """Return a random tree: each token's parent is an earlier token or -1."""
    return [int(rng.integers(-1, t)) if t else -1 for t in range(steps)]


def chain(steps: int) -> list[int]:
    return list(range(-1, steps - 1))


def path_to(parents: list[int], token: int) -> list[int]:
    """Return the tokens from the root to `token`."""
    path = []
    while token >= 0:
        path.append(token)
        token = parents[token]
    return path[::-1]


def ancestors(parents: list[int]) -> Array:
    matrix = np.zeros((len(parents), len(parents)), np.float32)
    for t in range(len(parents)):
        matrix[t, path_to(parents, t)] = 1
    return matrix


def taps(parents: list[int], width: int) -> Array:
    """Return rows of concat(state, x) that a convolution of `width` reads at each token."""
    rows = []
    for t in range(len(parents)):
        whole = list(range(width - 1)) + [i + width - 1 for i in path_to(parents, t)]
        rows.append(whole[-width:])
    return np.array(rows, np.int64)
