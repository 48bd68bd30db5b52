"""Check that drafting does not change sampling: two sessions' third tokens, over many seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.runtime.session import Session


def third_tokens_are_alike(
    sessions: Sequence[Session], prompt: str | list[int], answers: int, **options: float
) -> None:
    """Sample `answers` answers of three tokens from both sessions, and compare the last ones."""
    counts = []
    for session in sessions:
        mark = session.snapshot()
        seen: dict[int, int] = {}
        for seed in range(answers):
            session.restore(mark)
            tokens = session.generate(prompt, seed=seed, max_tokens=3, **options).finish().tokens
            if len(tokens) == 3:
                seen[tokens[2]] = seen.get(tokens[2], 0) + 1
        counts.append(seen)
    ids = sorted({*counts[0], *counts[1]})
    a, b = (np.array([seen.get(token, 0) for token in ids], float) for seen in counts)
    common = (a + b) >= 20
    a, b = a[common], b[common]
    # two samples of about equal size: compare the difference of each count with its spread
    assert len(a) >= 4 and (np.abs(a - b) / np.sqrt(a + b)).max() < 4.5
