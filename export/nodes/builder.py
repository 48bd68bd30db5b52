"""A graph under construction: nodes, functions, inputs, outputs, and its weights.bin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from edge.config import ModelConfig
from edge.errors import ExportError
from edge.export.quantize.plan import Storage
from edge.launch import DType, Log
from edge.ops import DOMAIN, VERSION
from edge.plugins.catalogue import OPS
from edge.plugins.onnx import function, model_of
from edge.tensors import tensor_shapes

F32 = NDArray[np.float32]
# Weight → XᵀX of its input, for GPTQ, or None if unknown.
HessianOf = Callable[[str], NDArray[np.float64] | None]
_TYPES = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "i8": TensorProto.INT8,
    "u8": TensorProto.UINT8,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}

# Types of states that are not fp32; no other input has them.
_STATE_DTYPES: dict[str, Literal["int8", "float16"]] = {"i8": "int8", "f16": "float16"}

# TensorRT's alignment of an input's address; a weight may be an input.
ALIGNMENT = 256
PAGE = 4096
# Tensors at least this large start on a page, so that they can be mapped one by one, and identical
# ones are stored once.
SHARED = 1 << 20


class TensorSource(Protocol):
    """Source of canonical weights by name, one at a time: a checkpoint or a dict."""

    def __getitem__(self, name: str, /) -> Any: ...


def to_numpy(tensor: Any) -> F32:
    """Convert a torch tensor or array of any float type to an fp32 array, which is not copied."""
    if isinstance(tensor, np.ndarray):
        return np.asarray(tensor, np.float32)
    return cast(F32, tensor.detach().float().cpu().numpy())


class WeightWriter:
    """Appends tensors to weights.bin and hands back the ONNX initializers that point into it.

    The bytes depend only on the tensors and their order. Identical large tensors, as in blocks that
    share their weights, are stored once.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.size = 0
        self._file = file
        self._name = Path(file.name).name
        self._large_offsets: dict[bytes, int] = {}  # SHA-256 → offset

    def add(self, name: str, array: NDArray[Any]) -> TensorProto:
        """Append `array`, little-endian and in C order, and return its external initializer."""
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        offset = self._offset(array.reshape(-1).view(np.uint8).data)
        tensor = TensorProto(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        location = {"location": self._name, "offset": offset, "length": array.nbytes}
        for key, value in location.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def _offset(self, data: memoryview) -> int:
        """Return the offset of the bytes; append them unless the same ones are there already."""
        large = data.nbytes >= SHARED
        content = hashlib.sha256(data).digest() if large else b""
        if content in self._large_offsets:
            return self._large_offsets[content]
        padding = -self.size % (PAGE if large else ALIGNMENT)
        self._file.write(b"\0" * padding)
        self._file.write(data)
        offset = self.size + padding
        self.size = offset + data.nbytes
        if large:
            self._large_offsets[content] = offset
        return offset


class GraphBuilder:
    """Builds a graph. Values are names; methods that add nodes return their outputs' names."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: TensorSource,
        weights: WeightWriter,
        hessian: HessianOf | None = None,
    ) -> None:
        self.config = config
        self.hessian = hessian
        self.inputs: list[ValueInfoProto] = []
        self.outputs: list[ValueInfoProto] = []
        self.state_dtypes: dict[str, Literal["int8", "float16"]] = {}
        self.scan_logs: dict[str, Log] = {}
        self._shapes = tensor_shapes(config)
        self._tensors = tensors
        self._weights = weights
        self._nodes: list[NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self._functions: dict[str, None] = {}
        self._names: set[str] = set()
        # matrix → how it is stored, and its shape
        self.stored: dict[str, tuple[Storage, tuple[int, int]]] = {}

    # -- values -----------------------------------------------------------------------------------

    def input(self, name: str, dtype: str, shape: Sequence[str | int]) -> str:
        if dtype in _STATE_DTYPES:
            self.state_dtypes[name] = _STATE_DTYPES[dtype]
        self.inputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], shape))
        return name

    def output(self, name: str, shape: Sequence[str | int], dtype: str = "f32") -> None:
        self.outputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], shape))

    def log(self, value: str, width: int, dtype: DType) -> str:
        """Make `value` [T, B, width] an output that is logged.

        Returns the input that feeds logged rows back, [L, B, width]: the value's name and `_log`.
        """
        name = f"{value}_log"
        self.output(value, ["T", "B", width], dtype)
        self.inputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], ["L", "B", width]))
        self.scan_logs[name] = Log(dtype=dtype, width=width)
        return name

    def integers(self, values: Sequence[int]) -> str:
        """Add an int64 constant [len(values)], stored inside the graph file."""
        name = "const." + "_".join(map(str, values))
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.array(values, np.int64), name)
        return name

    def floats(self, name: str, values: F32) -> str:
        """Add a small fp32 constant that is not a weight, stored inside the graph file."""
        self.initializers[name] = numpy_helper.from_array(np.asarray(values, np.float32), name)
        return name

    # -- nodes ------------------------------------------------------------------------------------

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a standard op with one output."""
        return self.nodes(op, inputs, (output,), **attributes)[0]

    def nodes(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
    ) -> list[str]:
        return self._add(op, "", inputs, outputs, attributes)

    def call(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
    ) -> list[str]:
        """Add an op of the domain `edge`, as the function for these attributes.

        Raises ExportError for a constant of a type that the op does not take: int8 weights without
        their scale would otherwise be multiplied as they are.
        """
        for value, given in zip(OPS[op].inputs, inputs, strict=False):
            stored = self.initializers.get(given)
            if stored and stored.data_type not in {_TYPES[each] for each in value.dtypes}:
                found = helper.tensor_dtype_to_np_dtype(stored.data_type)
                raise ExportError(
                    f"is {found}, but {op} takes {' or '.join(value.dtypes)} as {value.name}",
                    field=given,
                    remedy="choose another recipe, and report this fault",
                )
        name = OPS[op].function(attributes)
        self._functions[name] = None
        return self._add(name, DOMAIN, inputs, outputs, attributes)

    def _add(
        self,
        op: str,
        domain: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, Any],
    ) -> list[str]:
        for name in outputs:
            if name in self._names:
                raise ExportError(f"two nodes yield {name!r}")
            self._names.add(name)
        label = f"{outputs[0]}.{op}"
        node = helper.make_node(op, inputs, outputs, name=label, domain=domain, **attributes)
        self._nodes.append(node)
        return list(outputs)

    # -- weights ----------------------------------------------------------------------------------

    def tensor(self, name: str) -> F32:
        """Fetch one canonical weight and check its shape against the config's."""
        array = to_numpy(self._tensors[name])
        if array.shape != self._shapes[name]:
            raise ExportError(
                f"has shape {list(array.shape)}, the model needs {list(self._shapes[name])}",
                field=name,
            )
        return array

    def weight(self, name: str, change: Callable[[F32], F32] | None = None) -> str:
        """Store a weight as fp32, once, after `change`; return its initializer's name."""
        if name not in self.initializers:
            array = self.tensor(name)
            self.constant(name, array if change is None else change(array))
        return name

    def constant(self, name: str, array: F32) -> str:
        """Store an fp32 array that is derived from weights."""
        if not np.isfinite(array).all():
            raise ExportError("has a NaN or an infinity", field=name)
        self.initializers[name] = self._weights.add(name, np.asarray(array, np.float32))
        return name

    def raw(self, name: str, array: NDArray[Any]) -> str:
        """Store an array in its own type."""
        self.initializers[name] = self._weights.add(name, array)
        return name

    def matrices(self) -> dict[int, int]:
        """Return bits → number of matrices stored with that width."""
        widths = sorted(storage.bits for storage, _ in self.stored.values())
        return {bits: widths.count(bits) for bits in dict.fromkeys(widths)}

    # -- the result -------------------------------------------------------------------------------

    def model(self) -> ModelProto:
        graph = helper.make_graph(
            self._nodes, "model", self.inputs, self.outputs, list(self.initializers.values())
        )
        functions = [function(name, "ort") for name in self._functions]
        return model_of(graph, functions, {DOMAIN: VERSION})
