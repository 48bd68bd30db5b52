"""A program: load the plugin library in the registry of TensorRT's lean runtime.

The arguments PLUGINS LAUNCHES KERNELS are files; LAUNCHES is JSON of [op, hexadecimal bytes].
Prints JSON: the creators, the properties of each plugin made from LAUNCHES, and the errors for
wrong fields. It runs in its own process because a library reports errors to whoever loaded it last,
and because wrong bytes must not crash it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt_lean_bindings as trt

from edge.ops import PLUGIN_PREFIX
from edge.plugins.tensorrt import blob

Fields = list[Any]
CORE, BUILD, RUNTIME = (
    getattr(trt.PluginCapabilityType, name) for name in ("CORE", "BUILD", "RUNTIME")
)


def field(name: str, data: bytes, kind: str = "CHAR") -> Any:
    return trt.PluginField(name, data, getattr(trt.PluginFieldType, kind))


def carries(*values: int) -> Any:
    return trt.PluginField("carries", np.array(values, np.int32), trt.PluginFieldType.INT32)


def right(launches: bytes, kernels: bytes) -> Iterator[tuple[str, Fields]]:
    """Yield phases with valid fields."""
    known = field("kernels_id", bytes.fromhex(blob.identity(kernels)), "UNKNOWN")
    valid = field("launches", launches)
    yield "BUILD", [valid]
    yield "BUILD", [field("launches", launches + b"\0"), carries(1)]
    yield "RUNTIME", [valid, known]
    yield "RUNTIME", [valid, known, carries(1), field("kernels", kernels, "UNKNOWN")]


def wrong(launches: bytes, kernels: bytes) -> Iterator[tuple[str, Fields]]:
    identity = bytes.fromhex(blob.identity(kernels))
    known, valid = field("kernels_id", identity, "UNKNOWN"), field("launches", launches)
    for phase in ("BUILD", "RUNTIME"):
        yield phase, []
        yield phase, [field("launches", launches, "INT32"), known]
        yield phase, [valid, known, carries(0, 0)]
        yield phase, [valid, known, carries(2)]
        for length in range(len(launches)):
            yield phase, [field("launches", launches[:length]), known]
    yield "RUNTIME", [valid]
    yield "RUNTIME", [valid, field("kernels_id", identity[:31], "UNKNOWN")]
    yield "RUNTIME", [valid, known, carries(1)]
    for bad in (b"", kernels[:-1], kernels[:20], kernels + b"\0", b"x" + kernels[1:]):
        yield "RUNTIME", [valid, known, carries(1), field("kernels", bad, "UNKNOWN")]
    other = field("kernels_id", bytes(32), "UNKNOWN")
    yield "RUNTIME", [valid, other, carries(1), field("kernels", kernels, "UNKNOWN")]


def described(plugin: Any) -> dict[str, Any]:
    core = plugin.get_capability_interface(CORE)
    build = plugin.get_capability_interface(BUILD)
    run = plugin.get_capability_interface(RUNTIME)
    return {
        "name": [core.plugin_namespace, core.plugin_name, core.plugin_version],
        "interfaces": [
            [one.interface_info.kind, one.interface_info.major] for one in (core, build, run)
        ],
        "outputs": build.num_outputs,
        "formats": build.format_combination_limit,
    }


class Loaded:
    """The library in the registry, with kernels handed over."""

    def __init__(self, path: str, kernels: bytes) -> None:
        self.library = ctypes.CDLL(path)
        self.library.edge_tensorrt_last_error.restype = ctypes.c_char_p
        self.registry = trt.get_plugin_registry()
        assert self.registry.load_library(path) is not None
        assert self.library.edge_tensorrt_set_kernels(kernels, ctypes.c_size_t(len(kernels))) == 0

    def create(self, name: str, phase: str, fields: Fields) -> Any:
        creator = self.registry.get_creator(PLUGIN_PREFIX + name, "1", "edge.device")
        collection = trt.PluginFieldCollection(fields)
        return creator.create_plugin("layer", collection, getattr(trt.TensorRTPhase, phase))

    def creators(self) -> dict[str, Any]:
        return {
            one.name: [
                one.plugin_version,
                {field.name: field.type.name for field in one.field_names},
            ]
            for one in self.registry.all_creators
            if one.plugin_namespace == "edge.device"
        }

    def plugins(self, name: str, launches: bytes, kernels: bytes) -> list[Any]:
        """Create plugins of a node with valid fields; None where one is refused."""
        made = [self.create(name, *each) for each in right(launches, kernels)]
        return [one if one is None else described(one) for one in made]

    def refusals(self, launches: bytes, kernels: bytes) -> list[str | None]:
        """Return the reasons, or None where a plugin was made."""
        found: list[str | None] = []
        for phase, fields in wrong(launches, kernels):
            made = self.create("Linear", phase, fields)
            why = self.library.edge_tensorrt_last_error()
            found.append(why.decode(errors="replace") if made is None else None)
        return found


def main(path: str, nodes: str, packed: str) -> None:
    kernels = Path(packed).read_bytes()
    loaded = Loaded(path, kernels)
    every = [(name, bytes.fromhex(data)) for name, data in json.loads(Path(nodes).read_text())]
    found = {
        "creators": loaded.creators(),
        "plugins": [loaded.plugins(name, data, kernels) for name, data in every],
        "refusals": loaded.refusals(every[0][1], kernels),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
