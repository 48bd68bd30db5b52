"""The plugin library (`plugins/tensorrt/src`): finds it, checks it, loads it into TensorRT."""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path
from typing import Any

import edge
from edge.errors import EngineError
from edge.runtime.tensorrt.bindings import TensorRT, dotted

VARIABLE = "EDGE_TENSORRT_PLUGINS"
FILE = "libedge_tensorrt.so"
# version of the exported functions, the plugins' fields and their serialized form
ABI = 3
COMMAND = "make plugins TENSORRT_INCLUDE=FOLDER_OF_NvInfer.h"

_loaded: dict[Path, PluginLibrary] = {}
_registered: set[Path] = set()


class PluginLibrary:
    """A plugin library in this process.

    Attributes:
        path: path of the file.
        digest: SHA-256 of the file; engines depend on it.
        built_for: TensorRT version of the headers it was compiled with, such as "10.3".
    """

    def __init__(self, path: Path, library: ctypes.CDLL, digest: str) -> None:
        """Raises EngineError if the file is not a plugin library or has another ABI."""
        self.path = path
        self.digest = digest
        try:
            self._set_kernels = library.edge_tensorrt_set_kernels
            self._set_aliased = library.edge_tensorrt_set_aliased
            self._last_error = library.edge_tensorrt_last_error
            abi, built_for = library.edge_tensorrt_abi, library.edge_tensorrt_built_for
        except AttributeError as missing:
            raise EngineError(
                f"is not a plugin library of mamba-edge: {missing}",
                file=path,
                field=VARIABLE if VARIABLE in os.environ else None,
                remedy=f"build it: {COMMAND}",
            ) from None
        self._set_kernels.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._set_aliased.argtypes = [ctypes.c_int]
        self._last_error.restype = built_for.restype = ctypes.c_char_p
        if abi() != ABI:
            raise EngineError(
                f"has ABI {abi()}, this version of mamba-edge needs {ABI}",
                file=path,
                field="edge_tensorrt_abi",
                remedy=f"build it again, from the sources of this version: {COMMAND}",
            )
        self.built_for: str = built_for().decode()

    def check(self, trt: TensorRT) -> None:
        """Raise EngineError if the library was built for another major version of TensorRT."""
        if self.built_for.partition(".")[0] != str(trt.version[0]):
            raise EngineError(
                f"was built for TensorRT {self.built_for}, but {dotted(trt.version)} is installed",
                file=self.path,
                field="edge_tensorrt_built_for",
                remedy=f"build it with the headers of that version: {COMMAND}",
            )

    def prepare(self, kernels: bytes, *, aliased: bool) -> None:
        """Set up the next engine build.

        Args:
            kernels: the engine's kernels from `edge.plugins.tensorrt.blob`; empty clears them.
            aliased: whether plugins declare outputs that they write in place.

        Raises EngineError with the library's message if the kernels are damaged.
        """
        self._set_aliased(int(aliased))
        if self._set_kernels(kernels, len(kernels)) != 0:
            raise EngineError(f"does not accept these kernels: {self.last_error()}", file=self.path)

    def last_error(self) -> str:
        """Return the last error of a plugin, or ""."""
        return (self._last_error() or b"").decode("utf-8", "replace")


def find() -> Path:
    """Find the library: in $EDGE_TENSORRT_PLUGINS (the file or its folder), in the package, or in
    the build folder of a checkout.

    Raises EngineError if it is in none of them, with the command that builds it.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named)
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise EngineError("file not found", file=path, field=VARIABLE, remedy=COMMAND)
        return path.absolute()
    for path in places():
        if path.is_file():
            return path
    raise EngineError(
        f"the plugin library ({FILE}) is not built: looked in "
        f"{' and '.join(str(path.parent) for path in places())}",
        field=VARIABLE,
        remedy=f"build it, or name it in {VARIABLE}: {COMMAND}",
    )


def places() -> tuple[Path, ...]:
    package = Path(edge.__file__).resolve().parent
    return (
        package / "plugins" / "tensorrt" / "lib" / FILE,
        package.parent / "build" / "tensorrt" / FILE,
    )


def open_library(path: Path | None = None) -> PluginLibrary:
    """Return the library, loading it once per process.

    Raises EngineError if it is missing or cannot be loaded.
    """
    path = find() if path is None else path
    if path not in _loaded:
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            library = ctypes.CDLL(str(path))
        except OSError as problem:
            raise EngineError(
                f"cannot be loaded: {problem}",
                file=path,
                remedy=f"build it on this machine: {COMMAND}",
            ) from problem
        _loaded[path] = PluginLibrary(path, library, digest)
    return _loaded[path]


def register(trt: TensorRT, library: PluginLibrary) -> None:
    """Register the plugins with TensorRT, for building and for loading engines.

    Raises EngineError if the library is for another TensorRT version or TensorRT refuses it.
    """
    library.check(trt)
    if library.path in _registered:
        return
    registry: Any = trt.module.get_plugin_registry()
    try:
        handle = registry.load_library(str(library.path))
    except (RuntimeError, OSError) as problem:
        raise _rejection(library, str(problem)) from problem
    if handle is None:
        raise _rejection(library, library.last_error() or "its log says why")
    _registered.add(library.path)


def _rejection(library: PluginLibrary, reason: str) -> EngineError:
    return EngineError(
        f"TensorRT rejected the plugin library: {reason}",
        file=library.path,
        remedy=f"build it again: {COMMAND}",
    )
