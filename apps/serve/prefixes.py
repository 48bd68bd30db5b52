"""States kept by the tokens that led to them, within a budget of bytes.

A recurrent state cannot be cut short, so a kept state helps a prompt only when all of its tokens
begin it. Which states are worth keeping is `Slot`'s business; here the least recently used ones
make room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.runtime.generate import ContextMark

Tokens = NDArray[np.int32]
_TOKEN_BYTES = 44  # of a Python integer, a reference to it, and the number in the array


@dataclass(frozen=True, eq=False)
class Kept:
    """A state and the tokens it has consumed."""

    tokens: Tokens
    mark: ContextMark

    @property
    def nbytes(self) -> int:
        return self.mark.state.nbytes + _TOKEN_BYTES * len(self.tokens)


class PrefixStore:
    """Attributes:
    budget: most bytes of all kept states together.
    nbytes: bytes of them now.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._kept: list[Kept] = []  # the most recently used last

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, wanted: Tokens) -> Kept | None:
        """The longest state that begins `wanted` and leaves at least one token of it to run."""
        best: Kept | None = None
        for kept in self._kept:
            size = len(kept.tokens)
            better = best is None or size > len(best.tokens)
            if better and size < len(wanted) and agree(kept.tokens, wanted) == size:
                best = kept
        if best is not None:
            self._kept.remove(best)
            self._kept.append(best)
        return best

    def shared(self, wanted: Tokens) -> int:
        """How many tokens `wanted` begins with that some kept state's tokens begin with, too."""
        return max((agree(kept.tokens, wanted) for kept in self._kept), default=0)

    def add(self, mark: ContextMark) -> None:
        """Keep a state; one of the same tokens gives way, and then the least recently used ones."""
        new = Kept(as_tokens(mark.tokens), mark)
        for kept in self._kept:
            if np.array_equal(kept.tokens, new.tokens):
                self._drop(kept)
                break
        self._kept.append(new)
        self.nbytes += new.nbytes
        while self.nbytes > self.budget:
            self._drop(self._kept[0])

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.nbytes = 0

    def _drop(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self.nbytes -= kept.nbytes


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Token ids as an array, to be compared at once."""
    return np.asarray(tokens, np.int32)


def agree(left: Tokens, right: Tokens) -> int:
    """How many tokens two sequences have in common from the first on."""
    size = min(len(left), len(right))
    different = np.flatnonzero(left[:size] != right[:size])
    return int(different[0]) if len(different) else size
