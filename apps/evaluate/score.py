"""A model reads runs, and says how likely it thought each id that came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from edge.apps.evaluate.figures import F64, Tally
from edge.apps.evaluate.parts import Ints
from edge.apps.evaluate.windows import Run, Windows
from edge.errors import InputError
from edge.runtime.engine import Engine, Rows

F32 = NDArray[np.float32]

# logits handled at once in double precision
_VALUES = 1 << 20


class Reader:
    """One state of an engine that runs are read with."""

    def __init__(self, engine: Engine, how: Windows | None, chunk: int | None = None) -> None:
        """`chunk`: most ids of one run of the engine, None for what it takes.

        Raises InputError: a window longer than the attention layers were trained for, a stream for
        a model with attention.
        """
        check_context(engine, how)
        self._engine = engine
        self._chunk = chunk or engine.chunk
        self._state = engine.new_state(window=1, capacity=None if how is None else how.window)

    def read(self, run: Run) -> Iterator[tuple[Ints, F32]]:
        """Feeds the run; yields predicted ids [k] and the logits [k, V] that were to predict them,
        which are valid until the next are asked for.
        """
        if run.fresh:
            self._state.clear()
        wanted = np.flatnonzero(run.wanted) - 1  # the row that predicts an id is the one before
        last = len(run.ids) - 1 if run.carried else (wanted[-1] + 1 if len(wanted) else 0)
        for start, stop in self._pieces(int(last), wanted):
            rows = wanted[(wanted >= start) & (wanted < stop)]
            logits = self._engine.run(
                run.ids[None, start:stop], self._state,
                rows=_rows(rows - start, stop - start), commit=True,
            )  # fmt: skip
            if len(rows):
                yield run.ids[rows + 1], logits[0]

    def _pieces(self, count: int, wanted: Ints) -> Iterator[tuple[int, int]]:
        """[0, count) in chunks, one of which begins where the first row is wanted: before it no
        logits are computed but those of one row a chunk.
        """
        first = int(wanted[0]) if len(wanted) else count
        for begin, end in ((0, min(first, count)), (first, count)):
            for start in range(begin, end, self._chunk):
                yield start, min(start + self._chunk, end)


def _rows(rows: Ints, count: int) -> Rows:
    if len(rows) == count:
        return "all"
    return [int(row) for row in rows] if len(rows) else "last"


def check_context(engine: Engine, how: Windows | None) -> None:
    """Raise InputError for what the positions of attention layers do not allow."""
    longest = engine.config.max_context
    if not engine.config.has_attention:
        return
    if how is None:
        raise InputError(
            "the model has attention layers, which cannot carry a state without end",
            field="--stream",
            remedy="leave it out: windows are read then",
        )
    if longest is not None and how.window > longest:
        raise InputError(
            f"the attention layers were trained for {longest} positions, not {how.window}",
            field="--window",
            remedy=f"at most {longest}",
        )


def slices(logits: F32) -> Iterator[slice]:
    """Rows to handle at once, so that double precision takes little memory."""
    step = max(1, _VALUES // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def log_softmax(logits: F32) -> F64:
    """ln p over all V ids, padding rows included, in double precision: [k, V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def nats(logits: F32, ids: Ints) -> F64:
    """-ln p of ids [k] by logits [k, V]."""
    out = np.empty(len(ids))
    for part in slices(logits):
        rows = logits[part]
        top = rows.max(-1, keepdims=True)
        shifted = rows - top
        said = shifted[np.arange(len(rows)), ids[part]].astype(np.float64)
        out[part] = np.log(np.exp(shifted).sum(-1, dtype=np.float64)) - said
    return out


def measure(reader: Reader, runs: Iterable[Run]) -> Tally:
    """Read all runs. Raises InputError when there is nothing to predict."""
    tally = Tally()
    for run in runs:
        count_text(tally, run)
        for ids, logits in reader.read(run):
            tally.add(nats(logits, ids))
    return checked(tally)


def count_text(tally: Tally, run: Run) -> None:
    """Count what a run's text is."""
    tally.bytes += run.bytes
    tally.words += run.words
    tally.documents += run.first


def checked(tally: Tally) -> Tally:
    """The tally itself. Raises InputError when nothing was predicted."""
    if not tally.tokens:
        raise InputError(
            "has fewer than 2 tokens, so that there is nothing to predict",
            field="text",
            remedy="give a longer text",
        )
    return tally
