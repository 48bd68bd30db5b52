"""How likely a model found each id of a text: it reads runs, and the figures follow."""

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
_VALUES = 1 << 20  # logits handled at once in double precision


@dataclass
class Tally:
    """Sums over predicted tokens; every figure is a quotient of two of them.

    With I(D) = -ln p(D) nats of information in a text D, however it is cut into units,

        bits per byte = I / (ln 2 · bytes)      perplexity per unit = exp(I / units)

    (MambaByte, arXiv 2401.13660, appendix E), so that exp(ln 2 · bits per byte · bytes / words) is
    the word-level perplexity of a byte model and of a subword model alike.

    Attributes:
        nats: Σ -ln p. squares: Σ (ln p)², for the error of the mean.
        tokens, bytes, words: predicted, and the text they stand for.
        documents: texts that begin with an empty state.
    """

    nats: float = 0.0
    squares: float = 0.0
    tokens: int = 0
    bytes: int = 0
    words: int = 0
    documents: int = 0

    def add(self, nats: F64) -> None:
        """Count predictions, by -ln p of each."""
        self.nats += float(nats.sum())
        self.squares += float(np.square(nats).sum())
        self.tokens += len(nats)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return _exp(self.nats / self.tokens)

    @property
    def perplexity_error(self) -> float:
        """One standard error of the perplexity, tokens taken as independent."""
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
        """For `--json`; what has no finite value is None. `perplexity`, `bits_per_byte` and
        `tokens` are an interface.
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
    """The value, or None where JSON could not say it."""
    return value if math.isfinite(value) else None


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


# -- reading --------------------------------------------------------------------------------------


class RunReader:
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

    def read(self, run: TextRun) -> Iterator[tuple[Ints, Logits]]:
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


def slices(logits: Logits) -> Iterator[slice]:
    """Rows to handle at once, so that double precision takes little memory."""
    step = max(1, _VALUES // logits.shape[1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def nats(logits: Logits, ids: Ints) -> F64:
    """-ln p of ids [k] by logits [k, V]."""
    out = np.empty(len(ids))
    for part in slices(logits):
        rows = logits[part]
        top = rows.max(-1, keepdims=True)
        shifted = rows - top
        said = shifted[np.arange(len(rows)), ids[part]].astype(np.float64)
        out[part] = np.log(np.exp(shifted).sum(-1, dtype=np.float64)) - said
    return out


def measure(reader: RunReader, runs: Iterable[TextRun]) -> Tally:
    """Read all runs. Raises InputError when there is nothing to predict."""
    found = Tally()
    for run in runs:
        count_text(found, run)
        for ids, logits in reader.read(run):
            found.add(nats(logits, ids))
    return checked(found)


def count_text(tally: Tally, run: TextRun) -> None:
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


# -- two models -----------------------------------------------------------------------------------


@dataclass
class Comparison:
    """This model beside another one, which is the truth.

    Attributes:
        this, other: each model's own sums.
        agreed: predictions at which both think the same id likeliest.
        divergences: KL(other‖this) of every prediction, nats; 4 bytes each.
        excess, squares: Σ and Σ² of ln p(other) - ln p(this) of the ids that came.
    """

    this: Tally = field(default_factory=Tally)
    other: Tally = field(default_factory=Tally)
    agreed: int = 0
    divergences: list[Logits] = field(default_factory=list)
    excess: float = 0.0
    squares: float = 0.0

    def add(self, ids: Ints, this: Logits, other: Logits) -> None:
        """Count predictions of ids [k] by logits [k, V] of both."""
        for part in slices(this):
            p, q = log_softmax(other[part]), log_softmax(this[part])
            divergence = (np.exp(p) * (p - q)).sum(-1)
            # exact arithmetic has no negative ones
            self.divergences.append(np.maximum(divergence, 0).astype(np.float32))
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            at = (np.arange(len(p)), ids[part])
            self._add_nats(-q[at], -p[at])

    def _add_nats(self, this: F64, other: F64) -> None:
        self.this.add(this)
        self.other.add(other)
        difference = this - other
        self.excess += float(difference.sum())
        self.squares += float(np.square(difference).sum())

    @property
    def ratio(self) -> float:
        """Perplexity of this model over the other's."""
        return self.this.perplexity / self.other.perplexity

    @property
    def ratio_error(self) -> float:
        """One standard error of the ratio, from the differences token by token: far smaller than
        either perplexity's own, because both read the same text. Tokens taken as independent.
        """
        count = self.this.tokens
        mean = self.excess / count
        variance = max(0.0, self.squares / count - mean * mean)
        return self.ratio * math.sqrt(variance / count)

    def to_dict(self) -> dict[str, float | None]:
        """For `--json`."""
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
    """Raise InputError unless the same text has the same ids in both models."""
    ours, theirs = this.tokenizer, other.tokenizer
    if (ours.fingerprint, ours.bos, ours.add_bos) != (
        theirs.fingerprint, theirs.bos, theirs.add_bos,
    ):  # fmt: skip
        raise InputError(
            f"{other.path} has another tokenizer than {this.path}",
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
    """Read all runs with both, a chunk each in turn. Both readers use the same chunk."""
    found = Comparison()
    for run in runs:
        count_text(found.this, run)
        count_text(found.other, run)
        for (ids, mine), (_, theirs) in zip(this.read(run), other.read(run), strict=True):
            found.add(ids, mine, theirs)
    checked(found.this)
    return found
