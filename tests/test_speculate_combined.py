"""A look-up beside a drafting model: nothing is lost, and the model's state follows the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import edge
from edge.errors import EngineError
from edge.runtime.generate import Stepper
from edge.runtime.model import Model
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Distribution, Sampler
from edge.runtime.session import Session
from edge.runtime.speculate.decode import Speculative
from edge.runtime.speculate.draft import NOTHING, Draft, Drafter
from edge.runtime.speculate.ngram import CombinedDrafter, NgramDrafter
from edge.runtime.speculate.policy import Bandit, Outlook, Policy, Round
from edge.runtime.speculate.shape import LOOK_UP, MODEL, NO_DRAFT, Shape
from tests.markov_models import SPECIAL, VOCAB, TableContext, TableDrafter, dense, deviation, table
from tests.session_models import bundle, model, states
from tests.speculate_samples import third_tokens_are_alike

TARGET = table(1, 1.0)
FIRST = 2
# after 1, 2 came 4, 3, 0
BEFORE = (0, 1, 2, 4, 3, 0, 1)
ONLY = np.where(np.arange(VOCAB) == FIRST, 0, -np.inf).astype(np.float32)
# only three tokens, so that they repeat
FEW = {"temperature": 0, "logit_bias": {30: 60.0, 31: 60.0, 32: 60.0}}
PROMPT = "one two three one two three one two"


class ByChance(Policy):
    """Look-ups, a model's chains and trees, and steps, equally often where possible."""

    def __init__(self, shapes: Sequence[Shape], seed: int = 0) -> None:
        self._shapes = [NO_DRAFT, *shapes]
        self._rng = np.random.default_rng(seed)

    def choose(self, outlook: Outlook) -> Shape:
        shape = self._shapes[int(self._rng.integers(len(self._shapes)))]
        return shape if shape.source == MODEL or outlook.found else NO_DRAFT

    def learn(self, done: Round) -> None:
        pass


LOOK_UPS = [Shape.of_chain(1, LOOK_UP), Shape.of_chain(3, LOOK_UP)]
CHAINS = [*LOOK_UPS, Shape.of_chain(2)]


# -- output ----------------------------------------------------------------------------------------


def _pairs(sampling: dict[str, float], answers: int = 6000) -> float:
    """Return the deviation from the target of the two tokens after the first, where the preceding
    text suggests others.
    """
    sampler = Sampler(SamplingParams(**sampling, seed=3))  # type: ignore[arg-type]
    policy, rounds = ByChance([*CHAINS, Shape((2, 1))]), {LOOK_UP: 0, MODEL: 0}
    counts = np.zeros((VOCAB, VOCAB))
    for _ in range(answers):
        context = TableContext(TARGET)
        context.tokens = [*BEFORE]
        steps = Stepper(context, sampler, VOCAB, special=SPECIAL)  # type: ignore[arg-type]
        drafter = CombinedDrafter(TableDrafter(table(2, 1.0)), NgramDrafter(3))
        decoding = Speculative(steps, drafter, policy)
        tokens = decoding.tokens(ONLY)
        _, one, two = (next(tokens) for _ in range(3))
        counts[one, two] += 1
        for name, share in decoding.figures.sources.items():
            rounds[name] += share.rounds
    assert min(rounds.values()) > answers / 10
    first = dense(sampler.distribution(TARGET[FIRST], []))
    rows = np.stack([dense(sampler.distribution(TARGET[token], [])) for token in range(VOCAB)])
    return deviation(counts.ravel(), (first[:, None] * rows).ravel())


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 4, "top_p": 0.9}]
)
def test_two_tokens_are_distributed_as_the_target_says(sampling: dict[str, float]) -> None:
    assert abs(_pairs(sampling)) < 4.5


def _drawn(drafter: NgramDrafter, tokens: list[int], pending: int, shape: Shape,
           *_: object) -> Draft:  # fmt: skip
    """Planted: treat looked-up tokens as drawn uniformly from all tokens."""
    found = drafter.outlook(tokens, pending).found[: shape.depth]
    anything = Distribution(None, np.ones(VOCAB, np.float32))
    return Draft(found, (anything,) * len(found))


