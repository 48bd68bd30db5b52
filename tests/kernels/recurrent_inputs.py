"""A run of a recurrent kernel: pending tokens in the logs, new tokens, and what it may write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edge.launch import RUN_FIELDS
from edge.plugins.lowering.context import Regime
from tests.kernels.rowwise import CHAIN, MANY, TREE, Workbench, poisoned

KEEP, ADVANCED, LAST = range(3)  # values of run[STORE]


@dataclass(frozen=True)
class Run:
    """The host's description of a run.

    Attributes:
        pending: tokens of the feeds that wait in the logs, in order.
        new: tokens of the feeds that the run gets.
        advance, store, source: fields of `run`.
        parents: parents of the new tokens of a tree; -1 is the token before them.
        logged: whether the new tokens are written to the logs.
        spare: log slots that nothing uses.
        programs: number of programs that the device claims to run in parallel.
    """

    pending: Sequence[int] = ()
    new: Sequence[int] = ()
    advance: int = 0
    store: int = KEEP
    source: int = 0
    parents: Sequence[int] | None = None
    logged: bool = True
    spare: int = 3
    programs: int = 0

    @property
    def slots(self) -> int:
        return len(self.pending) + len(self.new) + self.spare

    @property
    def replay(self) -> list[int]:
        """Return log slots of the pending tokens, out of order as they are after some runs."""
        return [int(s) for s in self._shuffled()[: len(self.pending)]]

    @property
    def stash(self) -> list[int]:
        """Return log slots of the new tokens; -1 for every third, or for all if not `logged`."""
        found = self._shuffled()[len(self.pending) :][: len(self.new)]
        return [int(s) if self.logged and i % 3 != 2 else -1 for i, s in enumerate(found)]

    @property
    def regime(self) -> Regime:
        if self.parents is not None:
            return TREE
        return CHAIN if len(self.new) <= 16 else MANY

    def path(self, t: int) -> list[int]:
        """Return the new tokens on the path from the first to token `t`."""
        if self.parents is None:
            return list(range(t + 1))
        nodes: list[int] = []
        while t >= 0:
            nodes.insert(0, t)
            t = self.parents[t]
        return nodes

    def before(self, t: int) -> list[int]:
        """Return the tokens of the feeds up to and including new token `t`."""
        return [*self.pending, *(self.new[i] for i in self.path(t))]

    def outputs(self, expected: Callable[[list[int]], Tensor]) -> list[Tensor]:
        """Return the last output of each new token's path; `expected` gives those of all tokens of
        a path. A chain is a single path.
        """
        if self.parents is None and self.new:
            return list(expected([*self.pending, *self.new])[len(self.pending) :])
        return [expected(self.before(t))[-1] for t in range(len(self.new))]

    def taps(self, width: int) -> tuple[Tensor, Tensor]:
        """Return rows of [state | log | new]: a convolution's windows [T, K], the stored state's
        [K-1].
        """
        state = list(range(width - 1))
        log = [width - 1 + slot for slot in self.replay]
        first = width - 1 + self.slots
        windows = [
            [*state, *log, *(first + i for i in self.path(t))][-width:]
            for t in range(len(self.new))
        ]
        every = [*state, *log, *(first + t for t in range(len(self.new)))]
        end = len(every) if self.store == LAST else width - 1 + self.advance
        stored = every[end - (width - 1) : end] if self.store else [1 << 20] * (width - 1)
        return _i32(windows), _i32(stored)

    def _shuffled(self) -> Any:
        return np.random.default_rng(self.slots).permutation(self.slots)

    def inputs(self) -> dict[str, Tensor]:
        fields = dict.fromkeys(RUN_FIELDS, 0) | {
            "PENDING": len(self.pending), "ADVANCE": self.advance, "SOURCE": self.source,
            "TARGET": 1 - self.source, "STORE": self.store, "PAST": 1 << 20,
            "PROGRAMS": self.programs,
        }  # fmt: skip
        count = len(self.new)
        ancestors = torch.zeros(count, count, dtype=torch.int32)
        for t in range(count):
            ancestors[t, self.path(t)] = 1
        replay = torch.full((self.slots,), 1 << 20, dtype=torch.int32)
        replay[: len(self.pending)] = _i32(self.replay)
        return {
            "run": _i32([*fields.values(), -7]),
            "replay": replay,
            "slots": _i32(self.stash),
            "ancestors": ancestors,
        }

    def bench(self, batch: int) -> Workbench:
        bench = Workbench(self.regime, T=len(self.new), B=batch, S=self.slots)
        for name, value in self.inputs().items():
            bench.given("input", name, value)
        return bench


@dataclass
class Logs:
    """Logs of a run: filled with the pending tokens, later compared with the expected contents."""

    run: Run
    batch: int
    before: dict[str, Tensor] = field(default_factory=dict)

    def fill(self, bench: Workbench, name: str, rows: Tensor) -> None:
        """Fill the log from `rows` [tokens, B, width] of all tokens of the feeds."""
        log = poisoned(self.run.slots * self.batch * rows.shape[2], rows.dtype)
        log = log.view(self.run.slots, self.batch, rows.shape[2])
        for slot, token in zip(self.run.replay, self.run.pending, strict=True):
            log[slot] = rows[token]
        self.before[name] = log
        bench.given("log", name, log)

    def check(self, bench: Workbench, name: str, rows: Tensor, close: float = 0.0) -> None:
        """Check that the new tokens are in their slots, to within `close`, and nothing else has
        changed.
        """
        expected = self.before[name].clone()
        for slot, token in zip(self.run.stash, self.run.new, strict=True):
            if slot >= 0:
                expected[slot] = rows[token]
        found = bench.whole("log", name, tuple(expected.shape))
        if close:
            new = [slot for slot in self.run.stash if slot >= 0]
            torch.testing.assert_close(found[new], expected[new], rtol=close, atol=close)
            found[new] = expected[new]
        assert same_bits(found, expected), f"the log {name} is not as it must be"


def _i32(rows: Sequence[Any]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def two_slots(state: Tensor, source: int) -> Tensor:
    """Return [2, …] with `state` at `source` and poison in the other slot."""
    other = poisoned(state.numel(), state.dtype).view(state.shape)
    return torch.stack([state, other] if source == 0 else [other, state])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def bytes_of(a: Tensor) -> bytes:
    return a.contiguous().numpy().tobytes()


def by_tokens(feeds: Mapping[str, Any], *names: str) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(feeds[name])) for name in names}
