"""Are a peer's results right? Asked before it is timed, of every path that is timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.apps.bench.peers import RUN, Logits, Peer, Tokens

PROMPT = 32
PREFILL = 256
STEPS = 4

# Most KL divergence from fp32, nats a token, that rounding the weights (and, below 16 bits, the
# activations to 8) explains. Random layers amplify rounding far more than trained ones do, so these
# are wide: unrelated logits are 1 nat apart, lost scan states cost 0.5, those of one layer 0.14.
KL_LIMITS = {"fp32": 1e-5, "fp16": 1e-3, "w8": 0.06, "w4": 0.8, "w8a8": 0.12}


@dataclass(frozen=True)
class Agreement:
    """How some rows of logits compare with the reference's.

    Attributes:
        top1: share of rows whose largest logit is the same token.
        kl: KL(reference ‖ peer), nats a token.
        worst: largest difference of two logits.
    """

    top1: float
    kl: float
    worst: float

    def to_dict(self) -> dict[str, float]:
        return {"top1": self.top1, "kl_nats": self.kl, "max_difference": self.worst}


@dataclass(frozen=True)
class Verdict:
    """`parts`: the prompt, the run after it, the steps after that, and the long prompt."""

    parts: Mapping[str, Agreement]
    limit: float

    @property
    def right(self) -> bool:
        return all(part.kl <= self.limit for part in self.parts.values())

    @property
    def worst(self) -> Agreement:
        """The worst of each figure over the parts."""
        parts = self.parts.values()
        return Agreement(
            min(p.top1 for p in parts), max(p.kl for p in parts), max(p.worst for p in parts)
        )


@dataclass(frozen=True)
class Reference:
    """Token ids and the fp32 logits of each, for both sequences."""

    short: Tokens
    short_logits: Logits
    long: Tokens
    long_logits: Logits


def token_ids(vocab_size: int, count: int = PREFILL + RUN + STEPS) -> Tokens:
    """The same ids for everyone."""
    return np.random.default_rng(0).integers(0, vocab_size, count, dtype=np.int64)


def verdict(peer: Peer, reference: Reference) -> Verdict:
    """Run the peer over the reference's tokens, the way it will be timed, and compare."""
    cut, end = PROMPT, PROMPT + RUN
    short = reference.short
    got = {
        "prompt": peer.prefill(short[:cut], every_row=True).copy(),
        "run": peer.run(short[cut:end]).copy(),
        "steps": np.concatenate([peer.step(int(token)).copy() for token in short[end:]]),
    }
    wanted = {
        "prompt": reference.short_logits[:cut],
        "run": reference.short_logits[cut:end],
        "steps": reference.short_logits[end:],
    }
    last = peer.prefill(reference.long[:-1]).copy()
    got["prefill"] = np.concatenate([last, peer.step(int(reference.long[-1])).copy()])
    wanted["prefill"] = reference.long_logits[-2:]
    parts = {name: compare(wanted[name], got[name]) for name in wanted}
    return Verdict(parts, KL_LIMITS[peer.rounding])


def compare(wanted: Logits, got: Logits) -> Agreement:
    """Rows of logits against the reference's rows; NaN never agrees."""
    if wanted.shape != got.shape or not np.isfinite(got).all():
        return Agreement(0.0, float("inf"), float("inf"))
    p, q = _log_softmax(wanted), _log_softmax(got)
    kl = (np.exp(p) * (p - q)).sum(axis=-1).mean()
    top1 = (wanted.argmax(axis=-1) == got.argmax(axis=-1)).mean()
    return Agreement(float(top1), max(0.0, float(kl)), float(np.abs(wanted - got).max()))


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normaliser = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    result: NDArray[np.float64] = shifted - normaliser
    return result
