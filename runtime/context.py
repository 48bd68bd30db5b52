"""A state together with the tokens it has consumed: what prompts are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFullError
from edge.runtime.engine import Engine, GreedyEngine
from edge.runtime.state import Snapshot, State

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class ContextMark:
    """A place to come back to: one state, and the tokens that led to it."""

    state: Snapshot
    tokens: tuple[int, ...]
    pending: int | None


class Context:
    """One sequence of an engine.

    Attributes:
        tokens: ids consumed by the state, from the first one on.
        pending: the last sampled token when it has not been fed yet.
    """

    def __init__(self, engine: Engine, state: State) -> None:
        self.engine = engine
        # asked once: it takes 50 µs
        self._greedy = engine if isinstance(engine, GreedyEngine) else None
        self.state = state
        self.tokens: list[int] = []
        self.pending: int | None = None

    def check_room(self, count: int) -> None:
        """Raise ContextFullError unless the KV caches could hold `count` tokens in all."""
        capacity = self.state.capacity
        if capacity is not None and count > capacity:
            raise ContextFullError(
                f"{count} tokens do not fit into a context of {capacity}",
                field="prompt",
                remedy="start anew or send less; without attention layers there is no such limit",
            )

    @property
    def full(self) -> bool:
        """Whether not even one more token can be fed."""
        return self.state.capacity is not None and len(self.tokens) >= self.state.capacity

    def align(self, wanted: Sequence[int], known: int = 0) -> int:
        """Go back so that what was consumed begins what is wanted, leaving at least one token to
        feed. That is the first `known` tokens consumed, of which nothing is asked, and `wanted`.

        Returns how many tokens in all need not be run again: all that agree, when the state can be
        rewound that far, else none.
        """
        held = self.tokens[known:]
        agree = known + common_prefix(held, wanted, min(len(held), len(wanted) - 1))
        excess = len(self.tokens) - agree
        self.pending = None
        if excess > self.state.reach:
            self.clear()
            return 0
        self.rewind(excess)
        return agree

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

    def step_greedily(self, token: int, limit: int) -> int | Logits:
        """Consume one token; the likeliest id after it where the engine finds it itself and it is
        below `limit`, else the logits [V].
        """
        engine = self._greedy
        if engine is None or not engine.picks:
            return self.step(token)
        best = int(engine.run_greedy(np.asarray([[token]], np.int64), self.state)[0])
        if best >= limit:  # padding of the vocabulary, which no model was taught to say
            self.state.rewind(1)
            return self.step(token)
        self.tokens.append(token)
        self.pending = None
        return best

    def advance(self, tokens: Sequence[int]) -> Logits:
        """Consume tokens, so that they can be taken back where the window allows; logits [V]."""
        if len(tokens) <= self.state.window:
            return self._run(tokens, commit=False)
        logits = self.feed(tokens, lambda: False)
        assert logits is not None
        return logits

    def verify(self, tokens: Sequence[int]) -> Logits:
        """Consume at most a window of tokens; logits [T, V] after each, valid until the next run.

        All of them can be taken back.
        """
        logits = self.engine.run(np.asarray([tokens], np.int64), self.state, rows="all")
        self.tokens.extend(tokens)
        self.pending = None
        rows: Logits = logits[0]
        return rows

    def verify_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Logits:
        """Run at most a window of tokens as a tree; logits [T, V] after each, valid until the next
        run. None of them is consumed until `keep` says which; it has to come next.
        """
        logits = self.engine.run(
            np.asarray([tokens], np.int64), self.state, parents=parents, rows="all"
        )
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

    def rewind(self, count: int) -> None:
        """As if the last `count` tokens had never been fed. StateError beyond the state's reach."""
        if count:
            self.state.rewind(count)
            del self.tokens[-count:]

    def clear(self) -> None:
        """Back to before any token."""
        self.state.clear()
        self.tokens.clear()
        self.pending = None

    def mark(self) -> ContextMark:
        """Where this is now; costs a copy of one state."""
        return ContextMark(self.state.snapshot(), tuple(self.tokens), self.pending)

    def restore(self, mark: ContextMark) -> None:
        """Back to a mark, by copying its state in."""
        self.state.restore(mark.state)
        self.tokens[:] = mark.tokens
        self.pending = mark.pending


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first `limit` tokens agree."""
    low, high = 0, limit
    # comparing slices is a hundred times quicker than comparing tokens, and nearly all agree
    while low < high:
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
