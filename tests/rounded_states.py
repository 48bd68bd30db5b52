"""Turn a graph with fp32 states into one whose states are rounded at the beginning and end of a
run.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

_TYPES = {"float16": TensorProto.FLOAT16, "int8": TensorProto.INT8}


def int8_scale(name: str) -> np.float32:
    """An int8 state holds multiples of this; scan states are smaller than convolution states."""
    return np.float32(1 / 32 if name.endswith(".conv_state") else 1 / 4096)


def round_states(graph: bytes, dtypes: Mapping[str, str]) -> bytes:
    """Return the graph with each state of `dtypes` (input name → "float16" or "int8") in that type.

    Within a run it works on fp32, so this tests the transport of states, not rounding after every
    token.
    """
    model = onnx.load_from_string(graph)
    model.graph.initializer.append(numpy_helper.from_array(np.int8(0), "state.zero"))
    for name, dtype in dtypes.items():
        _round(model, name, dtype)
    return model.SerializeToString()


def _round(model: ModelProto, name: str, dtype: str) -> None:
    out = f"{name}s"
    for value in (*model.graph.input, *model.graph.output):
        if value.name in (name, out):
            assert value.type.tensor_type.elem_type == TensorProto.FLOAT
            value.type.tensor_type.elem_type = _TYPES[dtype]
    for node in model.graph.node:
        node.input[:] = [f"{i}.float" if i == name else i for i in node.input]
        node.output[:] = [f"{o}.float" if o == out else o for o in node.output]
    if dtype == "float16":
        before = helper.make_node("Cast", [name], [f"{name}.float"], to=TensorProto.FLOAT)
        after = helper.make_node("Cast", [f"{out}.float"], [out], to=TensorProto.FLOAT16)
    else:
        scale = f"{name}.scale"
        model.graph.initializer.append(numpy_helper.from_array(int8_scale(name), scale))
        before = _int8("DequantizeLinear", name, scale, f"{name}.float")
        after = _int8("QuantizeLinear", f"{out}.float", scale, out)
    model.graph.node.insert(0, before)
    model.graph.node.append(after)


def _int8(op: str, source: str, scale: str, target: str) -> NodeProto:
    return helper.make_node(op, [source, scale, "state.zero"], [target])