def test_a_planted_bug_turns_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDrafter, "propose", _drawn)
    assert abs(_pairs({"temperature": 1.0})) > 10


# -- sessions --------------------------------------------------------------------------------------


@cache
def again(kind: str) -> Model:
    """Load the same bundle a second time: a drafter that is nearly always right."""
    return edge.load(bundle(kind), threads=1)


@cache
def demo(name: str) -> Model:
    return edge.load(name, threads=1)


def _by_chance(session: Session, shapes: Sequence[Shape]) -> Session:
    assert session.drafting is not None
    session.drafting = replace(session.drafting, policy=ByChance(shapes))
    return session


@pytest.mark.parametrize("kind", ["chat", "hybrid", "base"])
def test_the_models_state_follows_while_look_ups_draft(kind: str) -> None:
    plain = model(kind).session()
    drafting = _by_chance(model(kind).session(draft=again(kind)), CHAINS)
    drafted = looked_up = 0
    for prompt in ("one two three", " and one", " one two"):
        options = FEW | {"max_tokens": 20}
        expected = plain.generate(prompt, **options).finish()
        result = drafting.generate(prompt, **options).finish()
        assert result.tokens == expected.tokens
        assert plain.tokens == drafting.tokens and plain.pending == drafting.pending
        state = states(plain)
        for name, values in states(drafting).items():
            np.testing.assert_allclose(values, state[name], rtol=1e-4, atol=1e-5)
        figures = result.speculation
        assert figures is not None and figures.problem == ""
        assert figures.drafter == f"{again(kind).path.name} and ngram"
        if (own := figures.sources.get("model")) is not None:
            # the target itself drafts: if it lagged behind, it would say something else
            assert own.accepted >= own.rounds
            drafted += own.rounds
        if (share := figures.sources.get("look-up")) is not None:
            looked_up += share.rounds
        shares = figures.sources.values()
        assert sum(share.rounds for share in shares) == figures.rounds
        assert sum(share.accepted for share in shares) == figures.accepted
        assert sum(share.drafted for share in shares) == figures.drafted
    assert drafted and looked_up


def test_look_ups_go_on_where_the_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model("chat").session().generate(PROMPT, max_tokens=40, **FEW).finish()
    session = _by_chance(model("chat").session(draft=again("chat")), CHAINS)
    assert session.drafting is not None
    drafter, calls = session.drafting.drafter, []
    assert isinstance(drafter, CombinedDrafter)

    def fails(*_: object) -> Draft:
        calls.append(1)
        raise EngineError("the logits are not finite")

    monkeypatch.setattr(drafter.model, "propose", fails)
    for answers in (1, 2):
        result = session.generate(PROMPT, max_tokens=40, **FEW).finish()
        assert result.tokens == expected.tokens
        assert len(calls) == answers, "it is asked again in the next answer"
        assert result.speculation is not None and "not finite" in result.speculation.problem
        assert [*result.speculation.sources] == ["look-up"]
        session.reset()


def test_sampled_tokens_have_the_targets_distribution() -> None:
    drafting = _by_chance(model("chat").session(draft=again("chat"), seed=4), CHAINS)
    sessions = [model("chat").session(seed=4), drafting]
    third_tokens_are_alike(sessions, [5, 9, 5, 9], 500, temperature=0.8, top_k=4)


def test_through_text_the_drafter_follows_too() -> None:
    plain = demo("demo-bytes").session()
    drafting = _by_chance(demo("demo-bytes").session(draft=demo("demo-draft")),
                          [Shape.of_chain(7, LOOK_UP), Shape.of_chain(6)])  # fmt: skip
    said = "Say it again: The dog likes the sun. The dog likes the sun."
    options = {"temperature": 0, "max_tokens": 40}
    expected, result = (one.chat(said, **options).finish() for one in (plain, drafting))
    assert result.tokens == expected.tokens
    figures = result.speculation
    assert figures is not None and figures.problem == ""
    assert all(share.rounds for share in figures.sources.values()) and len(figures.sources) == 2


