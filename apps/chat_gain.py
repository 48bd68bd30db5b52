"""About how much quicker drafting makes a talk, from what the talk itself measures.

Its plain steps are timed; nothing is run for it. So it is an estimate: the choice of a token after
a plain step is not in it, and a talk that never takes a plain step has none. `edge profile --draft`
measures both ways in turn.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge.apps.profiling.stopwatch import TimedEngine
    from edge.runtime.generate import GenerationResult

FEWEST = 3  # plain steps that make a median
_RECENT = 200


class Gain:
    """Adds up the answers of a talk.

    Attributes:
        steps: seconds of the target's recent plain steps.
    """

    def __init__(self, engine: TimedEngine) -> None:
        """`engine`: what the target runs on, and nothing else."""
        self.steps: deque[float] = deque(maxlen=_RECENT)
        self._engine = engine
        self._seconds = 0.0
        self._tokens = 0
        self._rounds = 0
        self._accepted = 0

    def add(self, result: GenerationResult) -> float | None:
        """Take in an answer; about how many times as quick as without drafts it was."""
        runs = self._engine.runs
        self.steps.extend(run.seconds for run in runs if run.tokens == 1 and not run.reading)
        runs.clear()
        stamps = result.timings.token_s
        seconds = stamps[-1] - stamps[0] if stamps else 0.0
        tokens = max(0, len(stamps) - 1)
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        if drafted := result.speculation:
            self._rounds += drafted.rounds
            self._accepted += drafted.accepted
        return self._over(tokens, seconds)

    def _over(self, tokens: int, seconds: float) -> float | None:
        if len(self.steps) < FEWEST or seconds <= 0:
            return None
        return tokens * median(self.steps) / seconds

    def line(self) -> str:
        """Of the whole talk."""
        if not self._rounds:
            return "no draft has been verified"
        said = f"acceptance length {(self._accepted + self._rounds) / self._rounds:.2f} "
        said += f"over {self._rounds} verifying runs; "
        gain = self._over(self._tokens, self._seconds)
        if gain is None:
            return said + "too few plain steps to estimate a speed-up: edge profile measures it"
        return said + (
            f"about {gain:.2f} times as quick as without drafts, estimated from "
            f"{len(self.steps)} plain steps of this talk, {1e3 * median(self.steps):.2f} ms each"
        )
