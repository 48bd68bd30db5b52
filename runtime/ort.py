"""The `ort` engine: one ONNX Runtime session for every length, with all buffers preallocated."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge import cpu
from edge.config import ModelConfig
from edge.errors import BundleError, EngineError, InputError
from edge.onnx_runtime import onnxruntime
from edge.runtime import memory, ort_providers, ort_session
from edge.runtime.bindings import BindingKey, Bindings, BoundValues, Constants
from edge.runtime.buffers import StateBuffers
from edge.runtime.device_slots import DeviceSlots
from edge.runtime.engine import DEFAULT_WINDOW, MAX_WINDOW, Engine, Rows, forked, layout_of
from edge.runtime.layout import Identity, StateLayout
from edge.runtime.ledger import Slots
from edge.runtime.ort_hidden import before_head
from edge.runtime.request import Request, check_run
from edge.runtime.ring import RingRun
from edge.runtime.state import State

if TYPE_CHECKING:
    from edge.bundle import Bundle

DEFAULT_CHUNK = 256
# Bytes of weights up to which one thread is faster: waking a second one for every product costs
# more than it saves. With two threads on two cores, `demo` (4.7 MB) takes a third longer per step,
# and the same time for a prompt of 128 tokens.
_SINGLE_THREAD_BYTES = 8_000_000
# bindings cached per state; one takes 50 bytes per value
_MAX_BINDINGS = 1024


class OrtEngine(Engine):
    """ONNX Runtime over one graph. Several states, each on its own thread, may share it.

    Attributes:
        threads: number of CPU threads of a run.
        provider: ONNX Runtime's provider.
        device: where the provider keeps tensors; None for the host.
        identity: identity of the states it creates.
        inputs: names of the graph's inputs.
        width: number of values in a row that `run` returns.
    """

    name = "ort"

    def __init__(
        self,
        graph: str | os.PathLike[str],
        config: ModelConfig,
        *,
        threads: int | None = None,
        chunk: int = DEFAULT_CHUNK,
        identity: Identity | None = None,
        spin: bool = False,
        data: bytes | None = None,
        state_dtypes: Mapping[str, str] | None = None,
        profile: Path | None = None,
        provider: str | None = None,
        folder: Path | None = None,
        width: int | None = None,
    ) -> None:
        """Load a graph file of a bundle's folder: `folder`/graphs/….onnx, `folder`/weights.bin.

        Args:
            graph: path of the graph file.
            config: the model's config.
            threads: CPU threads; None is one per core this process may use.
            chunk: maximum number of tokens in a committing run.
            identity: identity of the states; None derives it from the graph.
            spin: whether threads busy-wait for work; see `session_options`.
            data: content of the graph file, if already read.
            state_dtypes: the manifest's dtypes of states that are not fp32.
            profile: empty folder for ONNX Runtime's profile, written until `end_profile`.
            provider: see `ort_providers.choose`.
            folder: folder with the weights; None is the bundle's folder above `graph`.
            width: number of values in a row that `run` returns; None for logits.

        Raises EngineError if ONNX Runtime cannot load the graph, the graph keeps a state in another
        dtype or the provider does not run here; BundleError if its inputs do not match `config`.
        """
        path = Path(graph)
        if data is None:
            data = ort_session.read(path)
        self.config = config
        self.chunk = chunk
        self.threads = cpu.usable_cores() if threads is None else threads
        if self.threads < 1 or self.chunk < 1:
            raise InputError(f"threads {self.threads} and chunk {self.chunk} must be positive")
        bytes_before = memory.private_bytes()
        options = ort_session.session_options(self.threads, spin=spin)
        if profile is not None:
            ort_session.record_profile(options, profile)
        choice = ort_providers.choose(provider)
        self._session, self.provider = ort_session.load_on(
            choice, data, path, options, folder, memory.most_of_runs(config, chunk)
        )
        self.device = ort_providers.device(self.provider)
        # loading transposes and packs weights: a 130M model in int8 leaves 50 MB of freed copies
        memory.trim()
        self._resident = max(0, memory.private_bytes() - bytes_before)
        self.identity = identity or Identity.of_graph(config, data)
        self._pid = os.getpid()
        self.inputs = frozenset(meta.name for meta in self._session.get_inputs())
        self._options = onnxruntime.RunOptions()
        self.width = config.vocab_size if width is None else width
        self._state_dtypes = dict(state_dtypes or {})
        self._logs = ort_session.logs_of(self._session, path)
        layout = self._layout(1, 1, 1)
        ort_session.check_signature(self._session, layout, path)
        self.constants = Constants(max(chunk, MAX_WINDOW), config.conv_widths, MAX_WINDOW)

    @staticmethod
    def from_bundle(
        bundle: Bundle,
        *,
        threads: int | None = None,
        spin: bool = False,
        profile: Path | None = None,
        provider: str | None = None,
        hidden: bool = False,
    ) -> OrtEngine:
        """Return the engine for a bundle's `ort` graph.

        `threads` None is one per core this process may use, or one for a small model. `provider`
        None is what EDGE_ORT_PROVIDERS lists, or the CPU. With `hidden`, `run` returns the last
        hidden states [B, L, d_model] instead of logits. Raises BundleError, EngineError.
        """
        manifest = bundle.manifest
        weights = sum(entry.size for entry in manifest.files if entry.path.endswith(".bin"))
        if threads is None and weights <= _SINGLE_THREAD_BYTES:
            threads = 1
        graph = manifest.graphs.get("ort")
        if graph is None:
            raise BundleError("has no graph for ONNX Runtime", file=bundle.path, field="graphs.ort")
        data = bundle.read(graph)
        with ort_session.unchanged(bundle):
            return OrtEngine(
                bundle.path / graph,
                manifest.model,
                threads=threads,
                chunk=manifest.limits.chunk,
                identity=Identity.of_bundle(bundle),
                spin=spin,
                data=before_head(data) if hidden else data,
                width=manifest.model.d_model if hidden else None,
                state_dtypes=manifest.state_dtypes,
                profile=profile,
                provider=provider,
                folder=bundle.folder,
            )

    def new_state(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> StateBuffers:
        self._check_process()
        layout = self._layout(batch, window, capacity)
        memory.check_state(self.memory_plan(batch=batch, window=window, capacity=capacity))
        state = StateBuffers(layout, self.identity, window=window)
        self.attach(state)
        return state

    def attach(self, state: StateBuffers) -> None:
        """Give a state the workspace its runs need, and copies on the provider's device."""
        if self.device is not None:
            # in the order in which `Bindings` counts them
            rings = sorted(state.rings.items(), key=lambda item: item[0] in state.layout.logs)
            state.device = DeviceSlots({**dict(rings), **state.bases}, self.device)
        state.workspace = OrtWorkspace(self, state)

    def memory_plan(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> dict[str, int]:
        """See `Engine.memory_plan`. `weights` is the memory growth measured while loading."""
        layout = self._layout(batch, window, capacity)
        return memory.plan(
            self.config, layout, window=window, chunk=self.chunk, weights=self._resident
        )

    def _layout(self, batch: int, window: int, capacity: int | None) -> StateLayout:
        return layout_of(self.config, batch, window, capacity, self._state_dtypes, self._logs)

    def run(
        self,
        tokens: NDArray[np.int64],
        state: State,
        *,
        parents: Sequence[int] | None = None,
        rows: Rows = "last",
        commit: bool = False,
    ) -> NDArray[np.float32]:
        self._check_process()
        with state.hold:
            request = check_run(self, tokens, state, parents, rows, commit)
            assert isinstance(state, StateBuffers)
            if state.layout.batch > 1 and state.layout.caches:
                if parents is not None:
                    raise InputError(
                        "a model with attention runs a tree for one sequence at a time",
                        field="parents",
                    )
                # GroupQueryAttention takes several sequences only one token at a time
                if request.count > 1:
                    return self._run_one_by_one(request, state)
            return self._run(request, state)

    def _run(self, request: Request, state: StateBuffers) -> NDArray[np.float32]:
        workspace: OrtWorkspace = state.workspace
        step = state.ledger.run(request.count, parents=request.parents, commit=request.commit)
        position = state.ledger.position
        # the run overwrites slots of old states, and new states are valid only once it succeeds
        state.ledger = step.during
        bound = workspace.perform(request, step.run, position)
        state.ledger = step.after
        return bound.result

    def _run_one_by_one(self, request: Request, state: StateBuffers) -> NDArray[np.float32]:
        """Run a chain token by token; the state advances when all runs have succeeded."""
        workspace: OrtWorkspace = state.workspace
        logits = workspace.logits(len(request.row_indices) + 1)
        ledger = state.ledger
        for index in range(request.count):
            single = Request(request.tokens[index : index + 1], None, "last", request.commit)
            step = ledger.run(1, commit=request.commit, origin=state.ledger)
            state.ledger = step.during
            bound = workspace.perform(single, step.run, ledger.position)
            for row, row_index in enumerate(request.row_indices):
                if row_index == index:
                    logits[row + 1] = bound.logits[0]
            ledger = step.after
        state.ledger = ledger
        return logits[1:].transpose(1, 0, 2)

    def execute(self, bound: BoundValues) -> None:
        """Run a binding. Raises EngineError."""
        try:
            self._session.run_with_ortvaluevector(
                self._options, bound.feed_names, bound.feeds, bound.fetch_names, bound.fetches,
                bound.devices,
            )  # fmt: skip
        except Exception as problem:
            raise EngineError(f"ONNX Runtime failed: {problem}") from problem

    def end_profile(self) -> Path:
        """End the profile this engine was created with and return the file with its events."""
        return Path(self._session.end_profiling())

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked("threads are")


class OrtWorkspace:
    """Buffers and bindings for the runs of one state.

    Attributes:
        engine: the engine that runs the state.
    """

    def __init__(self, engine: OrtEngine, state: StateBuffers) -> None:
        self.engine = engine
        self._order, self._slots = engine.constants.order, state.device
        self._inputs = Bindings(engine.inputs, engine.constants, engine.width, state)
        self._bound: OrderedDict[BindingKey, BoundValues] = OrderedDict()

    def logits(self, count: int) -> NDArray[np.float32]:
        """Return logits [count, B, V] for runs with `count` rows."""
        if not self._inputs.room(count):
            self._bound.clear()
        return self._inputs.logits(count)

    def perform(self, request: Request, run: RingRun, position: int) -> BoundValues:
        """Run a request that starts at `position` and return the binding that holds its logits."""
        self._stage(request, position, run.pending)
        rows, count = request.rows, request.count
        if isinstance(rows, str):
            key = BindingKey(run, rows, 1 if rows == "last" else count)
        else:
            key = BindingKey(run, "some", len(rows))
        bound = self._bound.get(key)
        if bound is None:
            self.logits(key.row_count)
            bound = self._bound[key] = self._inputs.bind(key)
            if len(self._bound) > _MAX_BINDINGS:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(key)
        self._execute(bound)
        for row in bound.logits:
            # .all() adds half a microsecond, a tenth of a step's cost in Python
            if not np.logical_and.reduce(np.isfinite(row, out=bound.finite), axis=None):
                raise EngineError(
                    "the logits are not finite", remedy="check the bundle, or clear the state"
                )
        return bound

    def _execute(self, bound: BoundValues) -> None:
        if self._slots is not None:
            self._slots.prepare(bound.read, bound.written)
        self.engine.execute(bound)

    def _stage(self, request: Request, position: int, pending: int) -> None:
        """Write the inputs of a run that starts at `position`, `pending` tokens after a base."""
        inputs, count = self._inputs, request.count
        inputs.tokens[:count] = request.tokens
        inputs.past[0] = position
        inputs.total[()] = position + count
        inputs.last[:] = position + count - 1
        if request.parents is not None:
            inputs.tree.fill(request.parents, position, inputs.positions, pending)
        elif count == 1:
            inputs.positions[0] = position
        else:
            np.add(self._order[:count], position, out=inputs.positions[:count])
        if not isinstance(request.rows, str):
            inputs.rows[: len(request.rows)] = request.rows

    def apply(self, state: StateBuffers) -> Slots:
        """Bring the scan states up to the live token, and return the slots of the live state.

        This runs one additional token and discards it. Its logits go to a separate row, because
        those of the last run may still be read.
        """
        position, caches = state.position, list(state.caches.values())
        # caches may be full, so the row that the run overwrites is restored
        at = position if state.capacity is None else min(position, state.capacity - 1)
        rows = [cache[:, :, at].copy() for cache in caches]
        step = state.ledger.applied()
        state.ledger = step.during
        request = Request(np.zeros((1, state.batch), np.int64), None, "last", True)
        self._stage(request, at, step.run.pending)
        try:
            self._execute(self._inputs.bind(BindingKey(step.run, "last", 1), self._inputs.aside()))
        finally:
            for cache, row in zip(caches, rows, strict=True):
                cache[:, :, at] = row
        state.ledger = step.after
        return state.ledger.here
