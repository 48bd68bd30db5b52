"""The buffers that the runs of a state read and write, bound for ONNX Runtime.

The bindings are vectors of OrtValues. An IOBinding looks up and checks every value when it is
bound, and a session that drafts seldom runs twice from the same slots to the same slots. For
`demo`, with 50 values, vectors take 10 µs to make and an IOBinding 42 µs, or 170 µs with its first
run.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import (  # type: ignore[import-untyped]
    OrtDevice,
    OrtValue,
    OrtValueVector,
)

from edge.runtime.buffers import StateBuffers
from edge.runtime.device_slots import Span
from edge.runtime.ring import RingRun

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# runs whose control inputs are cached; each entry holds matrices of tokens × tokens
_MAX_CACHED_CONTROLS = 64
# control inputs of a run, except the taps of convolutions
_CONTROL_INPUTS = (
    "tokens", "rows", "kept", "stored", "parents", "tree", "last_only", "ancestors", "paths",
    "positions", "past", "total", "last",
)  # fmt: skip
_CPU = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)


class BindingKey(NamedTuple):
    """The key under which a run's bound buffers are cached.

    Attributes:
        run: slots that the run reads and writes.
        rows: "last", "all" or "some".
        row_count: number of logits rows.
    """

    run: RingRun
    rows: str
    row_count: int


class BoundValues(NamedTuple):
    """A run's inputs and outputs in the order of their names, and views of its results.

    `held` keeps matrices alive that the inputs point into.
    """

    feed_names: list[str]
    feeds: OrtValueVector
    fetch_names: list[str]
    fetches: OrtValueVector
    devices: list[OrtDevice]  # one per output
    logits: Floats  # [L, B, V]
    result: Floats  # [B, L, V], a view of `logits`
    finite: NDArray[np.bool_]
    held: tuple[Floats, Floats]
    read: tuple[Span, ...]  # slots of the state's copies on a GPU
    written: tuple[Span, ...]


class Constants:
    """Inputs of chain runs, shared by all states of an engine. A run uses prefixes of them."""

    def __init__(self, longest: int, widths: Collection[int], window: int) -> None:
        """Allocate the inputs.

        Args:
            longest: maximum number of tokens in a run.
            widths: convolution widths.
            window: maximum number of pending tokens before a run.
        """
        self.longest = longest
        self.order: Ints = np.arange(longest + window, dtype=np.int64)
        self.taps = {width: self.order[:longest, None] + np.arange(width) for width in widths}
        self.kept_taps = _kept_taps(self.taps)
        self.parents: Ints = self.order - 1
        self.no, self.yes = np.array(False), np.array(True)
        # bindings keep the triangles alive; this cache only shares them
        self._triangles: weakref.WeakValueDictionary[int, Floats] = weakref.WeakValueDictionary()

    def ancestors(self, count: int) -> Floats:
        """Return the [T, T] matrix that is 1 where the column's token is at or before the row's."""
        triangle = self._triangles.get(count)
        if triangle is None:
            triangle = np.tri(count, dtype=np.float32)
            self._triangles[count] = triangle
        return triangle


def _kept_taps(taps: Mapping[int, Ints]) -> dict[int, Ints]:
    """Return the taps that form the convolution state after each token: all but the oldest."""
    return {width: np.ascontiguousarray(rows[:, 1:]) for width, rows in taps.items()}


class TreeInputs:
    """Inputs of tree runs, rewritten for every tree."""

    def __init__(self, window: int, widths: Collection[int]) -> None:
        self.taps = {width: np.zeros((window, width), np.int64) for width in widths}
        self.kept_taps = _kept_taps(self.taps)
        self._previous: Ints = np.zeros((window, max(widths, default=1)), np.int64)
        self.parents: Ints = np.zeros(window, np.int64)
        self._ancestors: Floats = np.zeros(window * window, np.float32)
        self._paths: Floats = np.zeros((2 * window) ** 2, np.float32)

    def ancestors(self, count: int) -> Floats:
        return self._ancestors[: count * count].reshape(count, count)

    def paths(self, pending: int, count: int) -> Floats:
        """Return [P + T, P + T]: `ancestors` with the pending tokens as a chain before the root."""
        total = pending + count
        return self._paths[: total * total].reshape(total, total)

    def fill(self, parents: tuple[int, ...], position: int, positions: Ints, pending: int) -> None:
        """Write the tree's inputs, and each node's absolute position into `positions`."""
        ancestors = self.ancestors(len(parents))
        ancestors[:] = 0
        for node, parent in enumerate(parents):
            if parent >= 0:
                ancestors[node] = ancestors[parent]
                positions[node] = positions[parent] + 1
            else:
                positions[node] = position
            ancestors[node, node] = 1
            self.parents[node] = parent
            ancestor = node
            for back in range(self._previous.shape[1]):
                # before the root, count back into the convolution state: -1 is its newest row
                self._previous[node, back] = ancestor
                ancestor = parents[ancestor] if ancestor >= 0 else ancestor - 1
        for width, taps in self.taps.items():
            # the state's rows precede the run's
            np.add(self._previous[:, :width][:, ::-1], width - 1, out=taps)
            self.kept_taps[width][:] = taps[:, 1:]
        paths = self.paths(pending, len(parents))
        paths[:pending] = np.tri(pending, len(paths), dtype=np.float32)
        paths[pending:, :pending] = 1
        paths[pending:, pending:] = ancestors


class Bindings:
    """Inputs and logits of one state's runs, and the vectors that bind them. Allocated once."""

    def __init__(self, inputs: Collection[str], constants: Constants, vocab: int,
                 state: StateBuffers) -> None:  # fmt: skip
        """`inputs`: names of the graph's inputs."""
        # keep no reference to the state: a cycle would delay freeing its memory until the next
        # garbage collection
        logs = state.layout.logs
        self._kept = [item for item in state.rings.items() if item[0] not in logs]
        self._logs = [item for item in state.rings.items() if item[0] in logs]
        self._bases, self._caches = list(state.bases.items()), list(state.caches.items())
        self._slots = state.device
        if self._slots is not None:  # `_spans` counts them in this order
            order = (name for name, _ in (*self._kept, *self._logs, *self._bases))
            assert tuple(self._slots.names) == tuple(order)
        self._constants = constants
        longest, batch = constants.longest, state.batch
        self.tokens: Ints = np.zeros((longest, batch), np.int64)
        self.positions: Ints = np.zeros(longest, np.int64)
        self.past: Ints = np.zeros(1, np.int64)
        self.total = np.zeros((), np.int32)
        self.last = np.zeros(batch, np.int32)
        self.rows: Ints = np.zeros(longest, np.int64)
        self.tree = TreeInputs(state.window, constants.taps)
        self._window = state.window
        self._logits: Floats = np.zeros((state.window + 1, batch, vocab), np.float32)
        self._finite = np.zeros((batch, vocab), np.bool_)
        self._control_cache: dict[
            tuple[object, ...], tuple[list[OrtValue], tuple[Floats, Floats]]
        ] = {}
        self._values: dict[tuple[str, int | None, int | None], OrtValue] = {}
        widths = [f"{kept}taps{width}" for kept in ("", "kept_") for width in constants.taps]
        self._control_names = [n for n in (*_CONTROL_INPUTS, *widths) if n in inputs]
        self._feed_names, self._fetch_names = self._names(commit=False)
        # a committing run writes no logs
        self._commit_names = self._names(commit=True)[1]
        self._fetch_devices = self._devices(self._fetch_names)
        self._commit_devices = self._devices(self._commit_names)

    def room(self, count: int) -> bool:
        """Return whether `logits` has at least `count` rows allocated."""
        return count <= len(self._logits)

    def logits(self, count: int) -> Floats:
        """Return logits [count, B, V].

        More than window + 1 rows are allocated on first use and kept. Earlier bindings are then
        invalid.
        """
        if not self.room(count):
            longest = self._constants.longest
            self._logits = np.zeros((longest + 1, *self._logits.shape[1:]), np.float32)
        return self._logits[:count]

    def aside(self) -> Floats:
        """Return logits [1, B, V] that no run of at most a window writes to."""
        return self._logits[self._window : self._window + 1]

    def _names(self, *, commit: bool) -> tuple[list[str], list[str]]:
        """Return the names of inputs and outputs, in the order in which `bind` lists them."""
        kept, logs, bases, caches = (
            [name for name, _ in items]
            for items in (self._kept, self._logs, self._bases, self._caches)
        )
        logged = [] if commit else [name.removesuffix("_log") for name in logs]
        states = [f"{name}s" for name in kept], logged, [f"{name}s" for name in bases]
        fetched = ["logits", *chain(*states), *(f"{name}_out" for name in caches)]
        return [*self._control_names, *kept, *logs, *bases, *caches], fetched

    def _devices(self, fetched: Sequence[str]) -> list[OrtDevice]:
        """Return the device of each output. Logits and KV caches are in this process's memory."""
        device = _CPU if self._slots is None else self._slots.device
        states = len(fetched) - 1 - len(self._caches)
        return [_CPU, *[device] * states, *[_CPU] * len(self._caches)]

    def bind(self, key: BindingKey, logits: Floats | None = None) -> BoundValues:
        """Bind the inputs and outputs of a run. `logits` overrides where its logits are written."""
        logits = self.logits(key.row_count) if logits is None else logits
        controls, matrices = self._control_values(key)
        run = key.run
        feeds, fetches, value = OrtValueVector(), OrtValueVector(), self._value
        add_feed, add_fetch = feeds.push_back, fetches.push_back
        for control in controls:
            add_feed(control)
        add_fetch(OrtValue.ortvalue_from_numpy(logits, _CPU))
        kept = 1 if run.commit else run.tokens
        for name, ring in self._kept:
            add_feed(value(name, ring, run.source))
            add_fetch(value(name, ring, run.target, kept))
        first = run.source - run.pending + 1 if run.pending else 0
        for name, log in self._logs:
            add_feed(value(name, log, first, run.pending))
            if not run.commit:
                add_fetch(value(name, log, run.target, kept))
        for name, bases in self._bases:
            add_feed(value(name, bases, run.base))
            add_fetch(value(name, bases, run.new_base, 1))
        for name, cache in self._caches:
            add_feed(value(name, cache))
            add_fetch(value(name, cache))
        names, devices = self._fetch_names, self._fetch_devices
        if run.commit:
            names, devices = self._commit_names, self._commit_devices
        return BoundValues(
            self._feed_names, feeds, names, fetches, devices, logits, logits.transpose(1, 0, 2),
            self._finite, matrices, *self._spans(run, kept, first),
        )  # fmt: skip

    def _spans(
        self, run: RingRun, kept: int, first: int
    ) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Return the slots that a run reads and writes, of tensors with copies on a GPU."""
        if self._slots is None:
            return (), ()
        counts = len(self._kept), len(self._kept) + len(self._logs)
        ring, logs = slice(0, counts[0]), slice(*counts)
        bases = slice(counts[1], counts[1] + len(self._bases))
        target = slice(run.target, run.target + kept)
        read = (
            Span(ring, slice(run.source, run.source + 1)),
            Span(logs, slice(first, first + run.pending)),
            Span(bases, slice(run.base, run.base + 1)),
        )
        written = [Span(ring, target), Span(bases, slice(run.new_base, run.new_base + 1))]
        if not run.commit:
            written.append(Span(logs, target))
        return read, tuple(written)

    def _value(
        self,
        name: str,
        array: NDArray[np.generic],
        start: int | None = None,
        count: int | None = None,
    ) -> OrtValue:
        """Return a cached OrtValue of `array`, array[start] or array[start : start + count].

        If the state has copies on a GPU, the value is a part of one. The caller keeps the memory
        alive.
        """
        key = name, start, count
        cached = self._values.get(key)
        if cached is None:
            if self._slots is not None and start is not None and name in self._slots:
                cached = self._slots.view(name, start, count)
            else:
                if start is not None:
                    array = array[start] if count is None else array[start : start + count]
                cached = OrtValue.ortvalue_from_numpy(array, _CPU)
            self._values[key] = cached
        return cached

    def _control_values(self, key: BindingKey) -> tuple[list[OrtValue], tuple[Floats, Floats]]:
        """Return a run's control inputs in the order of their names, and the matrices in them."""
        # control inputs do not depend on slots and bases
        cache_key = key.run[4:], key.rows, key.row_count
        cached = self._control_cache.get(cache_key)
        if cached is None:
            if len(self._control_cache) >= _MAX_CACHED_CONTROLS:
                self._control_cache.clear()
            cached = self._control_cache[cache_key] = self._make_control_values(key)
        return cached

    def _make_control_values(self, key: BindingKey) -> tuple[list[OrtValue], tuple[Floats, Floats]]:
        run, constants, tree = key.run, self._constants, self.tree
        count = run.tokens
        source, prefix = (tree, "tree ") if run.tree else (constants, "")
        ancestors = source.ancestors(count)
        paths = (
            tree.paths(run.pending, count) if run.tree else constants.ancestors(run.pending + count)
        )
        order, last = constants.order, count - 1
        rows = {
            "last": ("order", order, last, 1),
            "all": ("order", order, 0, count),
            "some": ("some", self.rows, 0, key.row_count),
        }
        kept = (last, 1) if run.commit else (0, count)
        last_only = not run.tree and kept[1] == 1
        values = {
            "tokens": self._value("tokens", self.tokens, 0, count),
            "rows": self._value(*rows[key.rows]),
            "kept": self._value("order", order, *kept),
            "stored": self._value("order", order, run.stored, 1),
            "parents": self._value(f"{prefix}parents", source.parents, 0, count),
            "tree": self._value(f"{run.tree}", constants.yes if run.tree else constants.no),
            "last_only": self._value(f"{last_only}", constants.yes if last_only else constants.no),
            "ancestors": OrtValue.ortvalue_from_numpy(ancestors, _CPU),
            "paths": OrtValue.ortvalue_from_numpy(paths, _CPU),
            "positions": self._value("positions", self.positions, 0, count),
            "past": self._value("past", self.past),
            "total": self._value("total", self.total),
            "last": self._value("last", self.last),
        }
        for width, taps in source.taps.items():
            name, kept_taps = f"{prefix}taps{width}", source.kept_taps[width]
            values[f"taps{width}"] = self._value(name, taps, 0, count)
            values[f"kept_taps{width}"] = self._value(f"kept_{name}", kept_taps, *kept)
        return [values[name] for name in self._control_names], (ancestors, paths)
