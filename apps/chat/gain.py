"""Estimate of how much faster drafting makes a conversation, from its own timings.

Only the plain steps of the conversation are timed; nothing extra is run. Without drafts an answer
would have taken one step per token, plus the same time for everything else: sampling, text, the
terminal. A conversation without plain steps has no estimate. `edge profile --draft` measures both
ways in turn.
"""

from __future__ import annotations

from collections import deque
from statistics import mean, median
from typing import TYPE_CHECKING

from edge.runtime.speculate.shape import LOOK_UP

if TYPE_CHECKING:
    from edge.apps.measure.stopwatch import TimedEngine
    from edge.runtime.result import GenerationResult

FEWEST = 3  # plain steps that an estimate needs
_MANY = 10  # plain steps from which on one outlier hardly moves the mean
_RECENT = 200


class Gain:
    """Estimate over the answers of a conversation.

    Attributes:
        steps: seconds of the target's recent plain steps.
        chosen: whether a bandit chooses the shape of drafts.
    """

    def __init__(self, engine: TimedEngine, *, chosen: bool = True) -> None:
        """`engine`: the target's engine, which runs nothing else."""
        self.steps: deque[float] = deque(maxlen=_RECENT)
        self.chosen = chosen
        self._engine = engine
        self._seconds = 0.0
        self._rest = 0.0
        self._tokens = 0
        self._rounds = 0
        self._looked_up = 0
        self._accepted = 0

    def begin(self) -> None:
        """Start an answer; discard the runs of an earlier one that failed."""
        self._engine.runs.clear()

    def add(self, result: GenerationResult) -> float | None:
        """Count an answer; return its estimated speed-up over plain decoding."""
        runs = [run for run in self._engine.runs if not run.reading]
        self._engine.runs.clear()
        self.steps.extend(run.seconds for run in runs if run.tokens == 1)
        stamps, drafted = result.timings.token_s, result.speculation
        seconds = stamps[-1] - stamps[0] if stamps else 0.0
        tokens = max(0, len(stamps) - 1)
        rest = seconds - sum(run.seconds for run in runs)
        if drafted:
            rest -= drafted.draft_s
            self._rounds += drafted.rounds
            if look_up := drafted.sources.get(LOOK_UP):
                self._looked_up += look_up.rounds
            self._accepted += drafted.accepted
        rest = max(0.0, rest)
        self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        self._rest += rest
        return self._speed_up(tokens, seconds, rest)

    def _speed_up(self, tokens: int, seconds: float, rest: float) -> float | None:
        if len(self.steps) < FEWEST or seconds <= 0:
            return None
        return (tokens * self._step_s() + rest) / seconds

    def _step_s(self) -> float:
        """Return the seconds that a plain step takes."""
        return mean(self.steps) if len(self.steps) >= _MANY else median(self.steps)

    def line(self) -> str:
        """Describe the gain of the whole conversation in a sentence."""
        if not self._rounds:
            return "no draft has been verified yet"
        summary = f"acceptance length {(self._accepted + self._rounds) / self._rounds:.2f} "
        summary += f"over {self._rounds} verification runs"
        mixed = 0 < self._looked_up < self._rounds
        summary += f", {self._looked_up} of them by look-up; " if mixed else "; "
        gain = self._speed_up(self._tokens, self._seconds, self._rest)
        if gain is None:
            return summary + "too few plain steps to estimate a speed-up; edge profile measures it"
        return summary + (
            f"about {gain:.2f} times as fast as without drafts, estimated from {len(self.steps)} "
            f"plain steps of this conversation, {1e3 * self._step_s():.2f} ms each"
        )
