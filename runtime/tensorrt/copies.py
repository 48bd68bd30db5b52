"""What a run changed, copied back into the state: for a graph whose outputs are not in place.

That is TensorRT for RTX: without plugins, no output may be an input's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge.runtime.cuda.device import Device, Memory
from edge.runtime.cuda.executor import Places
from edge.runtime.cuda.state import DeviceState
from edge.runtime.ledger import KEEP, ReplayStep
from edge.runtime.tensorrt.tensors import OUT


class Copies:
    """Of one state, of which only the memory is kept."""

    def __init__(self, state: DeviceState, device: Device) -> None:
        self._device = device
        self._memory, self._caches = state.recurrent, state.caches
        self._where, self._cache_where = state.where, state.cache_where
        self._recurrent = tuple(state.layout.recurrent)
        self._logs = tuple(state.layout.logs)
        self._rows = {
            name: (shape[0] * shape[1], shape[2], state.layout.bytes_of(name, shape[3:]))
            for name, shape in state.layout.caches.items()
        }

    def issue(self, step: ReplayStep, places: Places) -> None:
        """The stored slot, the log rows and the KV rows of the run `step`."""
        for memory, name, start, at, nbytes in self._changed(step):
            come_from = places.values[name + OUT] - places.arena.address
            self._device.copy(memory, start + at, places.arena, come_from + at, nbytes)

    def _changed(self, step: ReplayStep) -> Iterator[tuple[Memory, str, int, int, int]]:
        """(memory, tensor, where it starts there, first byte of it, bytes)."""
        if self._memory is not None:
            for name in self._recurrent if step.store != KEEP else ():
                place = self._where[name]
                yield self._memory, name, place.offset, (1 - step.source) * place.slot, place.slot
            for name in self._logs:
                place = self._where[name]
                for first, count in spans(step.slots):
                    yield (
                        self._memory, name, place.offset, first * place.slot, count * place.slot
                    )  # fmt: skip
        if self._caches is not None:
            for name, (parts, capacity, row) in self._rows.items():
                for part in range(parts):
                    at = (part * capacity + step.past) * row
                    count = len(step.slots) * row
                    yield self._caches, name, self._cache_where[name].offset, at, count


def spans(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring slots as (first, how many); those below 0 are none."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            if slots[start] >= 0:
                yield slots[start], index - start
            start = index
