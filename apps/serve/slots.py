"""The slots that requests run in: how many there are, and which of them a request gets."""

from __future__ import annotations

from collections.abc import Sequence

from edge.apps.serve.slot import WINDOW, PrefixStore, Slot
from edge.errors import StateError
from edge.runtime import memory
from edge.runtime.model import Model
from edge.runtime.speculate.decode import Drafting

DEFAULT = 4  # conversations at once, if the engine joins their steps and memory allows


class SlotPool:
    """Slots of one model, each for one request at a time. One thread at a time may call it.

    Attributes:
        slots: all slots.
        capacity: tokens that the KV caches of each slot hold; None without attention.
        store: kept states, shared by all slots.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.capacity = slots[0].capacity
        self.store = slots[0].store
        self._free = list(slots)  # idle for longest first

    @property
    def state_bytes(self) -> int:
        """Memory of the running states."""
        return sum(slot.state_bytes for slot in self.slots)

    @property
    def free(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def take(self, prompt: Sequence[int]) -> Slot:
        """Take the free slot whose state has read most of the prompt, else the longest idle one."""
        slot = max(self._free, key=lambda candidate: candidate.known(prompt))
        self._free.remove(slot)
        return slot

    def give(self, slot: Slot) -> None:
        """Return a slot to the pool."""
        self._free.append(slot)


def make_slots(
    model: Model,
    parallel: int | None,
    *,
    capacity: int | None,
    cache_bytes: int,
    drafting: Drafting | None = None,
) -> tuple[Model, list[Slot]]:
    """Return the model to use and `parallel` slots.

    None means `DEFAULT` slots, or fewer if memory is short, when steps can be joined; else one.
    With a drafter it is always one. Raises StateError when `parallel` slots do not fit into memory.
    """
    engine = model.engine
    if drafting is not None:
        parallel = 1
    if parallel is None:
        parallel = DEFAULT if engine.most_joined > 1 else 1
        while parallel > 1 and not _fits(model, parallel, capacity):
            parallel //= 2
    elif parallel > 1:
        _check_fits(model, parallel, capacity)
    if parallel == 1:
        slot = Slot(model, capacity=capacity, cache_bytes=cache_bytes, drafting=drafting)
        return model, [slot]
    model, store = model.joined(), PrefixStore(cache_bytes)
    return model, [
        Slot(model, capacity=capacity, cache_bytes=cache_bytes, store=store)
        for _ in range(parallel)
    ]


def _check_fits(model: Model, count: int, capacity: int | None) -> None:
    """Raise StateError when `count` states do not fit into memory."""
    plan = model.engine.memory_plan(window=WINDOW, capacity=capacity)
    bytes_per_slot = plan["state_ring"] + plan["kv_cache"] + plan["logits"] + plan["snapshot"]
    memory.check_fits(
        {"total": count * bytes_per_slot},
        error=StateError,
        remedy="answer fewer at once with --parallel, use a smaller --context, or stop other "
        "programs",
    )


def _fits(model: Model, count: int, capacity: int | None) -> bool:
    try:
        _check_fits(model, count, capacity)
    except StateError:
        return False
    return True
