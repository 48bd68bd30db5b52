"""The CUDA engine's device on an NVIDIA GPU: cuda-core over the driver, and numpy.

No toolkit, PyTorch or Triton is needed. Importing this asks nothing of the machine.
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

# How long `wait` waits for a kernel. A step takes milliseconds, a chunk of a prompt seconds.
LIMIT_S = 120.0
# `wait` asks without a pause for as long as a step takes, then every tenth of a millisecond
_AWAKE_S, _PAUSE_S = 0.05, 1e-4
# After a replay it sleeps first, until so long before the same graph was done last time: on an Orin
# a step takes 40 ms, in which asking would keep a core and its watts. Never longer than the other.
_MARGIN_S, _LONGEST_S = 1.5e-3, 0.1


class CoreDevice:
    """See `edge.runtime.cuda.device.Device`.

    What is issued goes to one stream, in order. Threads may take turns; two at once are refused.
    After an error that corrupts the context (an illegal address, a failed launch, …), a kernel that
    does not end, or a fork, the device is lost: every call raises, nothing is freed, the process
    lives on.

    Attributes:
        name: for messages.
        sm: compute capability, 87 for 8.7.
        records_early: see `Device`.
        integrated: it shares the CPU's memory.
        multiprocessors: SMs.
    """

    records_early = True

    def __init__(
        self,
        device: int | None = None,
        stream: object | None = None,
        *,
        limit_s: float | None = LIMIT_S,
    ) -> None:
        """`device` counts what CUDA_VISIBLE_DEVICES leaves; None is the one of the context that is
        current, else 0. `stream`: the user's, as cuda-core, PyTorch, PyCUDA or CuPy make it, or its
        address; else one is made. `limit_s`: the longest `wait`; None waits forever.

        Which context is used: `edge.runtime.cuda.place`. Raises EngineError: no driver or
        cuda-core, no such GPU, no stream, or the default one.
        """
        self._modules = install.load()
        self._faults = DriverFaults(self._modules.api)
        self.place = place.choose(self._modules, self._faults, device, stream)
        self._turns = DriverTurns(self._modules, self._faults, self.place)
        self._limit_s = limit_s
        self._graph: CoreGraph | None = None
        # what was replayed last and when, until it is waited for
        self._running: tuple[CoreGraph, float] | None = None
        # what copies under way use; the driver does not keep it alive
        self._under_way: dict[int, object] = {}
        with self._turns, self._faults.of("asking the GPU"):
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
        """Bytes free and in all; on a Jetson what the system can give. Raises EngineError."""
        with self._turns:
            return core_memory.available(self._turns, self.integrated)

    def allocate(self, nbytes: int) -> Memory:
        """See `Device.allocate`: zeros from the stream's point of view."""
        self._not_recording("allocate")
        with self._turns:
            if self._turns.freeing:
                self._poll()
                self._turns.free_now()
            got = core_memory.allocate(self._turns, self.place.ordinal, nbytes, self.integrated)
            self._fill(got.address, nbytes, 0)
            return got

    def borrow(self, address: int, nbytes: int, owner: object = None) -> Memory:
        """The user's own memory of this GPU as a Memory; `owner` is kept alive with it.

        The caller orders its work with the stream's. Raises EngineError: not memory of this GPU,
        less than `nbytes`, not on 256 bytes.
        """
        with self._turns:
            return core_memory.borrow(self._turns, self.place.ordinal, address, nbytes, owner)

    def host(self, nbytes: int) -> Bytes:
        self._not_recording("allocate")
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
            raise EngineError(f"copying {nbytes} bytes onto themselves is undefined on a GPU")
        self._copy("on the GPU", self._modules.api.cuMemcpyDtoDAsync, to, first, nbytes)
        self._keep(target, source)

    def fill(self, target: Memory, at: int, nbytes: int, byte: int) -> None:
        to = core_memory.within(target, at, nbytes, "target")
        with self._turns:
            self._fill(to, nbytes, byte)
        self._keep(target)

    def _copy(self, where: str, call: Any, to: int, start: int, nbytes: int) -> None:
        if nbytes == 0:
            self._faults.refuse_lost()
            return
        doing = f"copying {nbytes} bytes {where}"
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
        """Keep it until the stream is waited for; what a graph uses, as long as the graph."""
        kept = self._under_way if self._graph is None else self._graph.kept
        self._running = None
        for one in used:
            kept[id(one)] = one

    # -- kernels ---------------------------------------------------------------------------------

    def load(self, variant: Variant, compiled: CompiledKernel | None, cubin: bytes) -> LoadedKernel:
        """See `Device.load`. EngineError: no code for this GPU, or not what the variant says."""
        if compiled is None:
            raise EngineError(
                f"{variant.kernel} is not compiled for sm_{self.sm}",
                remedy=f"edge export --target sm_{self.sm}",
            )
        self._not_recording("load a kernel")
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
                answer = self._modules.api.cuLaunchKernel(
                    kernel.function, *grid, kernel.threads, 1, 1, kernel.shared,
                    self.place.handle, kernel.parameters, 0,
                )  # fmt: skip
            except Exception as fault:
                raise self._faults.translated(fault, _launching(kernel, grid)) from fault
            if answer[0]:
                self._faults.check(answer, _launching(kernel, grid))
        self._keep(kernel)

    def enqueue(self, work: Callable[[int], object]) -> None:
        """Let another library issue onto the stream: `work(its handle)`, in the device's context.

        While a graph is recorded, what it issues is recorded. The caller keeps alive what the work
        uses.
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
        """See `Device.record`. The graph keeps the memory of its copies and its kernels alive;
        memory that launches point to is the caller's to keep.
        """
        self._not_recording("record again")
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
                # what the first launch would otherwise allocate
                graph.executable.upload(self.place.stream)
            out.append(graph)
        finally:
            # what failed is dropped, and the stream must stop recording
            with suppress(EngineError), self._turns, self._faults.of(doing):
                graph.builder.close()
            self._graph = self._turns.recorder = None

    def replay(self, graph: CoreGraph) -> None:
        """Issue a recorded graph: one launch. Raises EngineError."""
        self._not_recording("replay")
        with self._turns, self._faults.of("launching a graph"):
            graph.executable.launch(self.place.stream)
            self._keep(graph)
            self._running = (graph, time.monotonic())

    def _not_recording(self, doing: str) -> None:
        if self._graph is not None:
            raise EngineError(f"cannot {doing} while a graph is recorded")

    # -- waiting ---------------------------------------------------------------------------------

    def wait(self) -> None:
        """See `Device.wait`. A stream that is not done within `limit_s` is given up: lost."""
        self._not_recording("wait")
        with self._turns, self._faults.of("running on the GPU"):
            self._poll()
            self._under_way.clear()
            self._turns.free_now()

    def _poll(self) -> None:
        """Ask, so that an interrupt and the limit are noticed, which a blocking call ignores."""
        query, handle = self._modules.api.cuStreamQuery, self.place.handle
        not_ready = self._modules.api.CUresult.CUDA_ERROR_NOT_READY
        running, self._running = self._running, None
        began = time.monotonic()
        slept = running is not None and self._sleep(*running)
        asked = 0
        while (answer := query(handle))[0] == not_ready:
            asked += 1
            spent = time.monotonic() - began
            if self._limit_s is not None and spent > self._limit_s:
                self._faults.lose(f"work was not done after {self._limit_s:g} s")
                raise EngineError(
                    f"{self.name} is not done after {self._limit_s:g} s; the device is lost",
                    remedy=f"{NEW_PROCESS}; `limit_s` sets another limit",
                )
            if spent > _AWAKE_S:
                time.sleep(_PAUSE_S)
        self._faults.check(answer, "running on the GPU")
        if running is not None:
            graph, replayed = running
            # done when first asked after a sleep: for how long is not known, and it was too long
            late = slept and not asked
            graph.spent_s = graph.spent_s / 2 if late else time.monotonic() - replayed

    def _sleep(self, graph: CoreGraph, replayed: float) -> bool:
        """Sleep until shortly before the graph should be done; whether there was time for that."""
        rest = graph.spent_s - (time.monotonic() - replayed) - _MARGIN_S
        longest = _LONGEST_S if self._limit_s is None else min(_LONGEST_S, self._limit_s)
        if rest > 0:
            time.sleep(min(rest, longest))
        return rest > 0


def _launching(kernel: LoadedKernel, grid: tuple[int, int, int]) -> str:
    return f"launching {kernel.name} on grid {grid}"


class CoreGraph:
    """See `device.RecordedGraph`.

    Attributes:
        kept: what its copies and launches use.
        builder, executable: cuda-core's GraphBuilder and Graph.
        spent_s: what its last replay took, as far as that is known; 0 before there was one.
    """

    def __init__(self, device: CoreDevice) -> None:
        self._device = device
        self.kept: dict[int, object] = {}
        self.builder: Any = None
        self.executable: Any = None
        self.spent_s = 0.0

    def replay(self) -> None:
        """See `Graph.replay`. Raises EngineError."""
        self._device.replay(self)
