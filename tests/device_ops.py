"""Single device ops: inputs for each one from its statement, and how to run it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto, helper, numpy_helper

from edge.export.graph.run import session_options
from edge.launch import RUN_FIELDS
from edge.ops import DEVICE_DOMAIN, DEVICE_VERSION, DOMAIN, VERSION, Value
from edge.plugins.device.library import device_functions
from edge.plugins.device.statements import DEVICE_OPS, device_name, viewable
from edge.plugins.onnx import OPSETS
from edge.runtime.ledger import KEEP, LAST
from tests.device_reference import Steps

Array = NDArray[Any]
WINDOW = 5
LOG_ROWS = 2 * WINDOW
CAPACITY = 29
_TYPES = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "i32": np.int32}
_STATES = {32: np.float32, 16: np.float16, 8: np.int8}
# Symbols of shapes: odd and distinct. `choices` has those that a variant depends on.
_SIZES = {
    "D": 48, "n": 48, "p": 12, "q": 4, "C": 19, "E": 23, "N": 9, "R": 7, "I": 21, "O": 33, "K": 4,
    "V": 31, "H": 6, "P": 8, "KV": 2, "dim/2": 3, "S": LOG_ROWS, "A": 1, "2": 2, "8": 8, "1": 1,
    "block_size": 32, "X": 6, "k": 2, "J": 1,
}  # fmt: skip
# attributes that are neither a variant's choice nor columns
_ATTRIBUTES = {
    "K": 64, "N": 33, "block_size": 32, "eps": 1e-5, "heads": 6, "head_dim": 8, "kv_heads": 2,
    "d_state": 9, "dt_min": 0.001, "dt_max": 3.0, "scale": 0.3, "dim": 6, "conv_start": 5,
    "first": 20, "k": 2, "sigmoid": 1, "normalise": 1, "top_groups": 1, "parts": 1, "experts": 6,
    "window": 6, "softcap": 1.5, "cap": 1.5,
}  # fmt: skip
_CHOICES = [
    dict(zip(("bits", "state_bits", "groups"), choice, strict=True))
    for choice in itertools.product((4, 8), (32, 16, 8), (2, 1))
]
# The largest absolute value that int8 inputs of these names represent; 3 for others.
_LARGEST = {"A_log": 2.8, "weight": 1.0, "state": 12.0, "dt": 4.0, "dt_bias": 4.0}
# Values of rows that nothing may read or change.
_POISON = {"f": np.nan, "i": 77}


class Case:
    """A device op with its constants.

    Attributes:
        channels: whether scales are per channel, where they may be.
        half: whether weights that may be fp16 are.
        tree: maximum size of the trees to run; 1 for none.
    """

    def __init__(self, name: str, *, channels: bool = False, half: bool = False) -> None:
        self.name, self.channels, self.half = name, channels, half
        self.op = DEVICE_OPS[name]
        self.rng = np.random.default_rng(sum(map(ord, name)))
        base = re.sub(r"_\d+", "", name)
        choice = next(c for c in _CHOICES if device_name(base, c) == name or base.endswith("Rows"))
        self.sizes = {**_SIZES, "bits": choice["bits"], "G": choice["groups"]}
        if "ScanGroups" in name:
            self.sizes |= {"E": 24, "G": 2}
        stated = {a.name for a in self.op.attributes}
        if "block_size" in stated:
            self.sizes |= {"K": _ATTRIBUTES["K"], "N": _ATTRIBUTES["N"]}
        if "Attention" in name:
            self.sizes |= {"C": CAPACITY}
        # bounds and the like of ops unknown here: numbers in order
        others = (a.name for a in self.op.attributes if a.kind == "float")
        known = {name: (at + 1) / 2 for at, name in enumerate(others)} | _ATTRIBUTES | choice
        self.attributes: dict[str, float] = {n: known[n] for n in known if n in stated}
        for v in self.op.inputs:
            if v.name in viewable(self.op):
                self.attributes[f"{v.name}_start"] = int(self.rng.integers(0, 5))
                self.attributes[f"{v.name}_width"] = self._dim(v.shape[-1])

    @property
    def id(self) -> str:
        return "-".join([self.name, *["channels"] * self.channels, *["half"] * self.half])

    def _dim(self, dim: str) -> int:
        """Evaluate `G·N`, `K-1`, `K/block_size`, `block_size·bits/8`, `1|C`."""
        if "|" in dim:
            return self._dim(dim.split("|")[int(self.channels)])
        if dim in self.sizes:
            return self.sizes[dim]
        if dim.endswith("-1"):
            return self._dim(dim[:-2]) - 1
        over, _, under = dim.partition("/")
        return math.prod(map(self._dim, over.split("·"))) // self._dim(under or "1")

    def shape(self, v: Value, **known: Any) -> list[Any]:
        """Return the shape of `v`; `known` has the symbols T, B, L and P of lists."""
        if v.name == "state_scale":
            of_heads = [self.sizes["H"], 1, self.sizes["N"]]
            many = of_heads if "Heads" in self.name else [self.sizes["N"], 1]
            return many if self.channels else [1]
        if v.name == "replay":
            return [known["P"]]
        dims = [d for dim in v.shape for d in (("T", "B") if dim == "..." else (dim,))]
        known.pop("P", None)
        return [known[dim] if dim in known else self._dim(dim) for dim in dims]

    def dtype(self, v: Value) -> np.dtype[Any]:
        if v.name.startswith("ssm_state"):
            return np.dtype(_STATES[int(self.attributes.get("state_bits", 32))])
        return np.dtype(_TYPES["f16" if self.half and "f16" in v.dtypes else v.dtypes[0]])

    def values(self, v: Value, **known: int) -> Array:
        """Return plausible values for the input `v`."""
        shape, dtype = self.shape(v, **known), self.dtype(v)
        if v.name == "tokens":
            table = self.op.inputs[1]
            return self.rng.integers(0, self.shape(table)[0], shape).astype(dtype)
        if v.name == "index":
            return self.rng.integers(-1, self._dim("K"), shape).astype(dtype)
        if dtype == np.int8:
            return self.rng.integers(-128, 128, shape).astype(dtype)
        if v.name.endswith("scale"):
            of = v.name.removesuffix("scale").rstrip("_").removeprefix("conv_")
            return (_LARGEST.get(of, 3) / 127 * self.rng.uniform(0.5, 1.5, shape)).astype(dtype)
        if v.name == "A":
            return -np.exp(self.rng.uniform(-1, 2, shape)).astype(dtype)
        return self.rng.normal(0, 1, shape).astype(dtype)

    @cached_property
    def constants(self) -> dict[str, Array]:
        return {v.name: self.values(v) for v in self.op.inputs if v.role == "weight"}

    def model(self) -> ModelProto:
        """Build a model of the one node, as a device graph has it."""
        inputs, outputs = self.op.inputs, self.op.outputs
        plugin = {"launches": b"bytes", "plugin_version": "1", "plugin_namespace": DEVICE_DOMAIN}
        node = helper.make_node(
            self.name,
            [v.name for v in inputs],
            [v.name for v in outputs],
            domain=DEVICE_DOMAIN,
            **self.attributes,
            **plugin,
            carries=1,
        )
        graph = helper.make_graph(
            [node],
            "one",
            [self._info(v) for v in inputs if v.role != "weight"],
            [self._info(v) for v in outputs],
            [numpy_helper.from_array(a, n) for n, a in self.constants.items()],
        )
        imports = {"": OPSETS[""], DOMAIN: VERSION, DEVICE_DOMAIN: DEVICE_VERSION}
        return helper.make_model(
            graph,
            functions=device_functions([self.name]),
            opset_imports=[helper.make_opsetid(d, n) for d, n in imports.items()],
            ir_version=10,
        )

    def _info(self, v: Value) -> ValueInfoProto:
        dims = self.shape(v, T="T", B="B", L="L", P="P", A="A")
        if v.name in viewable(self.op):
            dims[-1] = self.whole(v.name)
        return helper.make_tensor_value_info(
            v.name, helper.np_dtype_to_tensor_dtype(self.dtype(v)), dims
        )

    def whole(self, name: str) -> int:
        """Return the tensor whose columns `name` is: the tensor itself if they start at 0."""
        start, width = (int(self.attributes[f"{name}_{part}"]) for part in ("start", "width"))
        return start + width + (3 if start else 0)

    @cached_property
    def session(self) -> ort.InferenceSession:
        model, options = self.model().SerializeToString(), session_options(threads=1)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model; return outputs by name."""
        used = {i.name for i in self.session.get_inputs()}
        found = self.session.run(None, {n: a for n, a in given.items() if n in used})
        return {v.name: y for v, y in zip(self.op.outputs, found, strict=True)}

    def given(self, steps: Steps, batch: int) -> dict[str, Array]:
        """Return all inputs, constants included; what may not be read or changed is poisoned."""
        tokens = len(steps.slots)
        replay = _replay(steps, self.rng)
        steering = {"run": _run(steps), "replay": replay, "slots": _ints(steps.slots)}
        steering |= {"ancestors": _ancestors(steps), "rows": _ints(range(tokens - 1, -1, -2))}
        known = {"T": tokens, "B": batch, "P": len(replay), "A": len(steering["ancestors"])}
        known["L"] = len(steering["rows"])
        found = dict(self.constants)
        for v in self.op.inputs:
            if v.name in steering:
                found[v.name] = steering[v.name]
            elif v.name in ("taps", "state_taps"):
                found[v.name] = _taps(steps, self.sizes["K"])[v.name]
            elif v.role == "state":
                found[v.name] = self._memory(v, steps, known)
            elif v.role == "value":
                found[v.name] = self._columns(v, self.values(v, **known))
            elif v.name == "chosen":
                found[v.name] = self._chosen(self.shape(v, **known))
            elif v.name == "order":
                order = np.argsort(found["chosen"], axis=None, kind="stable")
                found[v.name] = _ints(order).reshape(found["chosen"].shape)
        return found

    def _memory(self, v: Value, steps: Steps, known: dict[str, int]) -> Array:
        """Return a state, log or cache in which everything is poison except what a run may read."""
        real = self.values(v, **known)
        memory = np.full_like(real, _POISON[real.dtype.kind])
        if v.name.endswith("cache"):
            memory[:, :, : steps.past] = real[:, :, : steps.past]
        else:
            rows = [steps.source] if v.shape[0] == "2" else list(steps.pending)
            memory[rows] = real[rows]
        return memory

    def _chosen(self, shape: list[int]) -> Array:
        """Return distinct experts per row, among those that have weights."""
        stacks = [len(array) for array in self.constants.values()]
        experts = int(self.attributes.get("experts", stacks[0] if stacks else 0))
        rows = [self.rng.permutation(experts)[: shape[-1]] for _ in range(math.prod(shape[:-1]))]
        return _ints(rows).reshape(shape)

    def _columns(self, v: Value, array: Array) -> Array:
        """Embed `array` among poisoned columns."""
        if v.name not in viewable(self.op):
            return array
        start = int(self.attributes[f"{v.name}_start"])
        whole = np.full(
            (*array.shape[:-1], self.whole(v.name)), _POISON[array.dtype.kind], array.dtype
        )
        whole[..., start : start + array.shape[-1]] = array
        return whole


