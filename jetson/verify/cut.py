"""One node of the device graph as a graph of its own.

ONNX Runtime runs the whole graph on the CPU, through the ops' function bodies, with every value as
an output. So a node's inputs are those of a real run, and its outputs are known beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edge.errors import BundleError
from edge.launch import LaunchPlan
from edge.onnx_runtime import onnxruntime
from edge.ops import DEVICE_DOMAIN
from edge.plugins.tensorrt import OUT
from edge.runtime.cuda.inputs import DeviceRun, Sources
from edge.runtime.ledger import ReplayLedger, ReplayStep, log_slots
from edge.runtime.ort_session import session_options
from edge.runtime.tensorrt import tensors

Array = NDArray[Any]

# NumPy types by ONNX Runtime's names
_NUMPY: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8,
    "tensor(int32)": np.int32, "tensor(int64)": np.int64,
}  # fmt: skip
FOLDER = "session.model_external_initializers_file_folder_path"


def read(model: bytes, file: str = "graph") -> onnx.ModelProto:
    """Parse the device graph. Raises BundleError when it is not an ONNX model."""
    try:
        parsed: onnx.ModelProto = onnx.ModelProto.FromString(model)
    except Exception as problem:  # protobuf's exceptions differ between versions
        raise BundleError(f"is not an ONNX model: {problem}", file=file) from None
    return parsed


def device_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes that plugins run, in order."""
    return [node for node in model.graph.node if node.domain == DEVICE_DOMAIN]


def first_of_each_op(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Return the first node of every op, in the graph's order."""
    first: dict[str, onnx.NodeProto] = {}
    for node in device_nodes(model):
        first.setdefault(node.op_type, node)
    return first


def inputs_of(model: onnx.ModelProto, node: onnx.NodeProto) -> Sequence[str]:
    """Return the node's inputs that are not initializers."""
    constant = {tensor.name for tensor in model.graph.initializer}
    return [name for name in dict.fromkeys(node.input) if name not in constant]


def alone(model: onnx.ModelProto, node: onnx.NodeProto, values: Mapping[str, Array]) -> bytes:
    """Return a model of this node alone. `values` has its inputs and outputs, for shapes and types.

    The node becomes the one that carries the engine's kernels.
    """
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    copy.attribute.extend(attribute for attribute in node.attribute if attribute.name != "carries")
    copy.attribute.append(helper.make_attribute("carries", 1))
    single = onnx.ModelProto()
    single.CopyFrom(model)
    single.graph.CopyFrom(
        helper.make_graph(
            [copy],
            "one",
            [_value_info(name, values[name]) for name in inputs_of(model, node)],
            [_value_info(name, values[name]) for name in node.output],
            [tensor for tensor in model.graph.initializer if tensor.name in node.input],
        )
    )
    data: bytes = single.SerializeToString()
    return data


def _value_info(name: str, array: Array) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, array.shape)


# -- values of a real run -------------------------------------------------------------------------

WINDOW = 4
CAPACITY = 16
# a prompt, two tokens that can be rewound, and the three whose values are used
COUNTS = (5, 2, 3)


class Values:
    """Consecutive runs of the whole graph on the CPU, as in a session."""

    def __init__(
        self, model: onnx.ModelProto, plan: LaunchPlan, folder: Path, vocab_size: int
    ) -> None:
        """`folder` has the graph's weights.bin."""
        self._sources, self._lists = Sources(plan), tensors.lists(plan)
        self._vocab_size = vocab_size
        self._session = self._open_session(model, folder)
        self._outputs = [output.name for output in self._session.get_outputs()]

    def _open_session(self, model: onnx.ModelProto, folder: Path) -> Any:
        """Open a session with all inputs and outputs of device nodes as outputs."""
        extended, graph = onnx.ModelProto(), model.graph
        extended.CopyFrom(model)
        existing = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
        exposed = dict.fromkeys(
            name for node in device_nodes(model) for name in (*node.output, *node.input) if name
        )
        extended.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in exposed if name not in existing
        )
        options = session_options(1)
        options.add_session_config_entry(FOLDER, str(folder))
        return onnxruntime.InferenceSession(
            extended.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def last(self) -> dict[str, Array]:
        """Run COUNTS tokens. Return all values of the last run, its graph inputs included."""
        ledger = ReplayLedger(WINDOW)
        states: dict[str, Array] = {}
        rng = np.random.default_rng(20261121)
        feeds: dict[str, Array] = {}
        outputs: dict[str, Array] = {}
        for index, count in enumerate(COUNTS):
            step = ledger.commit(count) if index == 0 else ledger.run(count)
            tokens = rng.integers(0, self._vocab_size, (count, 1))
            feeds = self._feeds(step, tokens, states)
            outputs = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
            states = {
                n.removesuffix(OUT): outputs[n] for n in outputs if n.removesuffix(OUT) in feeds
            }
            ledger = step.after
        return feeds | outputs

    def _feeds(
        self, step: ReplayStep, tokens: NDArray[np.int64], states: Mapping[str, Array]
    ) -> dict[str, Array]:
        slots = log_slots(WINDOW)
        sizes = {"T": len(tokens), "B": 1, "L": 1, "A": 1, "S": slots, "P": slots, "C": CAPACITY}
        feeds = {
            meta.name: np.zeros(
                [sizes[dim] if isinstance(dim, str) else dim for dim in meta.shape],
                _NUMPY[meta.type],
            )
            for meta in self._session.get_inputs()
        }
        flat = {name: feeds[name].reshape(-1) for name in feeds if name in self._lists}
        self._sources.fill(flat, DeviceRun(tokens, step, [len(tokens) - 1]))
        return feeds | dict(states)


# -- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The difference of one output from the wanted one.

    Attributes:
        worst: largest difference, in integer steps, or relative to the largest value.
        share: share of integers that differ.
    """

    output: str
    worst: float
    share: float
    right: bool


# for another order of floating-point sums; int8: by one step, in one value of 10,000 or one in all
_FLOAT_TOLERANCE, _MAX_SHARE = 1e-3, 1e-4


def compare(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> list[Difference]:
    """Compare each found output with the wanted one."""
    return [_difference(name, array, wanted[name]) for name, array in found.items()]


def _difference(name: str, actual: Array, expected: Array) -> Difference:
    deviation = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    if actual.dtype.kind == "f":
        scale = float(np.abs(expected.astype(np.float64)).max()) or 1.0
        worst = float(deviation.max()) / scale
        return Difference(name, worst, 0.0, worst <= _FLOAT_TOLERANCE)  # false for NaN
    worst, differing = float(deviation.max()), int(np.count_nonzero(deviation))
    allowed = (
        actual.dtype == np.int8 and differing <= max(1, _MAX_SHARE * deviation.size) and worst <= 1
    )
    return Difference(name, worst, differing / deviation.size, allowed or differing == 0)
