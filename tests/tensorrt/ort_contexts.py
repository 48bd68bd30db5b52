"""The device graph run by ONNX Runtime on a CPU, in place of TensorRT: `executor.Contexts`.

Its outputs are never in place, as with TensorRT for RTX, and its bodies take every run for a chain.
It shows everything of the engine but TensorRT itself: graph, names, shapes, addresses, books.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.runtime import ort_session
from edge.runtime.cuda.device import Device
from edge.runtime.tensorrt import profiles
from edge.runtime.tensorrt.executor import GraphRun
from edge.runtime.tensorrt.tensors import LOGITS, OUT, PICKED

_TYPES: Mapping[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(int32)": np.int32,
}


def at(address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """The memory there as an array."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)


class OrtContexts:
    """See the module.

    Attributes:
        runs: what was enqueued, in order: sizes by symbol.
    """

    in_place = trees = False
    scratch_bytes = 0
    weights_bytes = 0

    def __init__(self, graph: Path, device: Device, sizes: profiles.Sizes) -> None:
        self.session = ort_session.load(graph.read_bytes(), graph, ort_session.session_options(1))
        self.device = device
        self.runs: list[dict[str, int]] = []
        self.made: list[OrtRun] = []
        self._profiles = profiles.profiles(sizes)

    def bound(self, run: GraphRun, *, own: bool) -> OrtRun:
        """See `Contexts.bound`. Every run has to be one of some profile."""
        found = profiles.choose(self._profiles, run.symbols)
        assert found is not None, run.symbols
        bound = OrtRun(self, run, own)
        self.made.append(bound)
        return bound


@dataclass
class OrtRun:
    """See `executor.Bound`."""

    contexts: OrtContexts
    run: GraphRun
    own: bool
    recordable = True

    def bind(self, addresses: Mapping[str, int]) -> None:
        self.run = self.run._replace(addresses=addresses)

    def enqueue(self) -> None:
        run = self.run
        self.contexts.device.enqueue(lambda _: self._perform(run))

    def _perform(self, run: GraphRun) -> None:
        session = self.contexts.session
        self.contexts.runs.append(dict(run.symbols))
        feeds = {
            each.name: at(run.addresses[each.name], run.shapes[each.name], _TYPES[each.type])
            for each in session.get_inputs()
        }
        names = [each.name for each in session.get_outputs()]
        assert {LOGITS, PICKED} <= set(names)
        for name, value in zip(names, session.run(names, feeds), strict=True):
            source = feeds.get(name.removesuffix(OUT))
            if source is not None:
                assert (value.shape, value.dtype) == (source.shape, source.dtype), name
            at(run.addresses[name], value.shape, value.dtype)[...] = value
