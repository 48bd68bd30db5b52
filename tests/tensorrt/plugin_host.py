"""The plugin library as TensorRT uses it, through `host/host.h`; needs no TensorRT library.

make plugins TENSORRT_INCLUDE=…                      (the library, and the host beside it)
EDGE_TENSORRT_PLUGINS=…/libedge_tensorrt.so pytest tests/tensorrt
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from edge.launch import DType
from edge.ops import PLUGIN_PREFIX
from tests.compiling import compiled

VARIABLE = "EDGE_TENSORRT_PLUGINS"
HOST = "libedge_tensorrt_host.so"
_HOST = Path(__file__).with_name("host")
_SOURCES = Path(__file__).parents[2] / "plugins" / "tensorrt" / "src"
_CORE = ("blob", "driver", "kernels", "launches", "run", "sizes", "words")
NAMESPACE, VERSION = "edge.device", "1"
BUILD, RUN = 0, 1
# DataType of NvInferRuntimeBase.h; unsigned bytes are passed as int8
_TYPES: Mapping[DType, int] = {"f32": 0, "f16": 1, "i8": 2, "u8": 2, "i32": 3, "i64": 8}
_NAMES: Mapping[int, DType] = {0: "f32", 1: "f16", 2: "i8", 3: "i32", 8: "i64"}
# PluginFieldType of NvInferRuntimePlugin.h: its number → bytes per element
_FIELDS = {0: 2, 1: 4, 2: 8, 3: 1, 4: 2, 5: 4, 6: 1, 8: 1, 10: 8}
_INT32 = 5
_ROOM = 16


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 8),
        ("data", ctypes.c_void_p),
    )


class _Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


class PluginError(Exception):
    """An error of a plugin or its creator; the message is what was logged."""


@dataclass(frozen=True)
class Tensor:
    """A plugin's description of a tensor; `address` is only for `enqueue`."""

    dtype: DType
    shape: tuple[int, ...]
    address: int = 0


@dataclass(frozen=True)
class Field:
    """One field as it is passed: PluginFieldType's number, and its bytes."""

    type: int
    data: bytes


Fields = Mapping[str, Field]


@cache
def library() -> Library:
    """Return the library of this process: the one that EDGE_TENSORRT_PLUGINS names, else its core
    alone.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return Library(_core(), "")
    host = Path(path).with_name(HOST)
    assert host.exists(), f"{host} is missing: `make plugins` builds it beside the library"
    return Library(host, path)


def whole() -> Library:
    """Return the library with its plugins. Skips the test if none is built."""
    if not os.environ.get(VARIABLE):
        pytest.skip(
            "needs the plugin library: make plugins TENSORRT_INCLUDE=…, then "
            f"{VARIABLE}=PATH_OF_IT pytest tests/tensorrt"
        )
    return library()


def _core() -> Path:
    sources = [str(_HOST / "core.cpp"), *(str(_SOURCES / f"{name}.cpp") for name in _CORE)]
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    return compiled("libcore.so", "g++", *options, *sources, "-ldl")


class Library:
    """The plugin library.

    Attributes:
        path: the file that plays TensorRT's part.
        creators: ops of the available plugins, all of NAMESPACE and VERSION.
        version: (major, minor) of the TensorRT headers; (0, 0) for the core alone.
    """

    def __init__(self, host: Path, plugins: str) -> None:
        """Raises PluginError when it is not a plugin library."""
        self.path = host
        self.host = ctypes.CDLL(str(host))
        for name in ("log", "creator", "name"):
            getattr(self.host, f"edge_host_{name}").restype = ctypes.c_char_p
        for name in ("symbol", "create", "clone", "attach"):
            getattr(self.host, f"edge_host_{name}").restype = ctypes.c_void_p
        self.host.edge_host_workspace.restype = ctypes.c_int64
        number = self.host.edge_host_version()
        self.version = (number // 10000, number // 100 % 100)
        if self.host.edge_host_open(os.fsencode(plugins)):
            raise PluginError(self.log())
        self.creators = tuple(self._creators())

    def _creators(self) -> list[str]:
        names, index = [], 0
        while (found := self.host.edge_host_creator(index)) is not None:
            space, name, version = found.decode().split(" ")
            assert (space, version) == (NAMESPACE, VERSION), found
            names.append(name.removeprefix(PLUGIN_PREFIX))
            index += 1
        return names

    def log(self) -> str:
        """Return what was logged since the last call."""
        text: bytes = self.host.edge_host_log()
        return text.decode()

    def symbol(self, name: str) -> int:
        """Return the address of an exported function, 0 if there is none."""
        return self.host.edge_host_symbol(name.encode()) or 0

    def fields(self, name: str) -> dict[str, int]:
        """Return the fields that a creator reads: field → PluginFieldType's number."""
        room = (_Field * _ROOM)()
        count = self.host.edge_host_fields(_full(name), room, _ROOM)
        return {field.name.decode(): field.type for field in room[:count]}

    def create(self, name: str, attributes: Mapping[str, bytes | int]) -> Plugin:
        """Create a plugin as a parser does for a node, from those attributes that the creator
        reads.
        """
        fields = {}
        for field, kind in self.fields(name).items():
            if field in attributes:
                value = attributes[field]
                data = (
                    value if isinstance(value, bytes) else value.to_bytes(_FIELDS[kind], "little")
                )
                fields[field] = Field(kind, data)
        return self.made(name, fields, BUILD)

    def made(self, name: str, fields: Fields, phase: int) -> Plugin:
        """Create a plugin. Raises PluginError."""
        given = (_Field * max(1, len(fields)))()
        kept = [ctypes.create_string_buffer(each.data, len(each.data)) for each in fields.values()]
        for at, (field, each) in enumerate(fields.items()):
            length = len(each.data) // _FIELDS[each.type]
            data = ctypes.cast(kept[at], ctypes.c_void_p)
            given[at] = _Field(field.encode(), data, each.type, length)
        handle = self.host.edge_host_create(_full(name), phase, given, len(fields))
        if not handle:
            raise PluginError(self.log())
        return Plugin(self, handle)


