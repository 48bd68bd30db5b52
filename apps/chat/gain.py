"""About how much quicker drafting makes a talk, from what the talk itself measures.

Its plain steps are timed; nothing is run for it. Without drafts an answer would have taken as many
steps as it has tokens, and the rest of its time as it did: choosing tokens, text, the terminal. So
it is an estimate, and a talk that never takes a plain step has none. `edge profile --draft`
measures both ways in turn.
"""

from __future__ import annotations

from collections import deque
from statistics import mean, median
from typing import TYPE_CHECKING

from edge.runtime.speculate.shape import LOOK_UP

if TYPE_CHECKING:
    from edge.apps.measure.stopwatch import TimedEngine
    from edge.runtime.result import GenerationResult

FEWEST = 3  # plain steps that say anything
_MANY = 10  # of which one that was disturbed moves the mean little
_RECENT = 200


class Gain:
    """Adds up the answers of a talk.

    Attributes:
        steps: seconds of the target's recent plain steps.
        chosen: whether the shape of drafts is found by trying.
    """

    def __init__(self, engine: TimedEngine, *, chosen: bool = True) -> None:
        """`engine`: what the target runs on, and nothing else."""
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
        """An answer begins: what an earlier one that failed has run is none of it."""
        self._engine.runs.clear()

    def add(self, result: GenerationResult) -> float | None:
        """Take in an answer; about how many times as quick as without drafts it was."""
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
        return self._over(tokens, seconds, rest)

    def _over(self, tokens: int, seconds: float, rest: float) -> float | None:
        if len(self.steps) < FEWEST or seconds <= 0:
            return None
        return (tokens * self._step() + rest) / seconds

    def _step(self) -> float:
        """Seconds of a plain step."""
        return mean(self.steps) if len(self.steps) >= _MANY else median(self.steps)

    def line(self) -> str:
        """Of the whole talk."""
        if not self._rounds:
            return "no draft has been verified"
        said = f"acceptance length {(self._accepted + self._rounds) / self._rounds:.2f} "
        said += f"over {self._rounds} verifying runs"
        both = 0 < self._looked_up < self._rounds
        said += f", {self._looked_up} of them of look-ups; " if both else "; "
        gain = self._over(self._tokens, self._seconds, self._rest)
        if gain is None:
            return said + "too few plain steps to estimate a speed-up: edge profile measures it"
        return said + (
            f"about {gain:.2f} times as quick as without drafts, estimated from "
            f"{len(self.steps)} plain steps of this talk, {1e3 * self._step():.2f} ms each"
        )
