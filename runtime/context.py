"""One sequence of an engine: a state and the tokens it has consumed."""

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
    """The tokens that a state has consumed.

    Attributes:
        tokens: ids of the consumed tokens, without the forgotten ones.
        pending: the last sampled token if it has not been fed yet.
        forgotten: number of consumed tokens whose ids are no longer kept.
        gap: index into `tokens` before which all forgotten tokens were; a rewind cannot cross it.
    """

    tokens: tuple[int, ...] = ()
    pending: int | None = None
    forgotten: int = 0
    gap: int = 0


@dataclass(frozen=True)
class ContextMark:
    """A point to return to: a copy of the state and the tokens that led to it."""

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
        """Number of consumed tokens, including forgotten ones."""
        return len(self.tokens) + self.forgotten

    def check_room(self, count: int) -> None:
        """Raise ContextFullError unless the KV caches can hold `count` tokens in total."""
        if self.capacity is not None and count > self.capacity:
            raise ContextFullError(
                f"{count} tokens do not fit into a context of {self.capacity}",
                field="prompt",
                remedy="start a new session or send less; models without attention have no limit",
            )

    def feed(self, tokens: Sequence[int], halted: Callable[[], object]) -> Logits | None:
        """Consume tokens in chunks and return logits [V] after the last, valid until the next run.

        Returns None if `halted()` was true before the last chunk; tokens already fed stay consumed.
        """
        logits: Logits | None = None
        for start in range(0, len(tokens), self.engine.chunk):
            if halted():
                return None
            chunk = tokens[start : start + self.engine.chunk]
            logits = self._run(chunk, commit=len(chunk) > 1)
        return logits

    def step(self, token: int) -> Logits:
        """Consume one token and return logits [V], valid until the next run."""
        return self._run((token,), commit=False)

    def advance(self, tokens: Sequence[int]) -> Logits:
        """Consume tokens and return logits [V]. At most `window` tokens can be rewound."""
        if len(tokens) <= self.state.window:
            return self._run(tokens, commit=False)
        logits = self.feed(tokens, lambda: False)
        assert logits is not None
        return logits

    def verify(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> Logits:
        """Run at most `window` tokens and return logits [T, V], valid until the next run.

        Without `parents` the tokens are consumed and can all be rewound. With `parents` they are a
        tree, which `keep` must consume next.
        """
        run = self.engine.run
        logits = run(np.asarray([tokens], np.int64), self.state, parents=parents, rows="all")
        if parents is None:
            self.tokens.extend(tokens)
            self.pending = None
        rows: Logits = logits[0]
        return rows

    def keep(self, node: int, tokens: Sequence[int]) -> None:
        """Consume `tokens`, the tree's path from the root to `node`."""
        self.state.select(node)
        self.tokens.extend(tokens)
        self.pending = None

    def _run(self, tokens: Sequence[int], *, commit: bool) -> Logits:
        logits = self.engine.run(np.asarray([tokens], np.int64), self.state, commit=commit)
        self.tokens.extend(tokens)
        self.pending = None
        row: Logits = logits[0, -1]
        return row

    def align(self, wanted: Sequence[int], known: int = 0) -> int:
        """Rewind to the longest common prefix with the wanted tokens, leaving at least one to feed.

        The wanted tokens are the first `known` consumed ones, taken as they are, then `wanted`.

        Returns the number of tokens that need not be run again. The context is cleared and the
        result is 0 if the state cannot be rewound that far, or if an interrupt left it at another
        position than `tokens` says.
        """
        current = self.tokens[known:]
        common = known + common_prefix(current, wanted, min(len(current), len(wanted) - 1))
        excess = len(self.tokens) - common
        self.pending = None
        in_sync = self.position == self.state.position
        if not in_sync or excess > self.state.reach or common < self.gap:
            self.clear()
            return 0
        self.rewind(excess)
        return common

    def rewind(self, count: int) -> None:
        """Rewind the last `count` tokens. Raises StateError beyond the state's reach."""
        if count:
            self.state.rewind(count)
            del self.tokens[-count:]

    def drop(self, made: int, kept: int) -> int:
        """Rewind the last `made` tokens to the first `kept` of them and return how many remain.

        The last of them may be pending. Nothing is rewound if the state does not reach that far.
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
        """Drop the ids of `count` consumed tokens from `start` on; the state is unchanged."""
        if count:
            del self.tokens[start : start + count]
            self.forgotten += count
            self.gap = max(start, self.gap - count)

    def mark(self) -> ContextMark:
        """Return the current point to return to. Costs a copy of one state."""
        return ContextMark(self.state.snapshot(), self.consumed)

    def restore(self, mark: ContextMark) -> None:
        """Return to a mark by copying its state in."""
        self.state.restore(mark.state)
        self.consumed = mark.consumed

    @property
    def consumed(self) -> Consumed:
        """The tokens that the state has consumed. Setting it does not change the state."""
        return Consumed(tuple(self.tokens), self.pending, self.forgotten, self.gap)

    @consumed.setter
    def consumed(self, now: Consumed) -> None:
        self.tokens[:] = now.tokens
        self.pending, self.forgotten, self.gap = now.pending, now.forgotten, now.gap


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int | None = None) -> int:
    """Return the length of the common prefix, at most `limit`."""
    low, high = 0, min(len(a), len(b)) if limit is None else limit
    # comparing slices is a hundred times faster than comparing tokens, and nearly all agree
    while low < high:
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
