"""Runs of ids to feed to a model, and which of them each run predicts.

There are two ways to read a text that is longer than a model's context:

- *windows*, the usual recipe (https://huggingface.co/docs/transformers/perplexity): a window of W
  ids moves on by S. Each begins from an empty state and predicts the ids that no earlier window
  predicted, so that ids after the first window have at least W - S ids before them.
- *stream*: the whole document in one pass, carrying the state, as a recurrent model is used.

The first id of a document has nothing before it and is not predicted. With S = W, the first id of
any window is not predicted either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge.apps.evaluate.parts import Encoder, Flags, Ints, Part, first_wanted
from edge.apps.evaluate.texts import Block, read_texts
from edge.config import ModelConfig
from edge.errors import InputError
from edge.runtime.model import Model

# ids per window for models that do not declare a trained context
DEFAULT_WINDOW = 2048
Change = Callable[[Encoder, Iterable[Block]], Iterator[Part]]


@dataclass(frozen=True)
class Windows:
    """Window length and stride, in ids. Raises InputError for sizes out of range."""

    window: int
    stride: int

    def __post_init__(self) -> None:
        if self.window < 2:
            raise InputError(f"must be at least 2, not {self.window}", field="--window")
        if not 1 <= self.stride <= self.window:
            raise InputError(
                f"must be from 1 to {self.window}, the window, not {self.stride}", field="--stride"
            )


@dataclass(frozen=True)
class TextRun:
    """Ids to feed in order, continuing from the current state.

    Attributes:
        ids: int64 [n]; the last id may be predicted but is not fed.
        wanted: bool [n], true for ids predicted in this run; never the first.
        fresh: whether the state is cleared first.
        carried: whether the next run continues from this state; all ids but the last are then fed.
        first: whether a document begins here.
        bytes, words: size of the text that the wanted ids of this or of nearby runs stand for.
    """

    ids: Ints
    wanted: Flags
    fresh: bool
    carried: bool
    first: bool
    bytes: int
    words: int


def plan(parts: Iterable[Part], how: Windows | None) -> Iterator[TextRun]:
    """Yield the runs that predict every wanted id once. `how` None reads one stream per document.

    Holds one window and one part in memory at a time.
    """
    document: _Stream | _Sliding | None = None
    for part in parts:
        if document is None or part.first:
            if document is not None:
                yield from document.finish()
            document = _Stream() if how is None else _Sliding(how)
        yield from document.read(part)
    if document is not None:
        yield from document.finish()


class _Buffer:
    """Ids of a document that are still needed, with the size of their text."""

    def __init__(self) -> None:
        self.ids = np.zeros(0, np.int64)
        self.wanted = np.zeros(0, np.bool_)
        self.sizes = np.zeros(0, np.int64)
        self.begun = False
        self._bytes = self._words = 0

    def take(self, part: Part, drop: int) -> None:
        """Drop the first `drop` ids and append those of a part."""
        self.ids = np.concatenate([self.ids[drop:], part.ids])
        self.wanted = np.concatenate([self.wanted[drop:], part.wanted])
        self.sizes = np.concatenate([self.sizes[drop:], part.sizes])
        self._bytes += part.bytes
        self._words += part.words

    def run(self, begin: int, end: int, done: int, *, carried: bool) -> TextRun:
        """Return the run that predicts the wanted ids of [done, end), starting from `begin`."""
        wanted = self.wanted[begin:end].copy()
        wanted[: max(0, done - begin)] = False
        if wanted[0]:  # nothing comes before it
            wanted[0] = False
            self._bytes -= int(self.sizes[begin])
        run = TextRun(
            self.ids[begin:end],
            wanted,
            fresh=not (carried and self.begun),
            carried=carried,
            first=not self.begun,
            bytes=self._bytes,
            words=self._words,
        )
        self.begun, self._bytes, self._words = True, 0, 0
        return run


class _Stream:
    def __init__(self) -> None:
        self._buffer = _Buffer()

    def read(self, part: Part) -> Iterator[TextRun]:
        # the last id of the previous run has not been fed yet
        buffer = self._buffer
        buffer.take(part, max(0, len(buffer.ids) - 1))
        if len(buffer.ids) > 1:
            done = 1 if buffer.begun else 0
            yield buffer.run(0, len(buffer.ids), done, carried=True)

    def finish(self) -> Iterator[TextRun]:
        return iter(())


class _Sliding:
    """Sliding windows. `_start`: of the next window. `_predicted`: number of ids predicted."""

    def __init__(self, how: Windows) -> None:
        self._how = how
        self._buffer = _Buffer()
        self._start = self._predicted = 0

    def read(self, part: Part) -> Iterator[TextRun]:
        buffer, window, stride = self._buffer, self._how.window, self._how.stride
        buffer.take(part, self._start)
        self._start, self._predicted = 0, self._predicted - self._start
        while len(buffer.ids) >= self._start + window:
            end = self._start + window
            yield buffer.run(self._start, end, self._predicted, carried=False)
            self._start, self._predicted = self._start + stride, end

    def finish(self) -> Iterator[TextRun]:
        buffer, count = self._buffer, len(self._buffer.ids)
        if self._predicted < count and (buffer.begun or count > 1):
            yield buffer.run(self._start, count, self._predicted, carried=False)


# -- from files to runs ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSource:
    """Text to evaluate on, and how to read it.

    Attributes:
        paths: text files.
        how: windows, or None for one stream per document.
        limit: maximum number of predicted ids; None for no limit.
        progress: callback that receives the number of bytes read since the last call.
    """

    paths: Sequence[Path]
    how: Windows | None
    limit: int | None = None
    progress: Callable[[int], None] = lambda size: None

    def runs(self, model: Model, change: Change = Encoder.parts) -> Iterator[TextRun]:
        """Yield the runs for a model's tokenizer and template. `change` splits text into parts."""
        encoder = Encoder(model.tokenizer, model.template)
        parts = change(encoder, read_texts(self.paths, self.progress))
        if self.limit is not None:
            parts = first_wanted(parts, self.limit, model.tokenizer)
        return plan(parts, self.how)

    def describe(self) -> dict[str, object]:
        """Return the `--json` description of the text."""
        how = self.how
        return {
            "texts": [str(path) for path in self.paths],
            "method": "stream" if how is None else "windows",
            "window": None if how is None else how.window,
            "stride": None if how is None else how.stride,
        }


def reading(
    configs: Sequence[ModelConfig], window: int | None, stride: int | None, stream: bool
) -> Windows | None:
    """Choose how to read text for these models; None is a stream.

    By default a window is the shortest context that attention layers were trained for, else
    DEFAULT_WINDOW, and the stride is half a window. Raises InputError when a size is out of range
    or given together with `stream`.
    """
    if stream:
        if window is not None or stride is not None:
            raise InputError(
                "takes neither --window nor --stride", field="--stream", remedy="leave them out"
            )
        return None
    if window is None:
        known = [config.max_context for config in configs if config.max_context is not None]
        window = min(known, default=DEFAULT_WINDOW)
    return Windows(window, max(1, window // 2) if stride is None else stride)
