"""Time answers to prompts of several lengths, and single steps at several context depths.

The clock and the runner are arguments, so that tests of the arithmetic take no time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edge.apps.measure.stopwatch import PAUSE, Clock, Say, in_turn


class Runner(Protocol):
    """One model with one sequence."""

    def clear(self) -> None:
        """Reset to the empty state."""

    def feed(self, tokens: Sequence[int]) -> None:
        """Consume a prompt or the next part of a prompt."""

    def step(self, token: int) -> None:
        """Consume one token."""

    def sample(self) -> int:
        """Sample the next token from the last logits."""

    def mark(self) -> Any:
        """Return a mark of the current state."""

    def restore(self, mark: Any) -> None:
        """Return to the state of a mark."""


@dataclass(frozen=True)
class Sample:
    """Times of one answer, in seconds since the request. The prompt is already tokenized.

    Attributes:
        prompt: number of tokens of the prompt.
        began: clock time of the request.
        prompt_s: time at which the prompt had been consumed.
        token_s: time at which each token had been sampled.
        sampling_s: total time spent sampling.
    """

    prompt: int
    began: float
    prompt_s: float
    token_s: tuple[float, ...]
    sampling_s: float

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.token_s[0]

    @property
    def ttlt(self) -> float:
        """Time to the last token."""
        return self.token_s[-1]

    @property
    def gaps(self) -> tuple[float, ...]:
        """Inter-token latencies, one fewer than tokens."""
        return tuple(b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, (TTLT - TTFT) / (n - 1); None for one token."""
        later = len(self.token_s) - 1
        return (self.ttlt - self.ttft) / later if later else None

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second; None if the clock did not advance."""
        return self.prompt / self.prompt_s if self.prompt_s > 0 else None

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second after the first."""
        return 1 / self.tpot if self.tpot else None

    def to_dict(self) -> dict[str, Any]:
        """Return milliseconds and tokens per second, the units of all output."""
        return {
            "ttft_ms": 1e3 * self.ttft,
            "tpot_ms": None if self.tpot is None else 1e3 * self.tpot,
            "ttlt_ms": 1e3 * self.ttlt,
            "prefill_ms": 1e3 * self.prompt_s,
            "sampling_ms": 1e3 * self.sampling_s,
            "prefill_tokens_per_s": self.prefill_rate,
            "decode_tokens_per_s": self.decode_rate,
            "itl_ms": [1e3 * gap for gap in self.gaps],
        }


@dataclass(frozen=True)
class AnswerPlan:
    """Measurements to make for every runner.

    Attributes:
        prompts: token ids of each prompt.
        generated: number of tokens of an answer.
        context: token ids of one long prompt.
        depths: lengths of the prefixes of `context` to time steps after.
        steps: number of steps timed at each depth in each repetition.
    """

    prompts: tuple[tuple[int, ...], ...]
    generated: int
    repetitions: int
    warmup: int
    context: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    steps: int = 16


def answer(runner: Runner, prompt: Sequence[int], count: int, clock: Clock) -> Sample:
    """Read a prompt and generate `count` ≥ 1 tokens. End tokens are ignored."""
    runner.clear()
    began = clock()
    runner.feed(prompt)
    ready = clock()
    prompt_s, sampling, stamps = ready - began, 0.0, []
    while True:
        token = runner.sample()
        now = clock()
        sampling += now - ready
        stamps.append(now - began)
        if len(stamps) == count:
            return Sample(len(prompt), began, prompt_s, tuple(stamps), sampling)
        runner.step(token)
        ready = clock()


def answers(
    runners: Mapping[str, Runner], plan: AnswerPlan, clock: Clock, say: Say, pause: float = PAUSE
) -> dict[str, list[list[Sample]]]:
    """Return samples by runner, prompt length and repetition.

    Runners take turns within a repetition, so that all see the same machine. A different one begins
    each time, so that none always follows the same one.
    """
    samples: dict[str, list[list[Sample]]] = {name: [[] for _ in plan.prompts] for name in runners}
    for number in range(-plan.warmup, plan.repetitions):
        warming = number < 0
        say("warming up" if warming else f"repetition {number + 1} of {plan.repetitions}")
        for index, prompt in enumerate(plan.prompts):
            for name in in_turn(list(runners), number):
                time.sleep(pause if len(runners) > 1 else 0)
                sample = answer(runners[name], prompt, plan.generated, clock)
                if not warming:
                    samples[name][index].append(sample)
    return samples


@dataclass(frozen=True)
class Depth:
    """Seconds of each single step after `context` tokens, pooled over repetitions.

    `prefill_s`: seconds to read `context` tokens, measured once.
    """

    context: int
    prefill_s: float
    step_s: tuple[float, ...]


def depths(
    runners: Mapping[str, Runner], plan: AnswerPlan, clock: Clock, say: Say, pause: float = PAUSE
) -> dict[str, list[Depth]]:
    """Time steps against context depth.

    The context is read once, with a mark at each depth. Then every repetition visits every depth
    by restoring its mark, so that a slow minute does not fall on one depth alone.
    """
    if not plan.depths:
        return {name: [] for name in runners}
    say(f"reading {max(plan.depths)} tokens of context")
    marks = {name: _mark_depths(runner, plan, clock) for name, runner in runners.items()}
    steps: dict[tuple[str, int], list[float]] = {}
    for number in range(plan.repetitions):
        say(f"steps at every depth, {number + 1} of {plan.repetitions}")
        for depth in in_turn(plan.depths, number):
            for name in in_turn(list(runners), number):
                time.sleep(pause if len(runners) > 1 else 0)
                runners[name].restore(marks[name][depth][0])
                steps.setdefault((name, depth), []).extend(_time_steps(runners[name], plan, clock))
    return {
        name: [Depth(d, marks[name][d][1], tuple(steps[name, d])) for d in plan.depths]
        for name in runners
    }


def _mark_depths(runner: Runner, plan: AnswerPlan, clock: Clock) -> dict[int, tuple[Any, float]]:
    """Return a mark at every depth, and the seconds it took to get there."""
    runner.clear()
    marks, done, spent = {}, 0, 0.0
    for depth in sorted(plan.depths):
        began = clock()
        runner.feed(plan.context[done:depth])
        spent += clock() - began
        marks[depth] = (runner.mark(), spent)
        done = depth
    return marks


def _time_steps(runner: Runner, plan: AnswerPlan, clock: Clock) -> Iterator[float]:
    """Yield seconds of each of `steps` steps with sampling, after one warm-up step."""
    token = plan.context[0]
    for number in range(plan.steps + 1):
        began = clock()
        runner.step(token)
        token = runner.sample()
        if number:
            yield clock() - began
