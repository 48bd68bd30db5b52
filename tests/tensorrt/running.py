"""A plugin's way from a graph's node to a run, as in TensorRT: built, serialized, restored, run."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.launch import DType, Variant
from edge.ops import PLUGIN_PREFIX
from edge.runtime.cuda.device import Memory
from tests.tensorrt.machine import Machine, machine
from tests.tensorrt.plugin_host import RUN, Library, Plugin, Tensor, at, library

Array = NDArray[Any]
NUMPY: Mapping[DType, type[np.generic]] = {
    "f32": np.float32,
    "f16": np.float16,
    "i8": np.int8,
    "u8": np.uint8,
    "i32": np.int32,
    "i64": np.int64,
}
DTYPES: Mapping[np.dtype[Any], DType] = {np.dtype(t): name for name, t in NUMPY.items()}
# not a usable number in any type: NaN, and -1
POISON = 0xFF


class Placed:
    """A tensor in device memory, `start` bytes after the allocation's beginning."""

    def __init__(self, tensor: Tensor, memory: Memory, start: int = 0) -> None:
        self.tensor = at(tensor, memory.address + start)
        self.memory, self.start = memory, start

    def array(self) -> Array:
        """Return a copy of it, once everything issued is done."""
        on = machine()
        dtype = np.dtype(NUMPY[self.tensor.dtype])
        count = int(np.prod(self.tensor.shape, dtype=np.int64))
        stage = on.device.host(count * dtype.itemsize)
        on.wait()
        on.device.read(stage, self.memory, self.start)
        on.wait()
        return stage.view(dtype).reshape(self.tensor.shape).copy()

    def seen_as(self, tensor: Tensor) -> Placed:
        """Return the same memory under another description."""
        return Placed(tensor, self.memory, self.start)


def empty(tensor: Tensor) -> Placed:
    """Return memory of exactly its size, filled with poison."""
    device = machine().device
    nbytes = int(np.prod(tensor.shape, dtype=np.int64)) * np.dtype(NUMPY[tensor.dtype]).itemsize
    memory = device.allocate(max(1, nbytes))
    device.fill(memory, 0, nbytes, POISON)
    return Placed(tensor, memory)


def put(array: Array) -> Placed:
    """Return a copy of it in device memory."""
    device = machine().device
    placed = empty(Tensor(DTYPES[array.dtype], array.shape))
    stage = device.host(array.nbytes)
    stage[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    device.write(placed.memory, 0, stage)
    machine().wait()
    return placed


def with_kernels(variants: Iterable[Variant]) -> Library:
    """Hand these kernels to the library, as `edge build` does."""
    found, data = library(), machine().kernels(variants)
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    with machine().stream():
        code = call(found.symbol("edge_tensorrt_set_kernels"))(
            ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p), len(data)
        )
        # the core has no such option: it always reports aliases
        aliased = found.symbol("edge_tensorrt_set_aliased")
        if aliased:
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(aliased)(1)
    assert code == 0, found.log()
    return found


class Running:
    """A node's plugin in an execution context.

    Attributes:
        workspace_bytes: workspace for runs up to the largest inputs.
        aliases: output → the input whose memory it shares.
    """

    def __init__(
        self,
        library: Library,
        name: str,
        attributes: Mapping[str, Any],
        largest: Sequence[Tensor],
        aliases: Mapping[int, int],
    ) -> None:
        self._machine: Machine = machine()
        self.aliases = aliases
        with self._machine.stream():
            self._built = built = library.create(name, attributes)
            assert built.name.split()[1] == PLUGIN_PREFIX + name
            outputs = built.outputs(largest)
            for position in range(len(largest) + len(outputs)):
                assert built.takes(position, largest, outputs), (name, position)
            for output in range(len(outputs)):
                assert built.alias(output) == aliases.get(output, -1), (name, output)
            self.workspace_bytes = built.workspace(largest, outputs)
            kept = library.made(name, built.serialized(), RUN)
            self.plugin: Plugin = kept.attached()
        self._workspace = empty(Tensor("u8", (self.workspace_bytes,)))

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for these inputs, as reported while building."""
        return self._built.outputs(inputs)

    def run(self, inputs: Sequence[Placed], wanted: Sequence[Placed | None] = ()) -> list[Placed]:
        """Issue a run; an output is placed on its aliased input, where it is `wanted`, or in new
        memory.
        """
        given = [each.tensor for each in inputs]
        made = []
        for i, (each, where) in enumerate(zip_longest(self.outputs(given), wanted)):
            if i in self.aliases:
                made.append(inputs[self.aliases[i]].seen_as(each))
            elif where is not None:
                made.append(where.seen_as(each))
            else:
                made.append(empty(each))
        self._machine.wait()
        self._machine.kept += [self, *inputs, *made]
        self.issue(given, [each.tensor for each in made])
        return made

    def issue(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Make the two calls of a run, with a workspace full of an earlier node's data."""
        device, workspace = self._machine.device, self._workspace.memory
        device.fill(workspace, 0, self.workspace_bytes, POISON)
        with self._machine.stream() as stream:
            self.plugin.shape_change(inputs, outputs)
            self.plugin.enqueue(inputs, outputs, workspace.address, stream)
