"""Score a text with a model: read runs, and sum -ln p of the predicted ids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge.apps.evaluate.parts import Ints
from edge.apps.evaluate.windows import TextRun, Windows
from edge.apps.measure.agreement import Logits, log_softmax
from edge.errors import InputError
from edge.runtime.engine import Engine, Rows
from edge.runtime.model import Model

F64 = NDArray[np.float64]
_SLICE_VALUES = 1 << 20  # logits handled at once in double precision


@dataclass
class Tally:
    """Sums over predicted tokens. Every figure is a quotient of two of them.

    With I(D) = -ln p(D) nats of information in a text D, however it is split into units,

        bits per byte = I / (ln 2 · bytes)      perplexity per unit = exp(I / units)

    (MambaByte, arXiv 2401.13660, appendix E). exp(ln 2 · bits per byte · bytes / words) is thus
    the word-level perplexity of byte models and subword models alike.

    Attributes:
        nats: Σ -ln p.
        squares: Σ (ln p)², for the error of the mean.
        tokens: number of predicted tokens.
        bytes, words: size of the text that the predicted tokens stand for.
        documents: number of documents, each of which begins with an empty state.
    """

    nats: float = 0.0
    squares: float = 0.0
    tokens: int = 0
    bytes: int = 0
    words: int = 0
    documents: int = 0

    def add(self, nats: F64) -> None:
        """Add predictions, given -ln p of each."""
        self.nats += float(nats.sum())
        self.squares += float(np.square(nats).sum())
        self.tokens += len(nats)

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return _exp(self.nats / self.tokens)

    @property
    def perplexity_error(self) -> float:
        """One standard error of the perplexity, treating tokens as independent."""
        mean = self.nats / self.tokens
        variance = max(0.0, self.squares / self.tokens - mean * mean)
        return self.perplexity * math.sqrt(variance / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes if self.bytes else math.inf

    @property
    def byte_perplexity(self) -> float:
        return _exp(self.nats / self.bytes) if self.bytes else math.inf

    @property
    def word_perplexity(self) -> float:
        return _exp(self.nats / self.words) if self.words else math.inf

    def to_dict(self) -> dict[str, float | int | None]:
        """Return the figures for `--json`, None for those that are not finite.

        The keys `perplexity`, `bits_per_byte` and `tokens` are a stable interface.
        """
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "words": self.words,
            "nats": self.nats,
            "perplexity": finite(self.perplexity),
            "perplexity_error": finite(self.perplexity_error),
            "bits_per_byte": finite(self.bits_per_byte),
            "byte_perplexity": finite(self.byte_perplexity),
            "word_perplexity": finite(self.word_perplexity),
        }


def finite(value: float) -> float | None:
    """Return the value, or None if it is infinite or NaN, which JSON cannot express."""
    return value if math.isfinite(value) else None


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


# -- reading --------------------------------------------------------------------------------------


class RunReader:
    """Reader of runs, with one state of an engine."""

    def __init__(self, engine: Engine, how: Windows | None, chunk: int | None = None) -> None:
        """`chunk`: maximum number of ids per call of the engine; None for the engine's own.

        Raises InputError for a window longer than the attention layers were trained for, and for a
        stream if the model has attention layers.
        """
        check_context(engine, how)
        self._engine = engine
        self._chunk = chunk or engine.chunk
        self._state = engine.new_state(window=1, capacity=None if how is None else how.window)

    def read(self, run: TextRun) -> Iterator[tuple[Ints, Logits]]:
        """Feed the run. Yield predicted ids [k] and the logits [k, V] that predict them.

        The logits are valid until the next iteration.
        """
        if run.fresh:
            self._state.clear()
        wanted = np.flatnonzero(run.wanted) - 1  # the row that predicts an id is the one before
        count = len(run.ids) - 1 if run.carried else (wanted[-1] + 1 if len(wanted) else 0)
        for start, stop in self._chunks(int(count), wanted):
            rows = wanted[(wanted >= start) & (wanted < stop)]
            logits = self._engine.run(
                run.ids[None, start:stop], self._state,
                rows=_rows(rows - start, stop - start), commit=True,
            )  # fmt: skip
            if len(rows):
                yield run.ids[rows + 1], logits[0]

    def _chunks(self, count: int, wanted: Ints) -> Iterator[tuple[int, int]]:
        """Yield [0, count) in chunks, with a chunk boundary at the first wanted row.

        Chunks before it compute only one row of logits each.
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
    """Raise InputError for a stream or window that the attention layers cannot read."""
    trained = engine.config.max_context
    if not engine.config.has_attention:
        return
    if how is None:
        raise InputError(
            "the model has attention layers, which cannot carry a state without end",
            field="--stream",
            remedy="leave it out to read windows",
        )
    if trained is not None and how.window > trained:
        raise InputError(
            f"the attention layers were trained for {trained} positions, not {how.window}",
            field="--window",
            remedy=f"at most {trained}",
        )


