"""The inputs that the host writes before a run, in one block so that one copy transfers them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import BundleError
from edge.launch import (
    ADVANCE,
    ITEM_SIZE,
    PAST,
    PENDING,
    PROGRAMS,
    SOURCE,
    STORE,
    TARGET,
    Buffer,
    LaunchPlan,
    Sizes,
)
from edge.rope import powers
from edge.runtime.cuda.device import ALIGNMENT, Bytes
from edge.runtime.cuda.sliding import RUN as SLIDING
from edge.runtime.layout import NUMPY, packed
from edge.runtime.ledger import LAST, ReplayStep, Tree, log_slots

Array = NDArray[Any]
Ints = NDArray[np.int32]

# concurrent scan programs per multiprocessor; registers allow 6 to 8
PROGRAMS_EACH = 8


@dataclass(frozen=True)
class DeviceRun:
    """One run.

    Attributes:
        tokens: token ids, [T, B].
        step: the ledger's description of the run.
        rows: indices of the tokens whose logits are wanted.
        first: position held by the first slot of sliding caches.
    """

    tokens: NDArray[np.int64]
    step: ReplayStep
    rows: Sequence[int]
    first: int = 0


# writes one input of a run
Fill = Callable[[Array, DeviceRun], None]


class Sources:
    """Computes the inputs of a plan.

    Raises BundleError for an input with an unknown name or another type.
    """

    def __init__(self, plan: LaunchPlan, multiprocessors: int = 0) -> None:
        """`multiprocessors`: number on the device; 0 if unknown."""
        self._plan = plan
        self._programs = PROGRAMS_EACH * multiprocessors
        self._inverses = [
            np.array(plan.inverses[f"rope{index}"], np.float32)
            if theta == 0
            else powers(theta, dim)
            for index, (theta, dim) in enumerate(plan.rotations)
        ]
        self._fills: dict[str, Fill] = {
            "run": self._fill_fields,
            SLIDING: self._fill_sliding,
            "tokens": _assigning(lambda run: run.tokens.ravel()),
            "rows": _assigning(lambda run: run.rows),
            "replay": _fill_replay,
            "slots": _assigning(lambda run: run.step.slots),
            "ancestors": _fill_ancestors,
            "positions": _assigning(lambda run: positions(run.step)),
        }
        for width in plan.taps:
            # `fill` writes both together
            self._fills |= dict.fromkeys((f"taps{width}", f"state_taps{width}"), _no_fill)
        known = {(name, dtype) for name in self._fills for dtype in ("i32", "i64")}
        for index in range(len(plan.rotations)):
            cos, sin = f"rope{index}.cos", f"rope{index}.sin"
            self._fills |= {cos: self._rotation(np.cos, index), sin: self._rotation(np.sin, index)}
            known |= {(cos, "f32"), (sin, "f32")}
        for name, buffer in plan.inputs.items():
            if (name, buffer.dtype) not in known:
                raise BundleError(
                    f"needs an input {name!r} of {buffer.dtype} that this version does not provide",
                    field=f"inputs.{name}",
                    remedy="export the model again with this version, or update mamba-edge",
                )

    def fill(self, arrays: dict[str, Array], run: DeviceRun) -> None:
        """Write the inputs of a run."""
        for name, array in arrays.items():
            self._fills[name](array, run)
        for width in self._plan.taps:
            index, state = arrays.get(f"taps{width}"), arrays.get(f"state_taps{width}")
            if index is not None or state is not None:
                count = len(run.step.slots)
                index = np.empty((count, width), np.int32) if index is None else index
                state = np.empty(width - 1, np.int32) if state is None else state
                fill_taps(run.step, width, index.reshape(count, width), state)

    def _fill_fields(self, array: Array, run: DeviceRun) -> None:
        step = run.step
        array[PENDING], array[ADVANCE] = len(step.pending), step.advance
        array[SOURCE], array[TARGET] = step.source, step.target
        array[STORE], array[PAST] = step.store, step.past
        array[PROGRAMS] = self._programs

    def _fill_sliding(self, array: Array, run: DeviceRun) -> None:
        self._fill_fields(array, run)
        array[PAST] -= run.first

    def _rotation(self, function: Callable[[Array], Array], index: int) -> Fill:
        """Return a Fill for cos or sin of position · inverse frequency.

        The product is fp32, as in the graph. The functions run in fp64, because NumPy's fp32 sines
        differ by a bit between processors, and from C's.
        """

        def values(run: DeviceRun) -> Array:
            angles = positions(run.step).astype(np.float32)[:, None] * self._inverses[index]
            return function(angles.astype(np.float64)).ravel()

        return _assigning(values)


def positions(step: ReplayStep) -> NDArray[np.int64]:
    """Return the position of each new token in its sequence."""
    out = np.arange(step.past, step.past + len(step.slots))
    for node, parent in enumerate(step.parents or ()):
        out[node] = step.past if parent < 0 else out[parent] + 1
    return out


def _assigning(values: Callable[[DeviceRun], Any]) -> Fill:
    def fill(array: Array, run: DeviceRun) -> None:
        array[:] = values(run)

    return fill


def _fill_replay(array: Array, run: DeviceRun) -> None:
    array[: len(run.step.pending)] = run.step.pending


def _fill_ancestors(array: Array, run: DeviceRun) -> None:
    # for a chain, an executor may use a 1 x 1 matrix
    count = math.isqrt(array.size)
    matrix = array.reshape(count, count)
    if run.step.parents is None:
        matrix[:] = np.tri(count, dtype=np.int32)
        return
    matrix[:] = 0
    for node, parent in enumerate(run.step.parents):
        if parent >= 0:
            matrix[node] = matrix[parent]
        matrix[node, node] = 1


def _no_fill(array: Array, run: DeviceRun) -> None:
    pass


def tap_rows(step: ReplayStep, width: int) -> Ints:
    """Return the rows that a convolution can read, oldest first, as if the run were a chain.

    They index [state slot: K-1 | log slots: S | new tokens: T].
    """
    state = np.arange(width - 1, dtype=np.int32)
    log = np.asarray(step.pending, np.int32) + np.int32(width - 1)
    first = width - 1 + log_slots(step.after.window)
    new = np.arange(first, first + len(step.slots), dtype=np.int32)
    return np.concatenate([state, log, new])


def fill_taps(
    step: ReplayStep, width: int, taps: NDArray[np.int32], state_taps: NDArray[np.int32]
) -> None:
    """Write `taps` [T, K], each oldest first and ending with the token itself, and `state_taps`
    [K-1], the rows of the stored state, which are not read unless the run stores one.
    """
    order, replayed = tap_rows(step, width), len(step.pending)
    if step.parents is None:
        taps[:] = order[np.arange(replayed, replayed + len(step.slots))[:, None] + np.arange(width)]
    else:
        before, new = order[: width - 1 + replayed], order[width - 1 + replayed :]
        tree = Tree(step.parents, step.slots)
        for node in range(len(step.slots)):
            path = np.concatenate([before, new[list(tree.path(node))]])
            taps[node] = path[len(path) - width :]
    end = replayed + len(step.slots) if step.store == LAST else step.advance
    state_taps[:] = order[end : end + width - 1]


class InputBlock:
    """Layout of the inputs of runs up to one size, packed and aligned to 256 bytes.

    Attributes:
        offsets: input name → byte offset.
        nbytes: total size in bytes.
    """

    def __init__(self, buffers: Mapping[str, Buffer], sizes: Sizes) -> None:
        self._buffers = buffers
        nbytes = {
            name: ITEM_SIZE[buffer.dtype] * max(1, buffer.elements.value(sizes))
            for name, buffer in buffers.items()
        }
        self.offsets, self.nbytes = packed(nbytes, ALIGNMENT)

    def views(self, host: Bytes, sizes: Sizes) -> dict[str, Array]:
        """Return the inputs of a run of these sizes as flat arrays in `host`."""
        out: dict[str, Array] = {}
        for name, offset in self.offsets.items():
            buffer = self._buffers[name]
            end = offset + ITEM_SIZE[buffer.dtype] * buffer.elements.value(sizes)
            out[name] = host[offset:end].view(NUMPY[buffer.dtype])
        return out
