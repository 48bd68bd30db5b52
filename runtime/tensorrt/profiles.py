"""The sizes an engine is built for: one optimization profile per kind of run.

    step      one token
    verify    2 … window tokens that can be rewound: a chain or a tree of drafted tokens
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
    """Maximum sizes of an engine, the options of `edge build`.

    Attributes:
        window: maximum number of tokens that can be rewound.
        batch: maximum number of sequences.
        capacity: maximum number of tokens in the KV caches; 0 without attention.
        chunk: maximum number of tokens of one committing run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: int = Field(default=DEFAULT_WINDOW, ge=1, le=MAX_WINDOW)
    batch: int = Field(default=1, ge=1, le=MAX_BATCH)
    capacity: int = Field(default=0, ge=0, le=1 << 24)
    chunk: int = Field(default=256, ge=1, le=MAX_CHUNK)

    def covers(self, other: EngineSizes) -> bool:
        """Return whether an engine of these sizes can run states of size `other`."""
        return all(own >= value for (_, own), (_, value) in zip(self, other, strict=True))


def sizes(
    config: ModelConfig,
    chunk: int,
    *,
    window: int | None = None,
    batch: int | None = None,
    capacity: int | None = None,
) -> EngineSizes:
    """Return the sizes for a model; None stands for the runtime's default. Raises InputError."""
    window = DEFAULT_WINDOW if window is None else window
    batch = 1 if batch is None else batch
    within(window, MAX_WINDOW, "window")
    within(batch, MAX_BATCH, "batch")
    within(chunk, MAX_CHUNK, "chunk")
    if not config.has_attention:
        capacity = 0
    else:
        maximum = config.max_context or 1 << 24
        capacity = min(maximum, DEFAULT_CAPACITY) if capacity is None else capacity
        within(capacity, maximum, "capacity")
    return EngineSizes(window=window, batch=batch, capacity=capacity, chunk=chunk)


class SizeRange(NamedTuple):
    """The minimum, most likely and maximum value of a symbol."""

    least: int
    likely: int
    most: int


class Profile(NamedTuple):
    """One kind of run: its name and the range of each symbol."""

    name: str
    symbols: Mapping[str, SizeRange]

    def shapes(self, dims: Dims) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the minimum, likely and maximum shape of an input with these dimensions.

        Raises KeyError for an unknown symbol.
        """
        ranges = [
            SizeRange(*(dim,) * 3) if isinstance(dim, int) else self.symbols[dim] for dim in dims
        ]
        return (
            tuple(size_range.least for size_range in ranges),
            tuple(size_range.likely for size_range in ranges),
            tuple(size_range.most for size_range in ranges),
        )

    def fits(self, values: Mapping[str, int]) -> bool:
        """Return whether the profile allows a run of these sizes; symbols not given match any."""
        return all(
            self.symbols[symbol].least <= value <= self.symbols[symbol].most
            for symbol, value in values.items()
        )


def profiles(sizes: EngineSizes, *, trees: bool = True) -> tuple[Profile, ...]:
    """Return the profiles of an engine in its order; the first that fits a run is used.

    Without `trees`, A is always 1.
    """
    slots = log_slots(sizes.window)
    common = {
        "B": SizeRange(1, sizes.batch, sizes.batch),
        "S": SizeRange(2, slots, slots),
        "P": SizeRange(1, slots, slots),
        "C": SizeRange(min(1, sizes.capacity), sizes.capacity, sizes.capacity),
    }
    one = SizeRange(1, 1, 1)
    built = [Profile("step", common | {"T": one, "A": one, "L": one})]
    if sizes.window > 1:
        two_or_more, up_to_window = SizeRange(2, sizes.window, sizes.window), _up_to(sizes.window)
        tree = up_to_window if trees else one
        built.append(Profile("verify", common | {"T": two_or_more, "A": tree, "L": up_to_window}))
    chunk = _up_to(sizes.chunk)
    # prefill needs the last row only, evaluation all rows
    rows = SizeRange(1, 1, sizes.chunk)
    built.append(Profile("prefill", common | {"T": chunk, "A": one, "L": rows}))
    return tuple(built)


def _up_to(maximum: int) -> SizeRange:
    return SizeRange(1, maximum, maximum)


def choose(among: Sequence[Profile], values: Mapping[str, int]) -> int | None:
    """Return the index of the first profile that fits a run of these sizes, such as
    {"T": 4, "A": 1}; None if there is none.
    """
    return next((index for index, profile in enumerate(among) if profile.fits(values)), None)