def slices(logits: Logits) -> Iterator[slice]:
    """Yield slices of rows to process at a time, to bound the memory of double precision."""
    step = max(1, _SLICE_VALUES // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def nats(logits: Logits, ids: Ints) -> F64:
    """Return -ln p of ids [k] under logits [k, V]."""
    out = np.empty(len(ids))
    for part in slices(logits):
        rows = logits[part]
        top = rows.max(-1, keepdims=True)
        shifted = rows - top
        target = shifted[np.arange(len(rows)), ids[part]].astype(np.float64)
        out[part] = np.log(np.exp(shifted).sum(-1, dtype=np.float64)) - target
    return out


def measure(reader: RunReader, runs: Iterable[TextRun]) -> Tally:
    """Read all runs. Raises InputError when there is nothing to predict."""
    tally = Tally()
    for run in runs:
        count_text(tally, run)
        for ids, logits in reader.read(run):
            tally.add(nats(logits, ids))
    return checked(tally)


def count_text(tally: Tally, run: TextRun) -> None:
    """Add the bytes, words and documents of a run to the tally."""
    tally.bytes += run.bytes
    tally.words += run.words
    tally.documents += run.first


def checked(tally: Tally) -> Tally:
    """Return the tally. Raises InputError when nothing was predicted."""
    if not tally.tokens:
        raise InputError(
            "has fewer than 2 tokens, so there is nothing to predict",
            field="text",
            remedy="give a longer text",
        )
    return tally


# -- two models -----------------------------------------------------------------------------------


@dataclass
class Comparison:
    """Comparison of a model with another one, the reference.

    Attributes:
        this, other: sums of each model.
        agreed: number of predictions whose likeliest id is the same in both.
        divergences: KL(other‖this) of every prediction in nats, 4 bytes each.
        excess: Σ of ln p(other) - ln p(this) over the ids of the text.
        squares: Σ of the squares of the same differences.
    """

    this: Tally = field(default_factory=Tally)
    other: Tally = field(default_factory=Tally)
    agreed: int = 0
    divergences: list[Logits] = field(default_factory=list)
    excess: float = 0.0
    squares: float = 0.0

    def add(self, ids: Ints, this: Logits, other: Logits) -> None:
        """Add predictions of ids [k], given logits [k, V] of both models."""
        for part in slices(this):
            p, q = log_softmax(other[part]), log_softmax(this[part])
            divergence = (np.exp(p) * (p - q)).sum(-1)
            # a negative divergence is a rounding error
            self.divergences.append(np.maximum(divergence, 0).astype(np.float32))
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            index = (np.arange(len(p)), ids[part])
            self._add_nats(-q[index], -p[index])

    def _add_nats(self, this: F64, other: F64) -> None:
        self.this.add(this)
        self.other.add(other)
        difference = this - other
        self.excess += float(difference.sum())
        self.squares += float(np.square(difference).sum())

    @property
    def ratio(self) -> float:
        """Perplexity of this model divided by the other's."""
        return self.this.perplexity / self.other.perplexity

    @property
    def ratio_error(self) -> float:
        """One standard error of the ratio, from per-token differences, taken as independent.

        It is far smaller than the error of either perplexity, because both read the same text.
        """
        count = self.this.tokens
        mean = self.excess / count
        variance = max(0.0, self.squares / count - mean * mean)
        return self.ratio * math.sqrt(variance / count)

    def to_dict(self) -> dict[str, float | None]:
        """Return the figures for `--json`."""
        kl = np.concatenate(self.divergences)
        return {
            "kl_nats_per_token": float(kl.mean(dtype=np.float64)),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "kl_max": float(kl.max()),
            "top1_agreement": self.agreed / self.this.tokens,
            "perplexity_ratio": finite(self.ratio),
            "perplexity_ratio_error": finite(self.ratio_error),
        }


def check_same_ids(this: Model, other: Model) -> None:
    """Raise InputError unless both models encode text to the same ids."""
    ours, theirs = this.tokenizer, other.tokenizer
    if (ours.fingerprint, ours.bos, ours.add_bos) != (
        theirs.fingerprint, theirs.bos, theirs.add_bos,
    ):  # fmt: skip
        raise InputError(
            f"{other.path} has a different tokenizer from {this.path}",
            field="--against",
            remedy="compare bundles of one model; across tokenizers compare bits per byte",
        )
    if this.config.vocab_size != other.config.vocab_size:
        raise InputError(
            f"{other.path} has {other.config.vocab_size} rows of logits, {this.path} has "
            f"{this.config.vocab_size}",
            field="--against",
            remedy="export both from one checkpoint",
        )


def compare(this: RunReader, other: RunReader, runs: Iterable[TextRun]) -> Comparison:
    """Read all runs with both readers in turn, chunk by chunk. Both use the same chunk size."""
    comparison = Comparison()
    for run in runs:
        count_text(comparison.this, run)
        count_text(comparison.other, run)
        for (ids, mine), (_, theirs) in zip(this.read(run), other.read(run), strict=True):
            comparison.add(ids, mine, theirs)
    checked(comparison.this)
    return comparison
