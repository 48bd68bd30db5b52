"""The buffers a state's runs read and write, and the lists that tell ONNX Runtime where.

These are vectors of OrtValues, not an IOBinding, which looks up and checks every value when it is
bound: a session that drafts seldom runs twice from the same slots to the same slots. For `demo`, 50
values, vectors take 10 µs to make and an IOBinding 42, or 170 with its first run.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import (  # type: ignore[import-untyped]
    OrtDevice,
    OrtValue,
    OrtValueVector,
)

from edge.runtime.buffers import StateBuffers
from edge.runtime.request import Request

if TYPE_CHECKING:
    from edge.runtime.ort import OrtEngine

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# kept per state; one takes 50 bytes a value
_KEPT = 1024
# kinds of runs whose inputs are kept, with matrices of tokens × tokens
_STEERED = 64
# inputs that say what to run, but for the taps of convolutions
_STEERING = (
    "tokens", "rows", "kept", "stored", "parents", "tree", "last_only", "ancestors", "paths",
    "positions", "past", "total", "last",
)  # fmt: skip
_CPU = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)


class Key(NamedTuple):
    """What tells one run's buffers from another's.

    Attributes:
        source, target: slots.
        base, new_base: where scan states with logs are read and written.
        pending: rows of the logs, up to the source's.
        stored: the token, pending ones counted first, whose scan states are written.
        tokens: of the run.
        rows: "last", "all" or "some".
        row_count: how many.
        commit: only the last token is kept.
        tree: the run is a tree.
    """

    source: int
    target: int
    base: int
    new_base: int
    pending: int
    stored: int
    tokens: int
    rows: str
    row_count: int
    commit: bool
    tree: bool


class Bound(NamedTuple):
    """A run's inputs and outputs, in the order of their names, with views of what it produces.

    `held` are matrices that nothing else may hold: the inputs point into them.
    """

    feed_names: list[str]
    feeds: OrtValueVector
    fetch_names: list[str]
    fetches: OrtValueVector
    devices: list[OrtDevice]  # of the outputs
    logits: Floats  # [L, B, V]
    result: Floats  # [B, L, V], the same memory
    finite: NDArray[np.bool_]
    held: tuple[Floats, Floats]


class Constants:
    """Inputs of chains, the same for every state of an engine: prefixes serve every length."""

    def __init__(self, longest: int, widths: Collection[int], window: int) -> None:
        """`longest`: most tokens of any run. `widths`: of convolutions. `window`: most pending
        tokens before a run.
        """
        self.longest = longest
        self.order: Ints = np.arange(longest + window, dtype=np.int64)
        self.taps = {width: self.order[:longest, None] + np.arange(width) for width in widths}
        self.kept_taps = _kept(self.taps)
        self.parents: Ints = self.order - 1
        self.no, self.yes = np.array(False), np.array(True)
        # bindings keep the triangles alive; this only shares them
        self._triangles: weakref.WeakValueDictionary[int, Floats] = weakref.WeakValueDictionary()

    def ancestors(self, count: int) -> Floats:
        """[T, T], 1 where the column's token is the row's or comes before it."""
        triangle = self._triangles.get(count)
        if triangle is None:
            triangle = np.tri(count, dtype=np.float32)
            self._triangles[count] = triangle
        return triangle


def _kept(taps: Mapping[int, Ints]) -> dict[int, Ints]:
    """Rows that are the convolution's state after each token: all but the oldest."""
    return {width: np.ascontiguousarray(rows[:, 1:]) for width, rows in taps.items()}


class TreeInputs:
    """Inputs of tree runs, rewritten for every tree."""

    def __init__(self, window: int, widths: Collection[int]) -> None:
        self.taps = {width: np.zeros((window, width), np.int64) for width in widths}
        self.kept_taps = _kept(self.taps)
        self._previous: Ints = np.zeros((window, max(widths, default=1)), np.int64)
        self.parents: Ints = np.zeros(window, np.int64)
        self._ancestors: Floats = np.zeros(window * window, np.float32)
        self._paths: Floats = np.zeros((2 * window) ** 2, np.float32)

    def ancestors(self, count: int) -> Floats:
        return self._ancestors[: count * count].reshape(count, count)

    def paths(self, pending: int, count: int) -> Floats:
        """[P + T, P + T]: `ancestors`, all of them descended from the pending tokens, a chain."""
        whole = pending + count
        return self._paths[: whole * whole].reshape(whole, whole)

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
            step = node
            for back in range(self._previous.shape[1]):
                # past the root, count back into the convolution state: -1 is its newest row
                self._previous[node, back] = step
                step = parents[step] if step >= 0 else step - 1
        for width, taps in self.taps.items():
            # the state's rows come before the run's
            np.add(self._previous[:, :width][:, ::-1], width - 1, out=taps)
            self.kept_taps[width][:] = taps[:, 1:]
        paths = self.paths(pending, len(parents))
        paths[:pending] = np.tri(pending, len(paths), dtype=np.float32)
        paths[pending:, :pending] = 1
        paths[pending:, pending:] = ancestors


