"""The CUDA engine's device on an NVIDIA GPU, built on cuda-core, the driver and numpy.

No CUDA toolkit, PyTorch or Triton is needed. The module imports on machines without a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from edge.errors import EngineError
from edge.launch import CompiledKernel, Variant
from edge.runtime.cuda import core_kernel, core_memory, install, place
from edge.runtime.cuda.core_kernel import LoadedKernel
from edge.runtime.cuda.device import Bytes, Memory, RecordedGraph
from edge.runtime.cuda.faults import NEW_PROCESS, DriverFaults
from edge.runtime.cuda.turns import DriverTurns

# How long `wait` waits for a kernel. A step takes milliseconds, a prefill chunk seconds.
LIMIT_S = 120.0
# `wait` polls without a pause for about the length of a step, then every 0.1 ms
_AWAKE_S, _PAUSE_S = 0.05, 1e-4
# After a replay, `wait` first sleeps until _MARGIN_S before the graph's last duration has passed,
# at most _LONGEST_S: on an Orin a step takes 40 ms, and polling would burn a core and its power. A
# step of 2.5 ms on an H200 keeps 27 % of a core busy, with a margin of 1.5 ms 67 %, and takes as
# long as with polling alone.
_MARGIN_S, _LONGEST_S = 5e-4, 0.1


class CoreDevice:
    """An NVIDIA GPU; see `edge.runtime.cuda.device.Device`.

    All work goes to one stream, in order. Threads may take turns; concurrent use is refused.
    After an error that corrupts the context (an illegal address, a failed launch, …), a kernel that
    does not end, or a fork, the device is lost: every call raises, nothing is freed, and the
    process continues.

    Attributes:
        name: name of the GPU, for messages.
        sm: compute capability, 87 for 8.7.
        records_early: see `Device`.
        integrated: whether the GPU shares the CPU's memory.
        limit_s: maximum duration of `wait` in seconds; None waits forever.
        multiprocessors: number of SMs.
    """

    records_early = True

    def __init__(
        self,
        device: int | None = None,
        stream: object | None = None,
        *,
        limit_s: float | None = LIMIT_S,
    ) -> None:
        """Open a GPU. `edge.runtime.cuda.place` describes which context is used.

        Args:
            device: GPU index under CUDA_VISIBLE_DEVICES; None is the current context's GPU, else 0.
            stream: a stream of cuda-core, PyTorch, PyCUDA or CuPy, or its address; None makes one.
            limit_s: see the attribute.

        Raises EngineError without a driver or cuda-core, for an unknown GPU, for an object that is
        not a stream, and for the default stream.
        """
        self._modules = install.load()
        self._faults = DriverFaults(self._modules.api)
        self.place = place.choose(self._modules, self._faults, device, stream)
        self._turns = DriverTurns(self._modules, self._faults, self.place)
        self.limit_s = limit_s
        self._graph: CoreGraph | None = None
        # the last replayed graph and its start time, until `wait`
        self._running: tuple[CoreGraph, float] | None = None
        # objects that copies in flight use; the driver does not keep them alive
        self._in_flight: dict[int, object] = {}
        with self._turns, self._faults.of("querying the GPU"):
            gpu = self._modules.core.Device(self.place.ordinal)
            self.name = f"GPU {self.place.ordinal} ({gpu.name})"
            major, minor = gpu.compute_capability
            self.sm = 10 * int(major) + int(minor)
            self.integrated = bool(gpu.properties.integrated)
            self.multiprocessors = int(gpu.properties.multiprocessor_count)

    @property
    def lost(self) -> str | None:
        """Why the device can no longer be used; None while it can."""
        return self._faults.lost

    # -- memory ----------------------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes; free on a Jetson is the system's MemAvailable. Raises
        EngineError.
        """
        with self._turns:
            return core_memory.available(self._turns, self.integrated)

    def allocate(self, nbytes: int) -> Memory:
        """See `Device.allocate`. The zeroing is issued on the stream."""
        self._check_not_recording("allocate")
        with self._turns:
            if self._turns.freeing:
                self._poll()
                self._turns.free_now()
            allocated = core_memory.allocate(
                self._turns, self.place.ordinal, nbytes, self.integrated
            )
            self._fill(allocated.address, nbytes, 0)
            return allocated

    def borrow(self, address: int, nbytes: int, owner: object = None) -> Memory:
        """Wrap the user's own memory on this GPU; `owner` is kept alive with it.

        The caller synchronizes its work with the stream. Raises EngineError if the memory is not on
        this GPU, has fewer than `nbytes` bytes or is not aligned to 256 bytes.
        """
        with self._turns:
            return core_memory.borrow(self._turns, self.place.ordinal, address, nbytes, owner)

    def host(self, nbytes: int) -> Bytes:
        self._check_not_recording("allocate")
        with self._turns:
            return core_memory.pinned(self._turns, nbytes)

    # -- copies ----------------------------------------------------------------------------------

    def write(self, target: Memory, at: int, source: Bytes) -> None:
        count = source.nbytes
        to = core_memory.within(target, at, count, "target")
        start, holder = core_memory.checked(self._turns, source, "source")
        self._copy("to the GPU", self._modules.api.cuMemcpyHtoDAsync, to, start, count)
        self._keep(target, holder)

    def read(self, target: Bytes, source: Memory, at: int) -> None:
        count = target.nbytes
        start = core_memory.within(source, at, count, "source")
        to, holder = core_memory.checked(self._turns, target, "target")
        self._copy("from the GPU", self._modules.api.cuMemcpyDtoHAsync, to, start, count)
        self._keep(holder, source)

    def copy(self, target: Memory, at: int, source: Memory, start: int, nbytes: int) -> None:
        to = core_memory.within(target, at, nbytes, "target")
        first = core_memory.within(source, start, nbytes, "source")
        if to < first + nbytes and first < to + nbytes:
            raise EngineError(f"cannot copy {nbytes} bytes between overlapping ranges on a GPU")
        self._copy("on the GPU", self._modules.api.cuMemcpyDtoDAsync, to, first, nbytes)
        self._keep(target, source)

    def fill(self, target: Memory, at: int, nbytes: int, byte: int) -> None:
        to = core_memory.within(target, at, nbytes, "target")
        with self._turns:
            self._fill(to, nbytes, byte)
        self._keep(target)

    def _copy(self, direction: str, call: Any, to: int, start: int, nbytes: int) -> None:
        if nbytes == 0:
            self._faults.refuse_lost()
            return
        doing = f"copying {nbytes} bytes {direction}"
        with self._turns, self._faults.of(doing):
            self._faults.check(call(to, start, nbytes, self.place.handle), doing)

    def _fill(self, address: int, nbytes: int, byte: int) -> None:
        if nbytes == 0:
            return
        doing = f"filling {nbytes} bytes"
        call = self._modules.api.cuMemsetD8Async
        with self._faults.of(doing):
            self._faults.check(call(address, byte, nbytes, self.place.handle), doing)

    def _keep(self, *used: object) -> None:
        """Keep objects alive until the next `wait`; those a graph uses, as long as the graph."""
        kept = self._in_flight if self._graph is None else self._graph.kept
        self._running = None
        for item in used:
            kept[id(item)] = item

    # -- kernels ---------------------------------------------------------------------------------

    def load(self, variant: Variant, compiled: CompiledKernel | None, cubin: bytes) -> LoadedKernel:
        """See `Device.load`. Raises EngineError if the kernel is not compiled for this GPU or does
        not match its variant.
        """
        if compiled is None:
            raise EngineError(
                f"{variant.kernel} is not compiled for sm_{self.sm}",
                remedy=f"edge export --target sm_{self.sm}",
            )
        self._check_not_recording("load a kernel")
        with self._turns:
            loaded = core_kernel.load(
                self._modules, self._faults, self.place.ordinal, variant, compiled, cubin
            )
            self._turns.hold(loaded)
            return loaded

    def launch(
        self, kernel: LoadedKernel, grid: tuple[int, int, int], arguments: Sequence[int | float]
    ) -> None:
        with self._turns:
            kernel.put(arguments)
            try:
                status = self._modules.api.cuLaunchKernel(
                    kernel.function, *grid, kernel.threads, 1, 1, kernel.shared,
                    self.place.handle, kernel.parameters, 0,
                )  # fmt: skip
            except Exception as fault:
                raise self._faults.translated(fault, _launch_description(kernel, grid)) from fault
            if status[0]:
                self._faults.check(status, _launch_description(kernel, grid))
        self._keep(kernel)

    def enqueue(self, work: Callable[[int], object]) -> None:
        """Let another library issue work: call `work(stream handle)` in the device's context.

        While a graph is recorded, that work is recorded too. The caller keeps alive whatever the
        work uses.
        """
        with self._turns:
            work(int(self.place.handle))

    def keep(self, holder: Any, objects: list[Any]) -> None:
        """Drop another library's `objects`, made in this device's context, when `holder` dies and
        the stream is idle.
        """
        self._turns.keep(holder, objects)

    # -- graphs ----------------------------------------------------------------------------------

    @contextmanager
    def record(self) -> Iterator[list[RecordedGraph]]:
        """See `Device.record`. The graph keeps its kernels and the memory of its copies alive;
        the caller keeps the memory that launches point to.
        """
        self._check_not_recording("record again")
        out: list[RecordedGraph] = []
        graph, doing = CoreGraph(self), "recording a graph"
        self._turns.hold(graph)
        with self._turns, self._faults.of(doing):
            graph.builder = self.place.stream.create_graph_builder()
            graph.builder.begin_building()
            self._graph, self._turns.recorder = graph, threading.get_ident()
        try:
            yield out
            with self._turns, self._faults.of(doing):
                graph.builder.end_building()
                graph.executable = graph.builder.complete()
                # otherwise the first launch would allocate
                graph.executable.upload(self.place.stream)
            out.append(graph)
        finally:
            # after a failure too, the stream must stop recording
            with suppress(EngineError), self._turns, self._faults.of(doing):
                graph.builder.close()
            self._graph = self._turns.recorder = None

    def replay(self, graph: CoreGraph) -> None:
        """Issue a recorded graph as one launch. Raises EngineError."""
        self._check_not_recording("replay")
        with self._turns, self._faults.of("launching a graph"):
            graph.executable.launch(self.place.stream)
            self._keep(graph)
            self._running = (graph, time.monotonic())

    def _check_not_recording(self, doing: str) -> None:
        if self._graph is not None:
            raise EngineError(f"cannot {doing} while a graph is recorded")

    # -- waiting ---------------------------------------------------------------------------------

    def wait(self) -> None:
        """See `Device.wait`. If the stream is not done within `limit_s`, the device is lost."""
        self._check_not_recording("wait")
        with self._turns, self._faults.of("running on the GPU"):
            self._poll()
            self._in_flight.clear()
            self._turns.free_now()

    def _poll(self) -> None:
        """Poll the stream: a blocking call would ignore interrupts and the time limit."""
        query, handle = self._modules.api.cuStreamQuery, self.place.handle
        not_ready = self._modules.api.CUresult.CUDA_ERROR_NOT_READY
        running, self._running = self._running, None
        started = time.monotonic()
        slept = running is not None and self._sleep(*running)
        polls = 0
        while (status := query(handle))[0] == not_ready:
            polls += 1
            elapsed = time.monotonic() - started
            if self.limit_s is not None and elapsed > self.limit_s:
                self._faults.lose(f"work was not done after {self.limit_s:g} s")
                raise EngineError(
                    f"{self.name} is not done after {self.limit_s:g} s; the device is lost",
                    remedy=f"{NEW_PROCESS}; raise `limit_s` to wait longer",
                )
            if elapsed > _AWAKE_S:
                time.sleep(_PAUSE_S)
        self._faults.check(status, "running on the GPU")
        if running is not None:
            graph, replayed = running
            # done at the first poll after a sleep: the sleep was too long, by an unknown time
            overslept = slept and not polls
            graph.spent_s = graph.spent_s / 2 if overslept else time.monotonic() - replayed

    def _sleep(self, graph: CoreGraph, replayed: float) -> bool:
        """Sleep until shortly before the graph should be done. Return whether it slept."""
        remaining = graph.spent_s - (time.monotonic() - replayed) - _MARGIN_S
        longest = _LONGEST_S if self.limit_s is None else min(_LONGEST_S, self.limit_s)
        if remaining > 0:
            time.sleep(min(remaining, longest))
        return remaining > 0


def _launch_description(kernel: LoadedKernel, grid: tuple[int, int, int]) -> str:
    return f"launching {kernel.name} on grid {grid}"


class CoreGraph:
    """A CUDA graph; see `device.RecordedGraph`.

    Attributes:
        kept: objects its copies and launches use, by id.
        builder, executable: cuda-core's GraphBuilder and Graph.
        spent_s: estimated duration of the last replay in seconds; 0 before the first.
    """

    def __init__(self, device: CoreDevice) -> None:
        self._device = device
        self.kept: dict[int, object] = {}
        self.builder: Any = None
        self.executable: Any = None
        self.spent_s = 0.0

    def replay(self) -> None:
        """See `RecordedGraph.replay`. Raises EngineError."""
        self._device.replay(self)