def cases(names: Iterable[str]) -> list[Case]:
    """Return each op, also with scales per channel and with fp16 weights where it supports them."""
    found = []
    for name in names:
        found.append(Case(name))
        values = DEVICE_OPS[name].inputs
        if any("|" in v.shape[0] or v.name == "state_scale" for v in values if v.shape):
            found.append(Case(name, channels=True))
        if any("f16" in v.dtypes for v in values if v.role == "weight"):
            found.append(Case(name, half=True))
    return found


# -- inputs of a run -------------------------------------------------------------------------------


def _ints(values: Any) -> Array:
    return np.array(list(values), np.int32)


def _run(steps: Steps) -> Array:
    pending = len(steps.pending)
    fields = (pending, steps.advance, steps.source, steps.target, steps.store, steps.past, 0)
    assert len(fields) == len(RUN_FIELDS)
    return _ints([*fields, -1])


def _replay(steps: Steps, rng: np.random.Generator) -> Array:
    """Return more rows than needed: those behind the pending ones mean nothing."""
    more = int(rng.integers(0, LOG_ROWS - len(steps.pending)))
    return _ints([*steps.pending, *[10**6] * max(more, int(not steps.pending))])


def _ancestors(steps: Steps) -> Array:
    if steps.parents is None:
        return np.ones((1, 1), np.int32)
    matrix = np.zeros((len(steps.parents),) * 2, np.int32)
    for token, parent in enumerate(steps.parents):
        matrix[token] = matrix[parent] if parent >= 0 else 0
        matrix[token, token] = 1
    return matrix


def _taps(steps: Steps, width: int) -> dict[str, Array]:
    """Return rows of [state slot | log | new tokens] in the order of a chain."""
    state, first = list(range(width - 1)), width - 1 + LOG_ROWS
    new = [first + token for token in range(len(steps.slots))]
    order = [*state, *(width - 1 + row for row in steps.pending), *new]
    taken = len(steps.pending)
    taps = [order[taken + token : taken + token + width] for token in range(len(new))]
    end = taken + len(new) if steps.store == LAST else steps.advance
    last = order[end : end + width - 1] if steps.store != KEEP else [10**6] * (width - 1)
    return {"taps": _ints(taps).reshape(-1, width), "state_taps": _ints(last)}
