"""The buffers a state's runs read and write, and the bindings that tell ONNX Runtime where."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.runtime.buffers import StateBuffers
from edge.runtime.request import Request

if TYPE_CHECKING:
    from edge.runtime.ort import OrtEngine

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

# bindings kept per state; for 24 layers one takes 40 KiB and about a millisecond to make
_KEPT = 256


class Key(NamedTuple):
    """What tells one binding from another.

    `source` and `target` are slots; `rows` is "last", "all" or "some".
    """

    source: int
    target: int
    tokens: int
    rows: str
    row_count: int
    commit: bool
    tree: bool


class Bound(NamedTuple):
    """A binding ready to run, with views of what it produces.

    `ancestors` is held here because nothing else may: the binding points into it.
    """

    binding: object
    logits: Floats  # [L, B, V]
    result: Floats  # [B, L, V], the same memory
    finite: NDArray[np.bool_]
    ancestors: NDArray[np.generic]


class Constants:
    """Inputs of chains, the same for every state of an engine: prefixes serve every length."""

    def __init__(self, longest: int, reach: int) -> None:
        """`longest`: most tokens of any run. `reach`: J, previous tokens a convolution reads."""
        self.order: Ints = np.arange(longest, dtype=np.int64)
        # a token's (j+1)-th previous one; below zero this counts into the convolution state
        self.previous: Ints = np.ascontiguousarray(self.order[:, None] - 1 - np.arange(reach))
        self.parents: Ints = self.order - 1
        self.chain = np.array(False)
        self.tree = np.array(True)
        # bindings keep the triangles alive; this only shares them
        self._triangles: weakref.WeakValueDictionary[int, Floats] = weakref.WeakValueDictionary()

    def ancestors(self, count: int) -> Floats:
        """[T, T], 1 where the column's token is the row's or comes before it."""
        triangle = self._triangles.get(count)
        if triangle is None:
            triangle = np.tri(count, dtype=np.float32)
            self._triangles[count] = triangle
        return triangle


class TreeInputs:
    """Inputs of tree runs, rewritten for every tree."""

    def __init__(self, window: int, reach: int) -> None:
        self.previous: Ints = np.zeros((window, reach), np.int64)
        self.parents: Ints = np.zeros(window, np.int64)
        self._ancestors: Floats = np.zeros(window * window, np.float32)
        self._reach = reach

    def ancestors(self, count: int) -> Floats:
        return self._ancestors[: count * count].reshape(count, count)

    def fill(self, parents: tuple[int, ...], position: int, positions: Ints) -> None:
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
            step = parent
            for back in range(self._reach):
                # past the root, count back into the convolution state: -1 is its newest row
                self.previous[node, back] = step
                step = parents[step] if step >= 0 else step - 1


class Workspace:
    """What one state's runs need besides the state: inputs, logits, bindings. Allocated once."""

    def __init__(self, engine: OrtEngine, state: StateBuffers) -> None:
        self.engine = engine
        # not the state itself: a cycle would keep its memory until the next garbage collection
        self._rings, self._caches = state.rings, state.caches
        self._constants = engine.constants
        longest, batch, vocab = len(engine.constants.order), state.batch, engine.config.vocab_size
        reach = engine.constants.previous.shape[1]
        self.tokens: Ints = np.zeros((longest, batch), np.int64)
        self.positions: Ints = np.zeros(longest, np.int64)
        self.past: Ints = np.zeros((), np.int64)
        self.rows: Ints = np.zeros(longest, np.int64)
        self.tree = TreeInputs(state.window, reach)
        self._logits: Floats = np.zeros((state.window + 1, batch, vocab), np.float32)
        self._finite = np.zeros((batch, vocab), np.bool_)
        self._bound: OrderedDict[Key, Bound] = OrderedDict()

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

    def stage(self, request: Request, position: int) -> None:
        """Write the inputs of a run that starts at `position`."""
        count = request.count
        self.tokens[:count] = request.tokens
        self.past[()] = position
        if request.parents is not None:
            self.tree.fill(request.parents, position, self.positions)
        elif count == 1:
            self.positions[0] = position
        else:
            np.add(self._constants.order[:count], position, out=self.positions[:count])
        if not isinstance(request.rows, str):
            self.rows[: len(request.rows)] = request.rows

    def logits(self, count: int) -> Floats:
        """[count, B, V]. More than window + 1 are allocated when first asked for, and kept."""
        if count > len(self._logits):
            longest = len(self._constants.order)
            self._logits = np.zeros((longest + 1, *self._logits.shape[1:]), np.float32)
            self._bound.clear()
        return self._logits[:count]

    def _bind(self, key: Key) -> Bound:
        logits = self.logits(key.row_count)
        inputs = self._inputs(key)
        outputs: dict[str, NDArray[np.generic]] = {"logits": logits}
        kept = 1 if key.commit else key.tokens
        for name, ring in self._rings.items():
            inputs[name] = ring[key.source]
            outputs[name + "s"] = ring[key.target : key.target + kept]
        for name, cache in self._caches.items():
            inputs[name] = cache
            outputs[name + "_out"] = cache
        binding = self.engine.bind(inputs, outputs)
        result = logits.transpose(1, 0, 2)
        return Bound(binding, logits, result, self._finite, inputs["ancestors"])

    def _inputs(self, key: Key) -> dict[str, NDArray[np.generic]]:
        count, fixed = key.tokens, self._constants
        last = fixed.order[count - 1 : count]
        all_tokens = fixed.order[:count]
        rows = {"last": last, "all": all_tokens, "some": self.rows[: key.row_count]}
        source = self.tree if key.tree else fixed
        return {
            "tokens": self.tokens[:count],
            "rows": rows[key.rows],
            "kept": last if key.commit else all_tokens,
            "previous": source.previous[:count],
            "parents": source.parents[:count],
            "tree": fixed.tree if key.tree else fixed.chain,
            "ancestors": source.ancestors(count),
            "positions": self.positions[:count],
            "past": self.past,
        }
