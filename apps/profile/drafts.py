"""Time answers with and without drafting, in turn, and measure what drafting gains and costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from edge.apps.measure.statistics import Ratio, percentile, ratio
from edge.apps.measure.stopwatch import Say, TimedEngine, in_turn, silent, timed
from edge.apps.profile.draft_costs import DraftCosts, Prices, expected_speedup
from edge.apps.profile.draft_costs import measure as measure_costs
from edge.errors import EdgeError, InputError
from edge.runtime.model import Model
from edge.runtime.speculate.decode import Share, Speculation
from edge.runtime.speculate.model_drafter import shared_ids
from edge.runtime.speculate.shape import LOOK_UP, Shape


@dataclass(frozen=True)
class DraftRequest:
    """Drafter, shape of drafts and prompts.

    Attributes:
        draft: a bundle, name of a demonstration model, or "ngram".
        tokens: length of a fixed chain, or None.
        tree: branches of a fixed tree, "ucb" for a choice of a few by UCB, or None. If `tokens` is
            None as well, a bandit chooses the shape.
        prompts: prompts to answer in every round.
        source: human-readable origin of the prompts.
        accept: acceptance rule for drafted tokens.
    """

    draft: str
    tokens: int | None
    tree: tuple[int, ...] | Literal["ucb"] | None
    prompts: tuple[str, ...]
    source: str
    accept: str = "exact"

    @property
    def fixed(self) -> bool:
        return self.tokens is not None or self.tree is not None


@dataclass(frozen=True)
class DraftRun:
    """Times of an answer after its first token, which prefill yields.

    Attributes:
        tokens: number of tokens after the first.
        seconds: seconds from the first token to the last.
        target, drafter: seconds in runs of the target and of the drafter.
        reading: part of `drafter` spent reading the prompt, or tokens looked up since its last
            draft.
        repeated: see `repeated_share`.
    """

    tokens: int
    seconds: float
    target: float
    drafter: float
    reading: float
    speculation: Speculation | None
    repeated: float = 0.0

    @property
    def overhead(self) -> float:
        """Seconds outside model runs: sampling, accepting, rewinding, text, the clock itself."""
        return self.seconds - self.target - self.drafter


@dataclass
class DraftSide:
    """Runs of every round, prompt by prompt, with or without drafting."""

    rounds: list[list[DraftRun]] = field(default_factory=list)

    @property
    def speculation(self) -> Speculation:
        """Drafting counts summed over all rounds."""
        return summed(run for runs in self.rounds for run in runs)

    @property
    def overhead_share(self) -> float:
        """Share of time spent outside model runs, the median over rounds."""
        return median(run.overhead / run.seconds for run in map(total, self.rounds))

    def rates(self) -> list[float]:
        """Return tokens per second of each round."""
        return [total(runs).tokens / total(runs).seconds for runs in self.rounds]


@dataclass(frozen=True)
class Drafted:
    """Everything that was measured about drafting.

    Attributes:
        runs_cost: whether a draft costs one drafter step per depth, as the formula's c assumes.
            False for drafters that go through text or were given up.
    """

    request: DraftRequest
    plain: DraftSide
    drafted: DraftSide
    costs: DraftCosts
    runs_cost: bool

    @property
    def speedup(self) -> float:
        """Rate with drafting ÷ without, within each round; the median over rounds."""
        pairs = zip(self.drafted.rates(), self.plain.rates(), strict=True)
        return median(ours / theirs for ours, theirs in pairs)

    @property
    def interval(self) -> Ratio:
        """Geometric mean of the same ratios, with its confidence interval."""
        return ratio(self.drafted.rates(), self.plain.rates())

    @property
    def slowest_tenth(self) -> float | None:
        """Speedup that nine of ten prompts reach, each a median over rounds.

        None if no prompt yielded a second token both ways in every round.
        """
        speedups = [*self.by_prompt()]
        return percentile(speedups, 0.1) if speedups else None

    @property
    def median_prompt(self) -> float | None:
        """Speedup that half of the prompts reach, under the same conditions."""
        speedups = [*self.by_prompt()]
        return median(speedups) if speedups else None

    def by_prompt(self) -> Iterator[float]:
        """Yield the speedup of every prompt that yields tokens both ways."""
        pairs = zip(
            zip(*self.drafted.rounds, strict=True), zip(*self.plain.rounds, strict=True),
            strict=True,
        )  # fmt: skip
        for ours, theirs in pairs:
            if all(run.seconds > 0 for run in (*ours, *theirs)):
                yield median(
                    (a.tokens / a.seconds) / (b.tokens / b.seconds)
                    for a, b in zip(ours, theirs, strict=True)
                )

    @property
    def speculation(self) -> Speculation:
        return self.drafted.speculation

    @property
    def theoretical(self) -> float | None:
        """See `expected_speedup`; None if it does not apply."""
        sums, shapes = self.speculation, self.shapes()
        if not self.runs_cost:
            return None
        tokens = sums.accepted + sums.rounds + sums.steps
        return expected_speedup(
            tokens, sums.steps, shapes, {shape: self.price(shape) for shape in shapes}
        )

    def shapes(self) -> dict[Shape, int]:
        """Return the number of rounds by shape and source."""
        return {
            Shape(branches, source): count
            for source, share in self.speculation.sources.items()
            for branches, count in share.shapes.items()
        }

    def price(self, shape: Shape) -> Prices:
        """Return the price of a round with a shape. A look-up costs only the verify run."""
        price = self.costs.prices[shape.branches]
        return Prices(0.0, price.verify) if shape.source == LOOK_UP else price


NONE = "none"
Drafter = Model | Literal["ngram"]


class Contest:
    """Sessions of one model: one without drafting, and one for each way of drafting."""

    def __init__(
        self,
        model: Model,
        ways: Mapping[str, tuple[DraftRequest, Drafter]],
        sampling: Mapping[str, Any],
    ) -> None:
        """Allocate all sessions. `sampling`: sampling options of every answer.

        Raises InputError for a drafter or shape that does not fit the model.
        """
        self._sampling = sampling
        self._prompts = next(iter(ways.values()))[0].prompts
        self._target, self._timer = timed(model)
        options: dict[str, Any] = {"seed": 0, "undo_levels": 1}
        self._sessions = {NONE: self._target.session(**options)}
        self._drafters: dict[str, TimedEngine] = {}
        for name, (request, draft) in ways.items():
            drafter: Drafter = "ngram"
            if draft != "ngram":
                drafter, self._drafters[name] = timed(draft)
            self._sessions[name] = self._target.session(
                draft=drafter, draft_tokens=request.tokens, draft_tree=request.tree,
                accept=request.accept, **options,
            )  # fmt: skip

    def answers(self, repetitions: int, warmup: int, say: Say = silent) -> dict[str, DraftSide]:
        """Answer every prompt in every way in each round, with a different way first each time.

        A bandit keeps learning from round to round, as it does in a session. Raises InputError
        if no answer has a second token, because there is nothing to time then.
        """
        sides = {name: DraftSide() for name in self._sessions}
        for number in range(-warmup, repetitions):
            warming = ", warming up" if number < 0 else f", {number + 1} of {repetitions}"
            say(f"answers with drafts and without{warming}")
            runs_by_way: dict[str, list[DraftRun]] = {name: [] for name in sides}
            for index, prompt in enumerate(self._prompts):
                for name in in_turn(list(sides), number + index):
                    runs_by_way[name].append(self._answer(prompt, name))
            for name, runs in runs_by_way.items():
                if not total(runs).seconds:
                    raise InputError(
                        "no prompt yields more than one token", field="--draft-prompts",
                        remedy="give other prompts, or -n 2 or more",
                    )  # fmt: skip
                if number >= 0:
                    sides[name].rounds.append(runs)
        return sides

    def _answer(self, prompt: str, name: str) -> DraftRun:
        session, drafter = self._sessions[name], self._drafters.get(name)
        session.reset()
        for engine in (self._timer, drafter):
            if engine is not None:
                engine.runs.clear()
        if session.model.template is None:
            generation = session.generate(prompt, **self._sampling)
        else:
            generation = session.chat(prompt, **self._sampling)
        result = generation.finish()
        stamps = result.timings.token_s
        # count the prompt's runs, which come first: its last chunk may be a single token
        chunks = math.ceil(result.prompt_tokens / self._timer.chunk)
        drafts = drafter.runs if drafter else []
        return DraftRun(
            tokens=max(0, len(stamps) - 1),
            seconds=stamps[-1] - stamps[0] if stamps else 0.0,
            target=sum(run.seconds for run in self._timer.runs[chunks:]),
            drafter=sum(run.seconds for run in drafts),
            # after accepted drafts, at most two tokens are left to read
            reading=sum(run.seconds for run in drafts if run.reading or run.tokens > 2),
            speculation=result.speculation,
            repeated=repeated_share(result.tokens),
        )


def repeated_share(tokens: Sequence[int]) -> float:
    """Return the share of 4-grams that occurred before: near 1 for text that loops."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def compare(
    model: Model, draft: Drafter, request: DraftRequest, sampling: Mapping[str, Any]
) -> Callable[[int, int, Say], Drafted]:
    """Return a function of repetitions and warm-up that measures drafting against none.

    Memory is allocated and errors are raised at once, not when it is called.
    """
    contest = Contest(model, {request.draft: (request, draft)}, sampling)

    def measure(repetitions: int, warmup: int, say: Say) -> Drafted:
        sides = contest.answers(repetitions, warmup, say)
        speculation = sides[request.draft].speculation
        say("single runs of both models")
        engine, count = None if draft == "ngram" else draft.engine, 5 * repetitions + 10
        try:
            costs = measure_costs(model.engine, engine, speculation.shapes, count)
        except EdgeError:
            if not speculation.problem:
                raise
            # the drafter was given up, and its runs fail here for the same reason
            costs = measure_costs(model.engine, None, speculation.shapes, count)
        runs_cost = steps_ahead(model, draft) and not speculation.problem
        return Drafted(request, sides[NONE], sides[request.draft], costs, runs_cost)

    return measure


