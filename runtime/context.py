"""One sequence of an engine: a state, and which tokens it has consumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFullError
from edge.runtime.engine import Engine
from edge.runtime.state import State
from edge.runtime.state_memory import Snapshot

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Consumed:
    """What a state has consumed.

    Attributes:
        tokens: their ids, but for those that are forgotten.
        pending: the last sampled token when it has not been fed yet.
        forgotten: how many consumed tokens are no longer kept.
        gap: they were all before this index of `tokens`, which cannot be gone behind.
    """

    tokens: tuple[int, ...] = ()
    pending: int | None = None
    forgotten: int = 0
    gap: int = 0


@dataclass(frozen=True)
class ContextMark:
    """A place to come back to: one state, and the tokens that led to it."""

    state: Snapshot
    consumed: Consumed


class Context:
    """One sequence of an engine: a state together with the tokens it has consumed.

    Attributes:
        tokens, pending, forgotten, gap: see `Consumed`.
    """

    def __init__(self, engine: Engine, state: State) -> None:
        self.engine = engine
        self.state = state
        self.capacity = state.capacity
        self.tokens: list[int] = []
        self.pending: int | None = None
        self.forgotten = self.gap = 0

    @property
    def position(self) -> int:
        """How many tokens have been consumed, those included that are forgotten."""
        return len(self.tokens) + self.forgotten

    def check_room(self, count: int) -> None:
        """Raise ContextFullError unless the KV caches could hold `count` tokens in all."""
        if self.capacity is not None and count > self.capacity:
            raise ContextFullError(
                f"{count} tokens do not fit into a context of {self.capacity}",
                field="prompt",
                remedy="start a new session or send less; models without attention have no limit",
            )

    # -- running ---------------------------------------------------------------------------------

    def feed(self, tokens: Sequence[int], halted: Callable[[], object]) -> Logits | None:
        """Consume tokens in chunks; logits [V] after the last, valid until the next run.

        None when `halted()` said so before all chunks were through; what was fed stays fed.
        """
        logits: Logits | None = None
        for start in range(0, len(tokens), self.engine.chunk):
            if halted():
                return None
            chunk = tokens[start : start + self.engine.chunk]
            logits = self._run(chunk, commit=len(chunk) > 1)
        return logits

    def step(self, token: int) -> Logits:
        """Consume one token; logits [V], valid until the next run."""
        return self._run((token,), commit=False)

    def advance(self, tokens: Sequence[int]) -> Logits:
        """Consume tokens, so that they can be taken back where the window allows; logits [V]."""
        if len(tokens) <= self.state.window:
            return self._run(tokens, commit=False)
        logits = self.feed(tokens, lambda: False)
        assert logits is not None
        return logits

    def verify(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Logits:
        """Run at most a window of tokens; logits [T, V] after each, valid until the next run.

        Without `parents` they are consumed, and all of them can be taken back. A tree is consumed
        by `keep` alone, which has to come next.
        """
        run = self.engine.run
        logits = run(np.asarray([tokens], np.int64), self.state, parents=parents, rows="all")
        if parents is None:
            self.tokens.extend(tokens)
            self.pending = None
        rows: Logits = logits[0]
        return rows

    def keep(self, node: int, tokens: Sequence[int]) -> None:
        """Consume the path of the tree that ends at `node`, which is `tokens`."""
        self.state.select(node)
        self.tokens.extend(tokens)
        self.pending = None

    def _run(self, tokens: Sequence[int], *, commit: bool) -> Logits:
        logits = self.engine.run(np.asarray([tokens], np.int64), self.state, commit=commit)
        self.tokens.extend(tokens)
        self.pending = None
        row: Logits = logits[0, -1]
        return row

    # -- going back ------------------------------------------------------------------------------

    def align(self, wanted: Sequence[int], known: int = 0) -> int:
        """Go back so that what was consumed begins what is wanted, leaving at least one token to
        feed. That is the first `known` tokens consumed, of which nothing is asked, and `wanted`.

        Returns how many tokens in all need not be run again: all that agree, when the state can be
        rewound that far, and no interrupt left it with others than `tokens` says, else none.
        """
        held = self.tokens[known:]
        agree = known + common_prefix(held, wanted, min(len(held), len(wanted) - 1))
        excess = len(self.tokens) - agree
        self.pending = None
        sound = self.position == self.state.position
        if not sound or excess > self.state.reach or agree < self.gap:
            self.clear()
            return 0
        self.rewind(excess)
        return agree

    def rewind(self, count: int) -> None:
        """Take back the last `count` tokens. StateError beyond the state's reach."""
        if count:
            self.state.rewind(count)
            del self.tokens[-count:]

    def drop(self, made: int, kept: int) -> int:
        """Take back of the last `made` tokens, of which one may be pending, those after the first
        `kept`, if the state reaches that far; how many stay.
        """
        excess = made - max(kept, 1)
        if excess > self.state.reach:
            return made
        if excess:
            last = self.tokens[-excess]
            self.rewind(excess)
            self.pending = last
        if not kept:
            self.pending = None
        return kept

    def clear(self) -> None:
        """Go back to before any token."""
        self.state.clear()
        self.consumed = Consumed()

    def forget(self, start: int, count: int) -> None:
        """Keep no longer what `count` consumed tokens from `start` on were; the state has them."""
        if count:
            del self.tokens[start : start + count]
            self.forgotten += count
            self.gap = max(start, self.gap - count)

    def mark(self) -> ContextMark:
        """Return where this is now; costs a copy of one state."""
        return ContextMark(self.state.snapshot(), self.consumed)

    def restore(self, mark: ContextMark) -> None:
        """Go back to a mark, by copying its state in."""
        self.state.restore(mark.state)
        self.consumed = mark.consumed

    @property
    def consumed(self) -> Consumed:
        """What the state has consumed. Setting it leaves the state alone."""
        return Consumed(tuple(self.tokens), self.pending, self.forgotten, self.gap)

    @consumed.setter
    def consumed(self, now: Consumed) -> None:
        self.tokens[:] = now.tokens
        self.pending, self.forgotten, self.gap = now.pending, now.forgotten, now.gap


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int | None = None) -> int:
    """How many of the first tokens agree, of at most `limit`."""
    low, high = 0, min(len(a), len(b)) if limit is None else limit
    # comparing slices is a hundred times quicker than comparing tokens, and nearly all agree
    while low < high:
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
