"""Compare logits with a reference's, and compute logits by every kind of run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge.runtime.engine import Engine

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Agreement:
    """Comparison of rows of logits with the reference's.

    Attributes:
        top1: share of rows whose largest logit is at the same token.
        kl_nats: mean of KL(reference ‖ these) in nats per token.
        max_difference: largest absolute difference of two logits.
    """

    top1: float
    kl_nats: float
    max_difference: float


def agreement(wanted: Logits, got: Logits) -> Agreement:
    """Compare rows of logits with the reference's. Logits that are not finite never agree."""
    if wanted.shape != got.shape or not np.isfinite(got).all():
        return Agreement(0.0, float("inf"), float("inf"))
    p, q = log_softmax(wanted), log_softmax(got)
    kl = (np.exp(p) * (p - q)).sum(axis=-1).mean()
    top1 = (wanted.argmax(axis=-1) == got.argmax(axis=-1)).mean()
    return Agreement(float(top1), max(0.0, float(kl)), float(np.abs(wanted - got).max()))


def run_through(engine: Engine, tokens: NDArray[np.int64], prompt: int, run: int) -> Logits:
    """Return logits [T, V] after each of tokens [1, T], by runs of all kinds.

    The first `prompt` tokens are prefilled. The next `run` tokens are read at once, after others
    that were rewound. The rest are steps. Raises what running raises.
    """
    state, count = engine.new_state(window=8, capacity=tokens.shape[1]), tokens.shape[1]
    logits = [engine.run(tokens[:, :prompt], state, rows="all", commit=True)[0].copy()]
    batch = tokens[:, prompt : prompt + run]
    engine.run(batch * 0, state)
    state.rewind(run)
    logits.append(engine.run(batch, state, rows="all")[0].copy())
    for position in range(prompt + run, count):
        logits.append(engine.run(tokens[:, position : position + 1], state)[0].copy())
    return np.concatenate(logits)


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Return ln p [k, V] of each row in double precision, over all ids, padding included."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
