"""The sizes an engine is built for: one optimization profile for each way a model is run.

    step      one token
    verify    2 … window tokens that can be taken back: a chain, or a tree of drafts
    prefill   1 … chunk tokens of a prompt

The profiles of one engine share its weights. Symbols of the device graph's inputs:

    T tokens · B sequences · L wanted rows · A = T for a tree, 1 for a chain
    C capacity of the KV caches · S slots of the logs · P tokens that `replay` has room for
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from edge.config import ModelConfig
from edge.runtime.engine import DEFAULT_WINDOW, MAX_BATCH, MAX_WINDOW, within
from edge.runtime.layout import DEFAULT_CAPACITY
from edge.runtime.ledger import log_slots

Dims = Sequence[int | str]
MAX_CHUNK = 65536


class EngineSizes(BaseModel):
    """What `edge build` is asked for.

    Attributes:
        window: most tokens of a run that can be taken back.
        batch: most sequences.
        capacity: most tokens of the KV caches; 0 without attention.
        chunk: most tokens of one committing run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: int = Field(default=DEFAULT_WINDOW, ge=1, le=MAX_WINDOW)
    batch: int = Field(default=1, ge=1, le=MAX_BATCH)
    capacity: int = Field(default=0, ge=0, le=1 << 24)
    chunk: int = Field(default=256, ge=1, le=MAX_CHUNK)

    def covers(self, other: EngineSizes) -> bool:
        """Whether an engine of these sizes can run states of `other`."""
        return all(own >= value for (_, own), (_, value) in zip(self, other, strict=True))


def sizes(
    config: ModelConfig,
    chunk: int,
    *,
    window: int | None = None,
    batch: int | None = None,
    capacity: int | None = None,
) -> EngineSizes:
    """Sizes for a model; what is None gets the runtime's default. Raises InputError."""
    window = DEFAULT_WINDOW if window is None else window
    batch = 1 if batch is None else batch
    within(window, MAX_WINDOW, "window")
    within(batch, MAX_BATCH, "batch")
    within(chunk, MAX_CHUNK, "chunk")
    if not config.has_attention:
        capacity = 0
    else:
        most = config.max_context or 1 << 24
        capacity = min(most, DEFAULT_CAPACITY) if capacity is None else capacity
        within(capacity, most, "capacity")
    return EngineSizes(window=window, batch=batch, capacity=capacity, chunk=chunk)


class SizeRange(NamedTuple):
    """A symbol's least, most likely and greatest value."""

    least: int
    likely: int
    most: int


class Profile(NamedTuple):
    """One way to run: `name`, and the range of each symbol."""

    name: str
    symbols: Mapping[str, SizeRange]

    def shapes(self, dims: Dims) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The least, likely and greatest shape of an input of these dimensions.

        Raises KeyError for a symbol that is none of the module's.
        """
        ranges = [
            SizeRange(*(dim,) * 3) if isinstance(dim, int) else self.symbols[dim] for dim in dims
        ]
        return (
            tuple(each.least for each in ranges),
            tuple(each.likely for each in ranges),
            tuple(each.most for each in ranges),
        )

    def fits(self, values: Mapping[str, int]) -> bool:
        """Whether a run of these sizes is one of this profile's; of symbols not named, any."""
        return all(
            self.symbols[symbol].least <= value <= self.symbols[symbol].most
            for symbol, value in values.items()
        )


def profiles(sizes: EngineSizes, *, trees: bool = True) -> tuple[Profile, ...]:
    """The profiles of an engine in its order: the first that fits a run is the one to use.

    Without `trees`, A is 1 in all.
    """
    slots = log_slots(sizes.window)
    always = {
        "B": SizeRange(1, sizes.batch, sizes.batch),
        "S": SizeRange(2, slots, slots),
        "P": SizeRange(1, slots, slots),
        "C": SizeRange(min(1, sizes.capacity), sizes.capacity, sizes.capacity),
    }
    one = SizeRange(1, 1, 1)
    found = [Profile("step", always | {"T": one, "A": one, "L": one})]
    if sizes.window > 1:
        several, any_of = SizeRange(2, sizes.window, sizes.window), _up_to(sizes.window)
        tree = any_of if trees else one
        found.append(Profile("verify", always | {"T": several, "A": tree, "L": any_of}))
    chunk = _up_to(sizes.chunk)
    # a prompt's last row is wanted, evaluation wants all
    rows = SizeRange(1, 1, sizes.chunk)
    found.append(Profile("prefill", always | {"T": chunk, "A": one, "L": rows}))
    return tuple(found)


def _up_to(most: int) -> SizeRange:
    return SizeRange(1, most, most)


def choose(among: Sequence[Profile], values: Mapping[str, int]) -> int | None:
    """Index of the first profile for a run of these sizes, such as {"T": 4, "A": 1}; or None."""
    return next((index for index, each in enumerate(among) if each.fits(values)), None)
