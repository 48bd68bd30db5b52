"""The plugin library (`plugins/tensorrt/src`): found, checked, and loaded into TensorRT."""

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
# what the exported functions, a plugin's fields and its serialized form are agreed on by
ABI = 3
COMMAND = "make plugins TENSORRT_INCLUDE=FOLDER_OF_NvInfer.h"

_loaded: dict[Path, PluginLibrary] = {}
_registered: set[Path] = set()


class PluginLibrary:
    """A plugin library in this process.

    Attributes:
        path: of the file.
        digest: SHA-256 of it; another build is another engine.
        built_for: TensorRT whose headers it was compiled with: "10.3".
    """

    def __init__(self, path: Path, library: ctypes.CDLL, digest: str) -> None:
        """Raises EngineError: not a plugin library, or of another ABI."""
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
        """Raises EngineError when it was made for another major version of TensorRT."""
        if self.built_for.partition(".")[0] != str(trt.version[0]):
            raise EngineError(
                f"was built for TensorRT {self.built_for}, but {dotted(trt.version)} is installed",
                file=self.path,
                field="edge_tensorrt_built_for",
                remedy=f"build it with the headers of that version: {COMMAND}",
            )

    def prepare(self, kernels: bytes, *, aliased: bool) -> None:
        """Say what the engine that is built next has: its kernels (`edge.plugins.tensorrt.blob`,
        none forgets them), and whether TensorRT is told of outputs written in place.

        Raises EngineError: the kernels are damaged, by what the library says.
        """
        self._set_aliased(int(aliased))
        if self._set_kernels(kernels, len(kernels)) != 0:
            raise EngineError(f"does not accept these kernels: {self.last_error()}", file=self.path)

    def last_error(self) -> str:
        """What went wrong in a plugin last, "" when nothing did."""
        return (self._last_error() or b"").decode("utf-8", "replace")


def find() -> Path:
    """Places of the library: $EDGE_TENSORRT_PLUGINS (a file, or a folder with it), the package, the
    build folder of a checkout.

    Raises EngineError: it is nowhere; the remedy is the command that makes it.
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
    """The library in this process, loaded once. Raises EngineError: missing, cannot be loaded."""
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
    """Make the plugins known to TensorRT, for building and for loading engines.

    Raises EngineError: for another TensorRT, or TensorRT refuses it.
    """
    library.check(trt)
    if library.path in _registered:
        return
    registry: Any = trt.module.get_plugin_registry()
    try:
        handle = registry.load_library(str(library.path))
    except (RuntimeError, OSError) as problem:
        raise _refused(library, str(problem)) from problem
    if handle is None:
        raise _refused(library, library.last_error() or "its log says why")
    _registered.add(library.path)


def _refused(library: PluginLibrary, why: str) -> EngineError:
    return EngineError(
        f"TensorRT rejected the plugin library: {why}",
        file=library.path,
        remedy=f"build it again: {COMMAND}",
    )
