"""The states that requests run in: how many there are, and which of them a request gets."""

from __future__ import annotations

from collections.abc import Sequence

from edge.apps.serve.slot import WINDOW, PrefixStore, Slot
from edge.errors import StateError
from edge.runtime import memory
from edge.runtime.model import Model
from edge.runtime.speculate.decode import Drafting

DEFAULT = 4  # conversations at once, where the engine joins their steps and memory allows


class SlotPool:
    """Slots of one model, each for one request at a time. One thread at a time may call it.

    Attributes:
        slots: all of them.
        capacity: most tokens of each one's KV caches, None without attention.
        store: the states that are kept, for all.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.capacity = slots[0].capacity
        self.store = slots[0].store
        self._free = list(slots)  # the one that waits longest first

    @property
    def state_bytes(self) -> int:
        """Memory of the states that run."""
        return sum(slot.state_bytes for slot in self.slots)

    @property
    def free(self) -> bool:
        """Whether a request can be taken."""
        return bool(self._free)

    def take(self, prompt: Sequence[int]) -> Slot:
        """The free slot whose state has read most of the prompt, else the one not used longest."""
        slot = max(self._free, key=lambda one: one.known(prompt))
        self._free.remove(slot)
        return slot

    def give(self, slot: Slot) -> None:
        """It is free again."""
        self._free.append(slot)


def make_slots(
    model: Model,
    parallel: int | None,
    *,
    capacity: int | None,
    cache_bytes: int,
    drafting: Drafting | None = None,
) -> tuple[Model, list[Slot]]:
    """The model as it is to be used, and `parallel` slots; None is `DEFAULT` where steps can be
    joined, or as many as have room. With a drafter it is one.

    Raises StateError: no room for so many.
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
    """Raises StateError: so many states have no room."""
    plan = model.engine.memory_plan(window=WINDOW, capacity=capacity)
    each = plan["state_ring"] + plan["kv_cache"] + plan["logits"] + plan["snapshot"]
    memory.check_fits(
        {"total": count * each},
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
