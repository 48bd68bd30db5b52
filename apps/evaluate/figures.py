"""What was counted, and the figures that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


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