def steps_ahead(model: Model, draft: Drafter) -> bool:
    """Return whether a draft costs one drafter run per depth or nothing, as the formula assumes."""
    return draft == "ngram" or shared_ids(model.tokenizer, draft.tokenizer) > 0


def total(runs: Sequence[DraftRun]) -> DraftRun:
    """Return sums over the prompts of a round."""
    return DraftRun(
        tokens=sum(run.tokens for run in runs),
        seconds=sum(run.seconds for run in runs),
        target=sum(run.target for run in runs),
        drafter=sum(run.drafter for run in runs),
        reading=sum(run.reading for run in runs),
        speculation=summed(iter(runs)),
    )


def summed(runs: Iterator[DraftRun]) -> Speculation:
    """Return drafting counts summed over runs, with the first `problem`."""
    sums = Speculation("")
    for run in runs:
        speculation = run.speculation
        if speculation is None:
            continue
        sums.drafter, sums.problem = speculation.drafter, sums.problem or speculation.problem
        sums.accept = speculation.accept
        for name in ("rounds", "drafted", "accepted", "steps", "draft_s", "verify_s"):
            setattr(sums, name, getattr(sums, name) + getattr(speculation, name))
        _add_shapes(sums.shapes, speculation.shapes)
        for source, share in speculation.sources.items():
            source_sums = sums.sources.setdefault(source, Share())
            for name in ("rounds", "drafted", "accepted"):
                setattr(source_sums, name, getattr(source_sums, name) + getattr(share, name))
            _add_shapes(source_sums.shapes, share.shapes)
    return sums


def _add_shapes(sums: dict[tuple[int, ...], int], counts: Mapping[tuple[int, ...], int]) -> None:
    for branches, count in counts.items():
        sums[branches] = sums.get(branches, 0) + count
