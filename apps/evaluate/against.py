"""Two models on the same tokens: how far the distributions of one are from the other's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from edge.apps.evaluate.figures import F64, Tally, finite
from edge.apps.evaluate.parts import Ints
from edge.apps.evaluate.score import F32, Reader, checked, count_text, log_softmax, slices
from edge.apps.evaluate.windows import Run
from edge.errors import InputError
from edge.runtime.model import Model


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
    divergences: list[F32] = field(default_factory=list)
    excess: float = 0.0
    squares: float = 0.0

    def add(self, ids: Ints, this: F32, other: F32) -> None:
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


def compare(this: Reader, other: Reader, runs: Iterable[Run]) -> Comparison:
    """Read all runs with both, a chunk each in turn. Both readers use the same chunk."""
    found = Comparison()
    for run in runs:
        count_text(found.this, run)
        count_text(found.other, run)
        for (ids, mine), (_, theirs) in zip(this.read(run), other.read(run), strict=True):
            found.add(ids, mine, theirs)
    checked(found.this)
    return found