class Workspace:
    """What one state's runs need besides the state: inputs, logits, vectors of both. Allocated
    once.
    """

    def __init__(self, engine: OrtEngine, state: StateBuffers) -> None:
        self.engine = engine
        # not the state itself: a cycle would keep its memory until the next garbage collection
        logs = state.layout.logs
        self._kept = [item for item in state.rings.items() if item[0] not in logs]
        self._logs = [item for item in state.rings.items() if item[0] in logs]
        self._bases, self._caches = list(state.bases.items()), list(state.caches.items())
        self._constants = engine.constants
        longest, batch, vocab = engine.constants.longest, state.batch, engine.config.vocab_size
        self.tokens: Ints = np.zeros((longest, batch), np.int64)
        self.positions: Ints = np.zeros(longest, np.int64)
        self.past: Ints = np.zeros(1, np.int64)
        self.total = np.zeros((), np.int32)
        self.last = np.zeros(batch, np.int32)
        self.rows: Ints = np.zeros(longest, np.int64)
        self.tree = TreeInputs(state.window, engine.constants.taps)
        self._logits: Floats = np.zeros((state.window + 1, batch, vocab), np.float32)
        self._finite = np.zeros((batch, vocab), np.bool_)
        self._bound: OrderedDict[Key, Bound] = OrderedDict()
        self._steered: dict[tuple[object, ...], tuple[list[OrtValue], tuple[Floats, Floats]]] = {}
        self._values: dict[tuple[str, int | None, int | None], OrtValue] = {}
        widths = [f"{kept}taps{width}" for kept in ("", "kept_") for width in self._constants.taps]
        self._steering_names = [n for n in (*_STEERING, *widths) if n in engine.inputs]
        self._feed_names, self._fetch_names = self._names(commit=False)
        # of what is committed nothing is logged
        self._commit_names = self._names(commit=True)[1]
        self._devices = [_CPU] * len(self._fetch_names)

    @property
    def nbytes(self) -> int:
        arrays = (self.tokens, self.positions, self.rows, self._logits, self._finite)
        return sum(array.nbytes for array in arrays)

    def bound(self, key: Key) -> Bound:
        """The binding for `key`, made on first use, the least recently used one dropped."""
        found = self._bound.get(key)
        if found is None:
            found = self._bound[key] = self._bind(key)
            if len(self._bound) > _KEPT:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(key)
        return found

    def stage(self, request: Request, position: int, pending: int) -> None:
        """Write the inputs of a run that starts at `position`, `pending` tokens behind a base."""
        count = request.count
        self.tokens[:count] = request.tokens
        self.past[0] = position
        self.total[()] = position + count
        self.last[:] = position + count - 1
        if request.parents is not None:
            self.tree.fill(request.parents, position, self.positions, pending)
        elif count == 1:
            self.positions[0] = position
        else:
            np.add(self._constants.order[:count], position, out=self.positions[:count])
        if not isinstance(request.rows, str):
            self.rows[: len(request.rows)] = request.rows

    def logits(self, count: int) -> Floats:
        """[count, B, V]. More than window + 1 are allocated when first asked for, and kept."""
        if count > len(self._logits):
            longest = self._constants.longest
            self._logits = np.zeros((longest + 1, *self._logits.shape[1:]), np.float32)
            self._bound.clear()
        return self._logits[:count]

    def settle(self, state: StateBuffers) -> None:
        """Bring the scan states up to the live token: a run of one token more, of which nothing is
        kept, nor the logits, which go where no run whose logits may still be read had its own.
        """
        place, caches = state.place, list(state.caches.values())
        # caches may be full: some row is run over and put back
        at = place.position if state.capacity is None else min(place.position, state.capacity - 1)
        rows = [cache[:, :, at].copy() for cache in caches]
        base, slot, pending = place.next_base(), place.next_slots(1), place.pending
        state.place = place = place.without(slot, 1)
        self.stage(Request(np.zeros((1, state.batch), np.int64), None, "last", True), at, pending)
        live, stored = place.live, pending - 1
        key = Key(live, slot, place.base, base, pending, stored, 1, "last", 1, True, False)
        try:
            self.engine.execute(self._bind(key, self._logits[state.window : state.window + 1]))
        finally:
            for cache, row in zip(caches, rows, strict=True):
                cache[:, :, at] = row
        state.place = place.with_base(base)

    def _names(self, *, commit: bool) -> tuple[list[str], list[str]]:
        """Of inputs and of outputs, in the order in which `_bind` lists them."""
        kept, logs, bases, caches = (
            [name for name, _ in items]
            for items in (self._kept, self._logs, self._bases, self._caches)
        )
        logged = [] if commit else [name.removesuffix("_log") for name in logs]
        states = [f"{name}s" for name in kept], logged, [f"{name}s" for name in bases]
        fetched = ["logits", *chain(*states), *(f"{name}_out" for name in caches)]
        return [*self._steering_names, *kept, *logs, *bases, *caches], fetched

    def _bind(self, key: Key, logits: Floats | None = None) -> Bound:
        logits = self.logits(key.row_count) if logits is None else logits
        steering, matrices = self._steering(key)
        feeds, fetches, value = OrtValueVector(), OrtValueVector(), self._value
        put, take = feeds.push_back, fetches.push_back
        for found in steering:
            put(found)
        take(OrtValue.ortvalue_from_numpy(logits, _CPU))
        kept = 1 if key.commit else key.tokens
        for name, ring in self._kept:
            put(value(name, ring, key.source))
            take(value(name, ring, key.target, kept))
        first = key.source - key.pending + 1 if key.pending else 0
        for name, log in self._logs:
            put(value(name, log, first, key.pending))
            if not key.commit:
                take(value(name, log, key.target, kept))
        for name, bases in self._bases:
            put(value(name, bases, key.base))
            take(value(name, bases, key.new_base, 1))
        for name, cache in self._caches:
            put(value(name, cache))
            take(value(name, cache))
        names = self._commit_names if key.commit else self._fetch_names
        return Bound(
            self._feed_names, feeds, names, fetches, self._devices[: len(names)], logits,
            logits.transpose(1, 0, 2), self._finite, matrices,
        )  # fmt: skip

    def _value(
        self,
        name: str,
        array: NDArray[np.generic],
        start: int | None = None,
        count: int | None = None,
    ) -> OrtValue:
        """`array`, array[start] or array[start : start + count] for ONNX Runtime, made once; who
        calls sees to it that the memory stays.
        """
        key = name, start, count
        found = self._values.get(key)
        if found is None:
            if start is not None:
                array = array[start] if count is None else array[start : start + count]
            found = self._values[key] = OrtValue.ortvalue_from_numpy(array, _CPU)
        return found

    def _steering(self, key: Key) -> tuple[list[OrtValue], tuple[Floats, Floats]]:
        """What steers a run, in the order of its names, and the matrices among it."""
        what = key[4:]  # slots and bases aside
        found = self._steered.get(what)
        if found is None:
            if len(self._steered) >= _STEERED:
                self._steered.clear()
            found = self._steered[what] = self._made_steering(key)
        return found

    def _made_steering(self, key: Key) -> tuple[list[OrtValue], tuple[Floats, Floats]]:
        count, fixed, tree = key.tokens, self._constants, self.tree
        source, kind = (tree, "tree ") if key.tree else (fixed, "")
        ancestors = source.ancestors(count)
        paths = tree.paths(key.pending, count) if key.tree else fixed.ancestors(key.pending + count)
        order, last = fixed.order, count - 1
        rows = {
            "last": ("order", order, last, 1),
            "all": ("order", order, 0, count),
            "some": ("some", self.rows, 0, key.row_count),
        }
        kept = (last, 1) if key.commit else (0, count)
        alone = not key.tree and kept[1] == 1
        found = {
            "tokens": self._value("tokens", self.tokens, 0, count),
            "rows": self._value(*rows[key.rows]),
            "kept": self._value("order", order, *kept),
            "stored": self._value("order", order, key.stored, 1),
            "parents": self._value(f"{kind}parents", source.parents, 0, count),
            "tree": self._value(f"{key.tree}", fixed.yes if key.tree else fixed.no),
            "last_only": self._value(f"{alone}", fixed.yes if alone else fixed.no),
            "ancestors": OrtValue.ortvalue_from_numpy(ancestors, _CPU),
            "paths": OrtValue.ortvalue_from_numpy(paths, _CPU),
            "positions": self._value("positions", self.positions, 0, count),
            "past": self._value("past", self.past),
            "total": self._value("total", self.total),
            "last": self._value("last", self.last),
        }
        for width, taps in source.taps.items():
            name, kept_taps = f"{kind}taps{width}", source.kept_taps[width]
            found[f"taps{width}"] = self._value(name, taps, 0, count)
            found[f"kept_taps{width}"] = self._value(f"kept_{name}", kept_taps, *kept)
        return [found[name] for name in self._steering_names], (ancestors, paths)
