"""From the paths a user gives to the runs a model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.apps.evaluate.parts import Encoder, Part, first_wanted
from edge.apps.evaluate.texts import Block, read_texts
from edge.apps.evaluate.windows import Run, Windows, plan
from edge.config import ModelConfig
from edge.errors import InputError
from edge.runtime.model import Model

# ids of a window where nothing says what a model was trained for
DEFAULT_WINDOW = 2048

Change = Callable[[Encoder, Iterable[Block]], Iterator[Part]]


@dataclass(frozen=True)
class Source:
    """Which text is read, and how.

    Attributes:
        paths: text files.
        how: windows, or None for one stream a document.
        limit: stop after so many ids that are to be predicted; None is all.
        progress: told how many more bytes of the files have been read.
    """

    paths: Sequence[Path]
    how: Windows | None
    limit: int | None = None
    progress: Callable[[int], None] = lambda size: None

    def runs(self, model: Model, change: Change = Encoder.parts) -> Iterator[Run]:
        """The runs for a model's tokenizer and template; `change` makes parts of the text."""
        encoder = Encoder(model.tokenizer, model.template)
        parts = change(encoder, read_texts(self.paths, self.progress))
        if self.limit is not None:
            parts = first_wanted(parts, self.limit, model.tokenizer)
        return plan(parts, self.how)

    def describe(self) -> dict[str, object]:
        """What `--json` says of it."""
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
    """How to read for these models: windows of the context that attention was trained for, else of
    DEFAULT_WINDOW, each moved on by half, unless told otherwise.

    Raises InputError: sizes out of range, or given together with `stream`.
    """
    if stream:
        if window is not None or stride is not None:
            raise InputError(
                "has neither window nor stride", field="--stream", remedy="leave one of them out"
            )
        return None
    if window is None:
        known = [config.max_context for config in configs if config.max_context is not None]
        window = min(known, default=DEFAULT_WINDOW)
    return Windows(window, max(1, window // 2) if stride is None else stride)
