"""Execution contexts of a TensorRT engine, on the stream and in the memory of a device.

A recorded run has a context of its own: changing the context of a recorded graph makes the graph's
behaviour undefined (TensorRT Developer Guide, "CUDA Graphs"). All other runs share one context per
profile. All contexts use one block of scratch memory, because runs are serialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from edge.errors import EngineError
from edge.runtime.cuda.device import Memory
from edge.runtime.layout import Shape
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.messages import logger, recorder
from edge.runtime.tensorrt.profiles import Profile, choose

if TYPE_CHECKING:
    from edge.runtime.cuda.core import CoreDevice

_REBUILD = "build the engine again: edge build"


class GraphRun(NamedTuple):
    """One run of the graph.

    Attributes:
        symbols: sizes, such as {"T": 4, "A": 1}.
        shapes: shape of every input except weights, whose shapes are fixed.
        addresses: device address of every input and output; may contain other names.
    """

    symbols: Mapping[str, int]
    shapes: Mapping[str, Shape]
    addresses: Mapping[str, int]


class EngineContexts:
    """A loaded TensorRT engine and its execution contexts.

    Attributes:
        in_place: whether an output `{name}.out` may use the memory of the input `name`; requires
            plugins, which TensorRT for RTX does not have.
        trees: whether the graph can run draft trees; requires plugins too.
        weights_bytes, scratch_bytes: device memory in bytes.
        inputs, outputs: names of the graph's inputs and outputs.
        native: the engine of TensorRT.
    """

    def __init__(
        self,
        trt: TensorRT,
        serialized: memoryview | bytes,
        device: CoreDevice,
        profiles: Sequence[Profile],
        last_error: Callable[[], str] = str,
    ) -> None:
        """Load the engine. `last_error` returns the last error of a plugin.

        Raises EngineError if TensorRT refuses the engine or memory is short.
        """
        self.in_place = self.trees = trt.kind == "tensorrt"
        self.weights_bytes = len(serialized)
        self._module: Any = trt.module
        self._device = device
        self._profiles = profiles
        self._last_error = last_error
        self._log = logger(trt.module)
        self._recorder = recorder(trt.module, self._log)
        # runtime and engine, to be dropped in reverse order once nothing runs
        self._owned: list[Any] = []
        self._load(serialized)
        self.inputs, self.outputs = self._tensor_names()
        self.scratch_bytes = int(self.native.device_memory_size_v2)
        self._scratch: Memory | None = None
        if self.scratch_bytes:
            self._scratch = device.allocate(self.scratch_bytes)
        self._shared: dict[int, EngineContext] = {}

    def _load(self, serialized: memoryview | bytes) -> None:
        def load(_: int) -> None:
            runtime = self._module.Runtime(self._log)
            runtime.error_recorder = self._recorder
            self._owned += [runtime, runtime.deserialize_cuda_engine(serialized)]

        self._device.keep(self, self._owned)
        with self.telling("loading the engine"):
            self._device.enqueue(load)
        if self._owned[-1] is None:
            raise self.failed("loading the engine", remedy=_REBUILD)

    @property
    def native(self) -> Any:
        return self._owned[-1]

    def _tensor_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of inputs and outputs. Raises EngineError for one in host memory."""
        engine, names = self.native, ([], [])  # type: tuple[Any, tuple[list[str], list[str]]]
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            if engine.get_tensor_location(name) != self._module.TensorLocation.DEVICE:
                raise EngineError(
                    "is expected in host memory: this engine was not built from a device graph",
                    field=name,
                    remedy=_REBUILD,
                )
            is_input = engine.get_tensor_mode(name) == self._module.TensorIOMode.INPUT
            names[0 if is_input else 1].append(name)
        return tuple(names[0]), tuple(names[1])

    def bound(self, run: GraphRun, *, own: bool) -> BoundRun:
        """Return the run bound to a context: with `own` to a new one, for a run that will be
        recorded, else to the profile's shared one.

        Raises EngineError if no profile allows these sizes.
        """
        index = choose(self._profiles, run.symbols)
        if index is None:
            sizes = ", ".join(f"{name} {value}" for name, value in run.symbols.items())
            raise EngineError(f"the engine has no profile for a run of {sizes}", remedy=_REBUILD)
        if own:
            return BoundRun(self, self._create_context(index), run)
        if index not in self._shared:
            self._shared[index] = self._create_context(index)
        return BoundRun(self, self._shared[index], run)

    def _create_context(self, profile: int) -> EngineContext:
        context = EngineContext(self.create(profile))
        self._device.keep(context, context.held)
        return context

    # -- used by contexts ------------------------------------------------------------------------

    def create(self, profile: int) -> Any:
        """Create an execution context of a profile on the shared memory. Raises EngineError."""
        strategy = self._module.ExecutionContextAllocationStrategy.USER_MANAGED
        created: list[Any] = []

        def create(stream: int) -> None:
            context = self.native.create_execution_context(strategy)
            if context is None:
                raise self.failed("creating an execution context")
            created.append(context)
            context.error_recorder = self._recorder
            if self._scratch is not None:
                context.set_device_memory(self._scratch.address, self.scratch_bytes)
            context.set_optimization_profile_async(profile, stream)

        with self.telling("creating an execution context"):
            self._device.enqueue(create)
        return created[0]

    @property
    def device(self) -> CoreDevice:
        return self._device

    def failed(self, doing: str, *, remedy: str | None = None) -> EngineError:
        """Return the error for a call that TensorRT refused, with its messages."""
        return EngineError(f"{doing} failed: {self._messages()}", remedy=remedy)

    def _messages(self, problem: object = "TensorRT does not say why") -> str:
        messages = [self._log.take(), self._last_error()]
        return "; ".join(filter(None, messages)) or str(problem)

    @contextmanager
    def telling(self, doing: str) -> Iterator[None]:
        """Turn exceptions of the bindings into EngineError; earlier messages are dropped."""
        self._log.take()
        try:
            yield
        except EngineError:
            raise
        except (RuntimeError, ValueError, TypeError, MemoryError) as problem:
            raise EngineError(f"{doing} failed: {self._messages(problem)}") from problem


