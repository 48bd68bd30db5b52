"""Device graphs of random models, by model and recipe; launches read back from their bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

from onnx import ModelProto, NodeProto, helper

from edge.config import ModelConfig
from edge.export.quantize.plan import StateType
from edge.launch import LaunchPlan, Size
from edge.ops import DEVICE_DOMAIN
from edge.plugins.lowering import plan as lowering
from edge.plugins.tensorrt.graph import device_graph
from edge.plugins.tensorrt.launches import (
    DTYPES,
    MAGIC,
    SPACES,
    Call,
    Input,
    Kernel,
    NodeLaunches,
    NodeProgram,
    Output,
    Place,
    WorkBuffer,
)
from tests.quantized_models import built, network, plan_of

# a model of tests/test_graph_models.py, a recipe, the type of the scan states
Case = tuple[str, str, StateType | None]
_ROOT = TemporaryDirectory(prefix="edge-device-")
_Item = TypeVar("_Item")


class Made(NamedTuple):
    """A graph for ONNX Runtime with its weights in `folder`, and the device graph made from it."""

    folder: Path
    config: ModelConfig
    graph: Path
    plan: LaunchPlan
    device: ModelProto
    state_dtypes: Mapping[str, str]

    @property
    def nodes(self) -> list[NodeProto]:
        """Return the nodes that plugins run."""
        return [node for node in self.device.graph.node if node.domain == DEVICE_DOMAIN]


@cache
def _made(name: str, quant: str, state: StateType | None) -> Made:
    folder = Path(_ROOT.name) / f"{name}-{quant}-{state}"
    folder.mkdir()
    _, plan = plan_of(name, quant, **({} if state is None else {"ssm_state": state}))
    found = built(name, plan, folder)
    model = found.graph.read_bytes()
    lowered = lowering.walked(model, folder)
    return Made(
        folder,
        network(name).config,
        found.graph,
        lowering.plan_of(lowered),
        device_graph(model, lowered),
        found.state_dtypes,
    )


def made(name: str, quant: str, state: StateType | None = None) -> Made:
    """Make the graphs of a case, once per process."""
    return _made(name, quant, state)


def attributes(node: NodeProto) -> dict[str, object]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def launches(node: NodeProto) -> NodeLaunches:
    """Return the launches that the node's plugin reads."""
    data = attributes(node)["launches"]
    assert isinstance(data, bytes)
    return _Reader(data).launches()


class _Reader:
    """Read `NodeLaunches` from bytes in the format of `edge.plugins.tensorrt.launches`."""

    def __init__(self, data: bytes) -> None:
        assert data.startswith(MAGIC)
        self._data, self._at = data, len(MAGIC)
        self._left = 1
        self._left = self.number()
        end = self._at
        for _ in range(self._left):
            while data[end] & 0x80:
                end += 1
            end += 1
        self._text = data[end:]

    def number(self) -> int:
        assert self._left
        self._left -= 1
        found = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            found |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return found

    def launches(self) -> NodeLaunches:
        found = NodeLaunches(
            inputs=self._list(lambda: Input(DTYPES[self.number()], self.number())),
            outputs=self._list(self._output),
            symbols=dict(self._list(lambda: (self._ascii(), (self.number(), self.number())))),
            rows=self._ascii(),
            workspace=self._list(lambda: WorkBuffer(self.number(), self.number() or None)),
            kernels=self._list(lambda: Kernel(self._string(), self.number())),
            calls=self._list(self._call),
            programs=self._list(self._program),
        )
        assert self._left == 0
        return found

    def _list(self, item: Callable[[], _Item]) -> tuple[_Item, ...]:
        return tuple(item() for _ in range(self.number()))

    def _ascii(self) -> str:
        return self.number().to_bytes(8, "little").rstrip(b"\0").decode()

    def _string(self) -> str:
        start, length = self.number(), self.number()
        return self._text[start : start + length].decode()

    def _size(self) -> Size:
        return Size(times=self.number(), of=self._ascii(), per=self.number())

    def _output(self) -> Output:
        dtype, alias = DTYPES[self.number()], self.number() - 1
        return Output(dtype, self._list(self._dim), alias)

    def _dim(self) -> int | str:
        symbol, number = self._ascii(), self.number()
        return symbol or number

    def _call(self) -> Call:
        kernel, grid = self.number(), (self._size(), self._size(), self._size())
        return Call(kernel, grid, self._list(self._argument))

    def _argument(self) -> Place | Size | float:
        tag = self.number()
        if tag == 0:
            return Place(SPACES[self.number()], self.number(), self.number())
        if tag == 1:
            return self._size()
        assert tag == 2
        bits: float = struct.unpack("<f", self.number().to_bytes(4, "little"))[0]
        return bits

    def _program(self) -> NodeProgram:
        tree, rows = bool(self.number()), self.number() or None
        return NodeProgram(tree, rows, self._list(self.number))
