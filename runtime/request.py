"""One run asked of an engine, checked: what is refused is refused before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFullError, InputError, StateError
from edge.runtime.state import State

Rows = Literal["last", "all"] | Sequence[int]
Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """Attributes:
    tokens: int64 [T, B], time first.
    parents: of each token for a tree, None for a chain.
    rows: "last", "all" or token indices.
    commit: keep only the state after the last token.
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


def check(
    tokens: Any,
    state: State,
    parents: Sequence[int] | None,
    rows: Rows,
    commit: bool,
    *,
    vocab_size: int,
    chunk: int,
) -> Request:
    """A request that fits the state. Raises InputError, ContextFullError, StateError."""
    if state.tree is not None:
        raise StateError(
            "a tree was run and no node of it selected",
            remedy="select a node first; select(-1) drops the tree",
        )
    array = _tokens(tokens, state.batch, vocab_size)
    count = array.shape[0]
    if commit:
        if parents is not None:
            raise InputError("a tree cannot be committed", field="parents")
        _at_most(count, chunk, "chunk", "split the prompt into chunks")
    else:
        _at_most(count, state.window, "window", "commit the run, or make the window larger")
    if state.layout.caches and state.position + count > state.layout.capacity:
        raise ContextFullError(
            f"{count} more tokens do not fit: {state.position} of {state.layout.capacity} in use",
            field="tokens",
            remedy="start a new session, or make capacity larger",
        )
    if parents is not None:
        parents = _parents(parents, count)
    return Request(array, parents, _rows(rows, count), commit)


def _at_most(count: int, limit: int, name: str, remedy: str) -> None:
    if count > limit:
        raise InputError(
            f"{count} tokens exceed the {name} of {limit}", field="tokens", remedy=remedy
        )


def _tokens(tokens: Any, batch: int, vocab_size: int) -> Tokens:
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
    one = array.size == 1
    if not 0 <= int(array[0, 0] if one else array.astype(np.uint64).max()) < vocab_size:
        raise InputError(
            f"token ids must be 0 … {vocab_size - 1}, got {array.min()} … {array.max()}",
            field="tokens",
        )
    return array.astype(np.int64, copy=False).T


def _parents(parents: Sequence[int], count: int) -> tuple[int, ...]:
    out = tuple(_index(parent, "parents") for parent in parents)
    if len(out) != count:
        raise InputError(f"{len(out)} parents for {count} tokens", field="parents")
    for token, parent in enumerate(out):
        if not -1 <= parent < token:
            raise InputError(
                f"token {token} has parent {parent}: a parent comes before its child, or is -1",
                field=f"parents[{token}]",
            )
    return out


def _rows(rows: Rows, count: int) -> Literal["last", "all"] | tuple[int, ...]:
    if isinstance(rows, str):
        if rows not in ("last", "all"):
            raise InputError(f'{rows!r} is not "last", "all" or indices', field="rows")
        return rows
    out = tuple(_index(row, "rows") for row in rows)
    if not 0 < len(out) <= count or not all(0 <= row < count for row in out):
        raise InputError(f"need 1 … {count} indices below {count}, got {out}", field="rows")
    return out


def _index(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(f"{value!r} is not an index", field=field)
    return int(value)