class EngineContext:
    """One execution context, with the shapes and addresses set last.

    Attributes:
        held: list with the only reference to the native context.
    """

    def __init__(self, native: Any) -> None:
        # no reference to EngineContexts: a cycle would keep the engine until the next collection
        self.held = [native]
        self._shapes: dict[str, Shape] = {}
        self._addresses: dict[str, int] = {}

    @property
    def native(self) -> Any:
        return self.held[0]

    def tell(self, contexts: EngineContexts, run: GraphRun) -> None:
        """Set shapes and addresses that changed. Raises EngineError if TensorRT refuses them."""
        for name, shape in run.shapes.items():
            if name in contexts.inputs and self._shapes.get(name) != shape:
                if not self.native.set_input_shape(name, shape):
                    raise contexts.failed(f"setting {name} to the shape {shape}")
                self._shapes[name] = shape
        for name in (*contexts.inputs, *contexts.outputs):
            address = run.addresses[name]
            if self._addresses.get(name) != address:
                if not self.native.set_tensor_address(name, address):
                    raise contexts.failed(f"setting the address of {name}")
                self._addresses[name] = address


class BoundRun:
    """A run ready to be enqueued.

    Attributes:
        context: the context it runs in.
        run: its sizes and addresses.
    """

    def __init__(self, contexts: EngineContexts, context: EngineContext, run: GraphRun) -> None:
        self._contexts = contexts
        self.context = context
        self.run = run

    @property
    def recordable(self) -> bool:
        """Whether `enqueue` may be recorded; read after the first call, as TensorRT for RTX may
        still have to compile kernels then.
        """
        capturable = getattr(self.context.native, "is_stream_capturable", None)
        if capturable is None:
            return True
        answers: list[bool] = []
        self._contexts.device.enqueue(lambda stream: answers.append(capturable(stream)))
        return answers[0]

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Rebind the tensors to these addresses."""
        self.run = self.run._replace(addresses=addresses)

    def enqueue(self) -> None:
        """Enqueue the run. Raises EngineError with TensorRT's messages."""
        context, contexts = self.context, self._contexts

        def issue(stream: int) -> None:
            context.tell(contexts, self.run)
            if not context.native.execute_async_v3(stream):
                raise contexts.failed("running the engine")

        with contexts.telling("running the engine"):
            contexts.device.enqueue(issue)