class Plugin:
    """One plugin; destroyed with its last reference. Every method raises PluginError."""

    def __init__(self, library: Library, handle: int) -> None:
        self._library, self._host = library, library.host
        self._handle = ctypes.c_void_p(handle)

    def __del__(self) -> None:
        self._host.edge_host_destroy(self._handle)

    def _done(self, code: int) -> None:
        if code:
            raise PluginError(self._library.log())

    @property
    def name(self) -> str:
        text: bytes = self._host.edge_host_name(self._handle)
        return text.decode()

    # -- while building --------------------------------------------------------------------------

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs for inputs of these types and shapes."""
        count = self._host.edge_host_outputs(self._handle)
        given, made = _tensors(inputs), (_Tensor * count)()
        self._done(self._host.edge_host_types(self._handle, given, len(inputs), made, count))
        self._done(self._host.edge_host_shapes(self._handle, given, len(inputs), made, count))
        return [Tensor(_NAMES[each.type], tuple(each.dims[: each.rank])) for each in made]

    def takes(self, position: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
        """Return whether tensor `position`, counting inputs then outputs, may be of its type."""
        every = _tensors([*inputs, *outputs])
        counts = len(inputs), len(outputs)
        return bool(self._host.edge_host_format(self._handle, position, every, *counts))

    def alias(self, output: int) -> int | None:
        """Return the input whose memory an output shares, -1 for none; None if the interface cannot
        say.
        """
        found: int = self._host.edge_host_alias(self._handle, output)
        return None if found == -2 else found

    def workspace(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        """Return the workspace in bytes for runs of shapes up to these."""
        found: int = self._host.edge_host_workspace(
            self._handle, _tensors(inputs), len(inputs), _tensors(outputs), len(outputs)
        )
        self._done(found < 0)
        return found

    def serialized(self) -> dict[str, Field]:
        """Return the bytes that an engine stores for it."""
        room = (_Field * _ROOM)()
        count = self._host.edge_host_serialize(self._handle, room, _ROOM)
        self._done(count < 0)
        return {
            each.name.decode(): Field(
                each.type,
                ctypes.string_at(each.data, each.length * _FIELDS[each.type])
                if each.length
                else b"",
            )
            for each in room[:count]
        }

    def clone(self) -> Plugin:
        return self._another(self._host.edge_host_clone(self._handle))

    # -- while running ---------------------------------------------------------------------------

    def attached(self) -> Plugin:
        """Return its copy for one execution context."""
        return self._another(self._host.edge_host_attach(self._handle))

    def _another(self, handle: int | None) -> Plugin:
        if not handle:
            raise PluginError(self._library.log())
        return Plugin(self._library, handle)

    def shape_change(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        given, made = _tensors(inputs), _tensors(outputs)
        counts = len(inputs), len(outputs)
        self._done(
            self._host.edge_host_shape_change(self._handle, given, counts[0], made, counts[1])
        )

    def enqueue(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: int, stream: int
    ) -> None:
        """Issue its launches to the stream; every tensor has its address."""
        self._done(
            self._host.edge_host_enqueue(
                self._handle,
                _tensors(inputs),
                len(inputs),
                _tensors(outputs),
                len(outputs),
                ctypes.c_void_p(workspace),
                ctypes.c_void_p(stream),
            )
        )


def at(tensor: Tensor, address: int) -> Tensor:
    return replace(tensor, address=address)


def _full(name: str) -> bytes:
    return f"{NAMESPACE} {PLUGIN_PREFIX}{name} {VERSION}".encode()


def _tensors(tensors: Sequence[Tensor]) -> ctypes.Array[_Tensor]:
    made = (_Tensor * max(1, len(tensors)))()
    for into, tensor in zip(made, tensors, strict=False):
        into.type, into.rank = _TYPES[tensor.dtype], len(tensor.shape)
        into.dims[: len(tensor.shape)] = tensor.shape
        into.data = tensor.address
    return made