def test_who_drafts_without_a_shape_and_with_one() -> None:
    target, other = model("chat"), again("chat")
    auto = target.session(draft=other).drafting
    assert auto is not None and isinstance(auto.policy, Bandit)
    assert {arm.source for arm in auto.policy.arms[1:]} == {"model", "look-up"}
    for shape in ({"draft_tokens": 3}, {"draft_tree": (2, 1)}):
        session = target.session(draft=other, **shape)
        result = session.generate(PROMPT, max_tokens=30, **FEW).finish()
        assert result.speculation is not None and [*result.speculation.sources] == ["model"]
    session = target.session(draft="ngram", draft_tokens=3)
    result = session.generate(PROMPT, max_tokens=30, **FEW).finish()
    assert result.speculation is not None and [*result.speculation.sources] == ["look-up"]


def test_long_look_ups_are_for_states_whose_longer_runs_take_little_memory() -> None:
    longest = {}
    for target in (demo("demo"), model("chat")):
        drafting = target.session(draft="ngram").drafting
        assert drafting is not None and isinstance(drafting.policy, Bandit)
        longest[target.path.name] = max(arm.depth for arm in drafting.policy.arms)
        assert drafting.window == longest[target.path.name] + 1
    # beside 4.7 MB of weights, and beside hardly any
    assert [*longest.values()] == [15, 7]


# -- a lagging model -------------------------------------------------------------------------------


class Model7(Drafter):
    """Always says 7, until it fails."""

    name, nbytes = "seven", 0
    fails = False

    def propose(self, tokens: Sequence[int], pending: int, shape: Shape, *_: object) -> Draft:
        if self.fails:
            raise EngineError("no")
        return Draft((7,), (None,)) if shape.nodes else NOTHING


def test_it_is_known_how_far_the_model_is_behind() -> None:
    own = Model7()
    drafter = CombinedDrafter(own, NgramDrafter(4))
    sampler = Sampler(SamplingParams(temperature=0))
    text = [1, 2, 3, 1, 2]

    def propose(shape: Shape) -> Draft:
        return drafter.propose(text[:-1], text[-1], shape, sampler, [])

    drafter.begin()
    assert drafter.outlook(text[:-1], text[-1]) == Outlook(2, (3, 1, 2, 3), 5)
    assert propose(Shape.of_chain(2, LOOK_UP)).tokens == (3, 1)
    text += [3, 1]
    assert drafter.outlook(text[:-1], text[-1]).behind == 7, "it has not been asked"
    assert propose(Shape.of_chain(1)).tokens == (7,)
    text += [2]
    assert drafter.outlook(text[:-1], text[-1]).behind == 1
    text += [3, 8, 9]
    assert drafter.outlook(text[:-1], text[-1]).behind == 4
    drafter.begin()  # the next answer of the same conversation
    text += [5]
    assert drafter.outlook(text[:-1], text[-1]).behind == 5
    drafter.begin()
    text[0] = 4
    assert drafter.outlook(text[:-1], text[-1]).behind == len(text), "another text"
    own.fails = True
    with pytest.raises(EngineError):
        propose(Shape.of_chain(1))
    assert drafter.goes_on
    assert drafter.outlook(text[:-1], text[-1]).behind > 1 << 30, "not to be asked in this answer"
    assert propose(Shape.of_chain(1)) == NOTHING
    text += [4, 2]
    assert drafter.outlook(text[:-1], text[-1]).found[0] == 3
    assert propose(Shape.of_chain(1, LOOK_UP)).tokens == (3,), "look-up goes on"
    own.fails = False
    drafter.begin()
    assert drafter.outlook(text[:-1], text[-1]).behind == len(text)
    assert propose(Shape.of_chain(1)).tokens == (7,)
