"""Checks before a run changes anything: one thread at a time, and a valid request."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFullError, EngineError, InputError, StateError

if TYPE_CHECKING:
    from edge.runtime.engine import Engine
    from edge.runtime.state import State

Rows = Literal["last", "all"] | Sequence[int]
Tokens = NDArray[np.int64]
_PATIENCE_S = 0.5  # how often a waiting thread checks whether the holder still runs


class _Ticket:
    """A place in the queue of a hold, owned by a running function."""

    __slots__ = ("depth", "frame", "gate", "thread")

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame
        self.thread = threading.get_ident()
        self.depth = 0
        self.gate = threading.Lock()
        self.gate.acquire()

    def left(self) -> bool:
        """Return whether the function has ended, after an interrupt, without releasing."""
        try:
            self.frame.clear()
        except RuntimeError:  # raised while the frame is executing
            return False
        return True


class Hold:
    """A lock that survives interrupts. Another thread is refused, or waits if `waits`.

    With `waits`, the holding thread may take it again.

    Python may raise KeyboardInterrupt after a lock is taken and before the `with` block begins. So
    the hold records the function that took it: once that no longer runs, the hold is free.
    """

    def __init__(self, refusal: str, remedy: str, *, waits: bool = False) -> None:
        self._queue: list[_Ticket] = []  # the first one holds it; lists change in one step
        self._refusal, self._remedy, self._waits = refusal, remedy, waits

    def __enter__(self) -> None:
        self.take(sys._getframe(1))

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, frame: FrameType) -> None:
        """Take the hold until `release`, or until the function of `frame` ends.

        `frame` must not be that of a generator that yields before `release`: it would count as
        ended. Raises EngineError if the hold is taken and `waits` is false.
        """
        ticket = _Ticket(frame)
        self._queue.append(ticket)
        while (first := self._queue[0]) is not ticket:
            if first.left():
                self._remove(first)
            elif not self._waits:
                self._remove(ticket)
                raise EngineError(self._refusal, remedy=self._remedy)
            elif first.thread == ticket.thread:
                self._remove(ticket)
                first.depth += 1
                return
            elif first.gate.acquire(timeout=_PATIENCE_S):
                first.gate.release()

    def release(self) -> None:
        first = self._queue[0]
        if first.depth:
            first.depth -= 1
        else:
            self._remove(first)

    def tidy(self) -> None:
        """Release a hold whose function an interrupt ended, and clear that function's frame."""
        for ticket in self._queue[:1]:
            if ticket.left():
                self._remove(ticket)

    def _remove(self, ticket: _Ticket) -> None:
        try:
            self._queue.remove(ticket)
        except ValueError:  # another thread has already removed the same ticket
            return
        ticket.gate.release()


@dataclass(frozen=True)
class Request:
    """One validated run request.

    Attributes:
        tokens: int64 [T, B], time first.
        parents: parent of each token in a tree; None for a chain.
        rows: "last", "all" or token indices.
        commit: whether only the state after the last token is kept.
    """

    tokens: Tokens
    parents: tuple[int, ...] | None
    rows: Literal["last", "all"] | tuple[int, ...]
    commit: bool

    @property
    def count(self) -> int:
        return self.tokens.shape[0]

    @property
    def row_indices(self) -> Sequence[int]:
        if self.rows == "last":
            return (self.count - 1,)
        return range(self.count) if self.rows == "all" else self.rows


def check_run(
    engine: Engine,
    tokens: Any,
    state: State,
    parents: Sequence[int] | None = None,
    rows: Rows = "last",
    commit: bool = False,
) -> Request:
    """Check a request against the engine and the state, and return it; see `Engine.run`.

    Raises InputError, ContextFullError, StateError.
    """
    if getattr(state.workspace, "engine", None) is not engine:
        raise StateError("the state belongs to another engine")
    if state.ledger.tree is not None:
        raise StateError(
            "a tree was run and no node of it selected",
            remedy="select a node first; select(-1) drops the tree",
        )
    layout, position = state.layout, state.ledger.position
    array = _check_tokens(tokens, layout.batch, engine.config.vocab_size)
    count = array.shape[0]
    if commit:
        if parents is not None:
            raise InputError("a tree cannot be committed", field="parents")
        _check_count(count, engine.chunk, "chunk", "split the prompt into chunks")
    else:
        _check_count(count, state.window, "window", "commit the run, or make the window larger")
    if layout.caches and position + count > layout.capacity:
        raise ContextFullError(
            f"{count} more tokens do not fit: {position} of {layout.capacity} in use",
            field="tokens",
            remedy="start a new session, or make capacity larger",
        )
    if parents is not None:
        parents = _check_parents(parents, count)
    return Request(array, parents, _check_rows(rows, count), commit)


def _check_count(count: int, limit: int, name: str, remedy: str) -> None:
    if count > limit:
        raise InputError(
            f"{count} tokens exceed the {name} of {limit}", field="tokens", remedy=remedy
        )


def _check_tokens(tokens: Any, batch: int, vocab_size: int) -> Tokens:
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as problem:
        raise InputError(f"not an array of token ids: {problem}", field="tokens") from None
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise InputError(
            f"need integers of shape [batch, tokens], got {array.dtype} {list(array.shape)}",
            field="tokens",
        )
    if array.shape[0] != batch:
        raise InputError(f"{array.shape[0]} sequences, the state has {batch}", field="tokens")
    if array.shape[1] == 0:
        raise InputError("no tokens to run", field="tokens")
    # seen as unsigned, negative ids are enormous: one comparison checks both ends
    single = array.size == 1
    if not 0 <= int(array[0, 0] if single else array.astype(np.uint64).max()) < vocab_size:
        raise InputError(
            f"token ids must be 0 … {vocab_size - 1}, got {array.min()} … {array.max()}",
            field="tokens",
        )
    return array.astype(np.int64, copy=False).T


def _check_parents(parents: Sequence[int], count: int) -> tuple[int, ...]:
    checked = tuple(_check_index(parent, "parents") for parent in parents)
    if len(checked) != count:
        raise InputError(f"{len(checked)} parents for {count} tokens", field="parents")
    for token, parent in enumerate(checked):
        if not -1 <= parent < token:
            raise InputError(
                f"token {token} has parent {parent}: a parent comes before its child, or is -1",
                field=f"parents[{token}]",
            )
    return checked


def _check_rows(rows: Rows, count: int) -> Literal["last", "all"] | tuple[int, ...]:
    if isinstance(rows, str):
        if rows not in ("last", "all"):
            raise InputError(f'{rows!r} is not "last", "all" or indices', field="rows")
        return rows
    checked = tuple(_check_index(row, "rows") for row in rows)
    if not 0 < len(checked) <= count or not all(0 <= row < count for row in checked):
        raise InputError(f"need 1 … {count} indices below {count}, got {checked}", field="rows")
    return checked


def _check_index(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(f"{value!r} is not an index", field=field)
    return int(value)
