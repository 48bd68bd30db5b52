"""A program: the plugin library loads kernels from a fake driver.

The arguments DRIVER HOST [PLUGINS] are files: the driver of `tests/fake_cuda`, whose kernels do
nothing here, and the others as in `plugin_host.Library`. Prints JSON: the result of each scenario.
The driver logs launches to the file FAKE_CUDA_LOG.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge.launch import CompiledKernel, Size
from edge.plugins.tensorrt import blob
from edge.plugins.tensorrt.launches import (
    Call,
    Input,
    Kernel,
    NodeLaunches,
    NodeProgram,
    Output,
    Place,
)
from tests.tensorrt.plugin_host import RUN, Library, Plugin, PluginError, Tensor

ONE, ROWS = Size(), Size(of="TB")
# of a kernel of `launches`: two pointers, a size, a float, two hidden pointers
SIZES = "8 8 4 4 8 8"
SCENARIOS: dict[str, Callable[[], Any]] = {}


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS[function.__name__] = function
    return function


class Driver:
    """The fake driver, with a context and a stream."""

    def __init__(self, path: str) -> None:
        self.api = ctypes.CDLL(path)
        self.context, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.api.cuInit(0))
        self.check(self.api.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), 0))
        with self.current():
            self.check(self.api.cuStreamCreate(ctypes.byref(self.stream), 1))

    def check(self, code: int) -> None:
        assert code == 0, code

    @contextmanager
    def current(self) -> Iterator[None]:
        self.check(self.api.cuCtxPushCurrent(self.context))
        try:
            yield
        finally:
            self.check(self.api.cuCtxPopCurrent(None))

    @contextmanager
    def failing(self, name: str, code: int) -> Iterator[None]:
        """Make every call of `name` fail."""
        os.environ["FAKE_CUDA_FAIL"] = ",".join(f"{name}:{n}:{code}" for n in range(1, 100))
        try:
            yield
        finally:
            del os.environ["FAKE_CUDA_FAIL"]

    @property
    def libraries(self) -> int:
        """Return the number of libraries loaded and not unloaded."""
        return ctypes.c_long.in_dll(self.api, "live_libraries").value

    def launched(self, work: Callable[[], None]) -> list[str]:
        """Return the log lines of the launches that `work` issues."""
        log = Path(os.environ["FAKE_CUDA_LOG"])
        before = len(log.read_text()) if log.exists() else 0
        work()
        lines = log.read_text()[before:].splitlines() if log.exists() else []
        return [line for line in lines if line.startswith("launch ")]


def launches(
    *keys: str, grid: tuple[Size, Size, Size] = (ROWS, ONE, ONE), size: Size = ROWS
) -> Any:
    """Launch each of these kernels once."""
    arguments = (Place("input", 0, 16), Place("output", 0), size, 0.5)
    return NodeLaunches(
        inputs=(Input("f32", 3),),
        outputs=(Output("f32", ("T", "B", 8)),),
        symbols={"T": (0, 0), "B": (0, 1)},
        rows="TB",
        workspace=(),
        kernels=tuple(Kernel(key, 64) for key in keys),
        calls=tuple(Call(index, grid, arguments) for index in range(len(keys))),
        programs=(NodeProgram(False, None, tuple(range(len(keys)))),),
    )


def cubin(*lines: str) -> bytes:
    return "\n".join(("FAKE CUBIN", *lines, "\0")).encode()


def handed(kernels: dict[str, tuple[str, int, bytes]]) -> Library:
    """Hand over kernels to build with: by key their symbol, shared memory and cubin."""
    known = {
        key: (CompiledKernel(file="f", symbol=symbol, shared_bytes=shared, scratch=2), code)
        for key, (symbol, shared, code) in kernels.items()
    }
    data = blob.pack(87, known)
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    assert call(LIBRARY.symbol("edge_tensorrt_set_kernels"))(data, len(data)) == 0
    return LIBRARY


def restored(found: Library, node: NodeLaunches) -> Plugin:
    built = found.create("Linear", {"launches": node.encode(), "carries": 1})
    return found.made("Linear", built.serialized(), RUN)


def attached(kernels: dict[str, tuple[str, int, bytes]], node: NodeLaunches) -> Plugin:
    found = restored(handed(kernels), node)
    with DRIVER.current():
        return found.attached()


def run(plugin: Plugin, tokens: int = 3, batch: int = 2) -> None:
    room = ctypes.create_string_buffer(64)
    tensor = Tensor("f32", (tokens, batch, 8), ctypes.addressof(room))
    with DRIVER.current():
        plugin.enqueue([tensor], [tensor], 0, DRIVER.stream.value or 0)


def why(work: Callable[[], Any]) -> str:
    """Return the reason of a refusal, or "" if there is none."""
    try:
        work()
    except PluginError as problem:
        return str(problem)
    return ""


GOOD = {"k": ("good", 0, cubin(f"good 0 {SIZES}"))}


@scenario
def without_a_context() -> str:
    return why(restored(handed(GOOD), launches("k")).attached)


@scenario
def code_that_the_gpu_cannot_run() -> list[str]:
    with DRIVER.failing("cuLibraryLoadData", 209):
        first = why(lambda: attached(GOOD, launches("k")))
    return [first, why(lambda: attached(GOOD, launches("k")))]


@scenario
def a_kernel_that_is_not_in_its_code() -> str:
    return why(lambda: attached({"k": ("bad", 0, GOOD["k"][2])}, launches("k")))


@scenario
def other_parameters() -> list[str]:
    lists = ("8 8 4 4 8", "8 8 4 4 8 8 8", "8 8 8 4 8 8", "4 8 4 4 8 8")
    kernels = [{"k": ("good", 0, cubin(f"good 0 {sizes}"))} for sizes in lists]
    return [why(lambda one=one: attached(one, launches("k"))) for one in kernels]


@scenario
def what_is_launched() -> list[str]:
    plugin = attached(GOOD, launches("k", grid=(ROWS, Size(times=0), Size(times=5, of="B", per=3))))
    return DRIVER.launched(lambda: run(plugin))


@scenario
def shared_memory() -> list[Any]:
    large = {"k": ("good", 100 << 10, GOOD["k"][2])}
    larger = {"k": ("good", 200 << 10, GOOD["k"][2])}
    plugin = attached(large, launches("k"))
    lines = DRIVER.launched(lambda: run(plugin))
    return [*lines, why(lambda: attached(larger, launches("k")))]


@scenario
def a_launch_that_fails() -> list[str]:
    plugin = attached(GOOD, launches("k"))
    with DRIVER.failing("cuLaunchKernel", 701):
        first = why(lambda: run(plugin))
    return [first, why(lambda: run(plugin))]


@scenario
def sizes_that_no_kernel_takes() -> list[str]:
    wide = Size(times=(1 << 31) // 6, of="TB")
    high = attached(GOOD, launches("k", grid=(ONE, Size(times=20_000, of="TB"), ONE)))
    far = attached(GOOD, launches("k", grid=(Size(times=1 << 31), ONE, ONE)))
    long = attached(GOOD, launches("k", size=Size(times=1 << 40, of="TB")))
    vast = attached(GOOD, launches("k", size=Size(of="TTTT")))
    fits = attached(GOOD, launches("k", size=wide))
    refused = [why(lambda one=one: run(one)) for one in (high, far, long, fits)]
    return [*refused, why(lambda: run(vast, tokens=1 << 20))]


@scenario
def code_is_loaded_once_and_unloaded_with_the_last_that_needs_it() -> list[int]:
    both = cubin(f"first 0 {SIZES}", f"second 0 {SIZES}")
    kernels = {"a": ("first", 0, both), "b": ("second", 0, both), "c": GOOD["k"]}
    handed({"other": GOOD["k"]})  # releases those of other scenarios, and loads nothing
    before = DRIVER.libraries
    one, two = attached(kernels, launches("a", "b")), attached(kernels, launches("b", "c"))
    counts = [DRIVER.libraries - before]
    handed(GOOD)
    for each in (one, two):
        run(each)
    counts.append(DRIVER.libraries - before)
    del one, each
    counts.append(DRIVER.libraries - before)
    del two
    return [*counts, DRIVER.libraries - before]


@scenario
def while_a_graph_is_recorded() -> list[Any] | None:
    found = handed(GOOD)
    if not found.symbol("edge_tensorrt_abi"):
        return None  # the core alone loads kernels only in `attached`
    plugin, graph = restored(found, launches("k")), ctypes.c_void_p()
    with DRIVER.current():
        DRIVER.check(DRIVER.api.cuStreamBeginCapture(DRIVER.stream, 0))
    refused = why(lambda: run(plugin))
    with DRIVER.current():
        ended = DRIVER.api.cuStreamEndCapture(DRIVER.stream, ctypes.byref(graph))
    return [refused, ended, why(lambda: run(plugin))]


if __name__ == "__main__":
    LIBRARY = Library(Path(sys.argv[2]), "".join(sys.argv[3:]))
    try:
        restored(handed(GOOD), launches("k")).attached()
    except PluginError as problem:
        results: dict[str, Any] = {"without_a_driver": str(problem)}
    DRIVER = Driver(sys.argv[1])
    results |= {name: function() for name, function in SCENARIOS.items()}
    print(json.dumps(results))
