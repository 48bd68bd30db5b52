"""The `ort` engine: ONNX Runtime, every buffer given, one session for every length."""

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
# Bytes of weights up to which one thread is the quicker: waking a second one for every product
# takes longer than half of it. On two threads of two cores demo (4.7 MB) takes a third more time a
# step, and as long for a prompt of 128 tokens.
_SMALL = 8_000_000
# bindings kept per state; one takes 50 bytes a value
_KEPT = 1024


class OrtEngine(Engine):
    """ONNX Runtime over one graph. Several states, each on its own thread, may share it.

    Attributes:
        threads: CPU threads one run uses.
        provider: states are in the CPU's memory, and ONNX Runtime copies what another provider than
            the CPU's reads and writes.
        identity: what the states it makes belong to.
        inputs: names of the graph's.
        width: values of a row that `run` gives.
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

        `threads` None is one per core this process may use; `spin` makes them wait for work
        without sleeping (`session_options` says what that gains and costs). `data` is the graph
        file's content where it was read before. `state_dtypes` is the manifest's: states that are
        not fp32. `profile`: an empty folder in which ONNX Runtime keeps its profile, until
        `end_profile`. `provider`: see `ort_providers.choose`. `folder`: where the weights
        are read, by default the bundle's by its path. `width`: values of a row that `run` gives,
        None for logits. Raises EngineError: not a graph ONNX
        Runtime can load, or one that keeps a state in another type, or the provider does not run
        here; BundleError: its inputs are not those of `config`.
        """
        path = Path(graph)
        if data is None:
            data = ort_session.read(path)
        self.config = config
        self.chunk = chunk
        self.threads = cpu.usable_cores() if threads is None else threads
        if self.threads < 1 or self.chunk < 1:
            raise InputError(f"threads {self.threads} and chunk {self.chunk} must be positive")
        before = memory.private_bytes()
        options = ort_session.session_options(self.threads, spin=spin)
        if profile is not None:
            ort_session.record_profile(options, profile)
        choice = ort_providers.choose(provider)
        self._session, self.provider = ort_session.load_on(
            choice, data, path, options, folder, memory.most_of_runs(config, chunk)
        )
        # weights are turned and packed while loading: a 130M model in int8 leaves 50 MB of copies
        memory.trim()
        self._resident = max(0, memory.private_bytes() - before)
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
        """The engine for a bundle's `ort` graph. `threads` None is one per core this process may
        use, and one alone for a small model; `provider` None is what EDGE_ORT_PROVIDERS lists, else
        the CPU. `hidden`: its `run` gives the last hidden states [B, L, d_model] in place of
        logits. Raises BundleError, EngineError.
        """
        manifest = bundle.manifest
        weights = sum(entry.size for entry in manifest.files if entry.path.endswith(".bin"))
        if threads is None and weights <= _SMALL:
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

    # -- states ----------------------------------------------------------------------------------

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
        """Give a state the workspace its runs need."""
        state.workspace = OrtWorkspace(self, state)

    def memory_plan(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> dict[str, int]:
        """See `Engine.memory_plan`. `weights` is what loading was seen to take."""
        layout = self._layout(batch, window, capacity)
        return memory.plan(
            self.config, layout, window=window, chunk=self.chunk, weights=self._resident
        )

    def _layout(self, batch: int, window: int, capacity: int | None) -> StateLayout:
        return layout_of(self.config, batch, window, capacity, self._state_dtypes, self._logs)

    # -- running ---------------------------------------------------------------------------------

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
                # GroupQueryAttention takes several sequences one token at a time only
                if request.count > 1:
                    return self._run_one_by_one(request, state)
            return self._run(request, state)

    def _run(self, request: Request, state: StateBuffers) -> NDArray[np.float32]:
        workspace: OrtWorkspace = state.workspace
        step = state.ledger.run(request.count, parents=request.parents, commit=request.commit)
        position = state.ledger.position
        # from here on the slots hold neither the old states nor, until the run is over, new ones
        state.ledger = step.during
        bound = workspace.perform(request, step.run, position)
        state.ledger = step.after
        return bound.result

    def _run_one_by_one(self, request: Request, state: StateBuffers) -> NDArray[np.float32]:
        """A chain as runs of one token; the state moves on when all have succeeded."""
        workspace: OrtWorkspace = state.workspace
        logits = workspace.logits(len(request.row_indices) + 1)
        ahead = state.ledger
        for index in range(request.count):
            one = Request(request.tokens[index : index + 1], None, "last", request.commit)
            step = ahead.run(1, commit=request.commit, origin=state.ledger)
            state.ledger = step.during
            bound = workspace.perform(one, step.run, ahead.position)
            for row, wanted in enumerate(request.row_indices):
                if wanted == index:
                    logits[row + 1] = bound.logits[0]
            ahead = step.after
        state.ledger = ahead
        return logits[1:].transpose(1, 0, 2)

    def execute(self, bound: BoundValues) -> None:
        """Run what is bound. Raises EngineError."""
        try:
            self._session.run_with_ortvaluevector(
                self._options, bound.feed_names, bound.feeds, bound.fetch_names, bound.fetches,
                bound.devices,
            )  # fmt: skip
        except Exception as problem:
            raise EngineError(f"ONNX Runtime failed: {problem}") from problem

    def end_profile(self) -> Path:
        """End the profile this engine was made with; the file with its events."""
        return Path(self._session.end_profiling())

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked("threads are")


class OrtWorkspace:
    """What the runs of one state need besides the state.

    Attributes:
        engine: whose it is.
    """

    def __init__(self, engine: OrtEngine, state: StateBuffers) -> None:
        self.engine = engine
        self._order = engine.constants.order
        self._inputs = Bindings(engine.inputs, engine.constants, engine.width, state)
        self._bound: OrderedDict[BindingKey, BoundValues] = OrderedDict()

    def logits(self, count: int) -> NDArray[np.float32]:
        """[count, B, V], for runs of that many rows."""
        if not self._inputs.room(count):
            self._bound.clear()
        return self._inputs.logits(count)

    def perform(self, request: Request, run: RingRun, position: int) -> BoundValues:
        """Run a request that starts at `position`; its logits are in what is returned."""
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
            if len(self._bound) > _KEPT:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(key)
        self.engine.execute(bound)
        for row in bound.logits:
            # .all() takes a detour of half a microsecond, a tenth of what a step costs in Python
            if not np.logical_and.reduce(np.isfinite(row, out=bound.finite), axis=None):
                raise EngineError(
                    "the logits are not finite", remedy="check the bundle, or clear the state"
                )
        return bound

    def _stage(self, request: Request, position: int, pending: int) -> None:
        """Write the inputs of a run that starts at `position`, `pending` tokens behind a base."""
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
        """Bring the scan states up to the live token: a run of one token more, of which nothing is
        kept, nor the logits, which go where no run whose logits may still be read had its own.
        """
        position, caches = state.position, list(state.caches.values())
        # caches may be full: some row is run over and put back
        at = position if state.capacity is None else min(position, state.capacity - 1)
        rows = [cache[:, :, at].copy() for cache in caches]
        step = state.ledger.applied()
        state.ledger = step.during
        one = Request(np.zeros((1, state.batch), np.int64), None, "last", True)
        self._stage(one, at, step.run.pending)
        try:
            self.engine.execute(
                self._inputs.bind(BindingKey(step.run, "last", 1), self._inputs.aside())
            )
        finally:
            for cache, row in zip(caches, rows, strict=True):
                cache[:, :, at] = row
        state.ledger = step.after
        return state.ledger.here
