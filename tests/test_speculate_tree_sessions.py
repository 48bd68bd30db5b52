"""Trees in sessions: words and state are those without drafting, wherever an answer ends."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import edge
from edge.errors import EngineError, InputError, StateError
from edge.runtime.cuda.state import DeviceState
from edge.runtime.model import Model
from edge.runtime.session import Session
from edge.runtime.speculate.choose import ARMS
from edge.runtime.speculate.policy import Bandit
from edge.runtime.speculate.shape import NO_DRAFT
from tests import session_models
from tests.speculate_samples import third_tokens_are_alike
from tests.speculation_models import check_same, model

TREE = (2, 2, 1)
CHAIN = {"draft_tree": None, "draft_tokens": 4}
PROMPT = "the state of the model"
PENALIZED = {"repetition_penalty": 1.3, "repetition_window": 8}


@cache
def again(kind: str) -> Model:
    """Load the same bundle a second time: a drafter that is nearly always right."""
    return edge.load(session_models.bundle(kind), threads=1)


def _sessions(target: str, drafter: str = "mamba", **options: object) -> tuple[Session, Session]:
    options = {"draft_tree": TREE, "seed": 3} | options
    drafting = model(target).session(draft=model(drafter), **options)
    plain = {name: value for name, value in options.items() if not name.startswith("draft_")}
    return model(target).session(**plain), drafting


def _mamba2() -> tuple[Session, Session]:
    target = session_models.model("chat")
    return target.session(seed=3), target.session(draft=again("chat"), draft_tree=TREE, seed=3)


def test_trees_that_ucb_chooses_change_no_word() -> None:
    plain, drafting = _sessions("mamba", draft_tree="ucb")
    wanted = plain.generate(PROMPT, max_tokens=24, temperature=0).finish()
    found = drafting.generate(PROMPT, max_tokens=24, temperature=0).finish()
    assert found.tokens == wanted.tokens
    assert found.speculation is not None
    assert set(found.speculation.shapes) >= {arm.branches for arm in ARMS}
    with pytest.raises(InputError, match="'best' is not a tree"):
        _sessions("mamba", draft_tree="best")


@pytest.mark.parametrize(
    ("draft", "sampling"), [({}, {}), ({}, PENALIZED), (CHAIN, {})],
    ids=["tree", "tree penalized", "chain"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("target", "drafter"),
    [("mamba", "llama"), ("gpt_neox", "mamba"), ("llama", "mamba"), ("hybrid", "mamba"),
     ("hybrid", "gpt_neox"), ("llama", "hybrid")],
)  # fmt: skip
def test_greedy_words_and_states_are_those_without_drafting(
    target: str, drafter: str, draft: dict[str, object], sampling: dict[str, float]
) -> None:
    """KV caches are truncated and Mamba returns to a kept state; some drafts are accepted, some
    rejected.
    """
    plain, drafting = _sessions(target, drafter, **draft)
    accepted = drafted = 0
    for prompt in (PROMPT, " is the whole of the past", " then"):
        results = [
            session.generate(prompt, temperature=0, max_tokens=11, **sampling).finish()
            for session in (plain, drafting)
        ]
        assert results[0].tokens == results[1].tokens and results[0].text == results[1].text
        figures = results[1].speculation
        assert figures is not None and figures.problem == ""
        accepted, drafted = accepted + figures.accepted, drafted + figures.drafted
        check_same(plain, drafting)
    assert 0 < accepted < drafted


def test_mamba2_and_a_drafter_that_is_always_right() -> None:
    plain, drafting = _mamba2()
    for text in ("one two three", "and then"):
        options = {"temperature": 0, "max_tokens": 13}
        results = [session.chat(text, **options).finish() for session in (plain, drafting)]
        assert results[0].tokens == results[1].tokens
        check_same(plain, drafting)
        figures = results[1].speculation
        assert figures is not None and figures.acceptance_length is not None
        assert figures.acceptance_length > 3


def test_second_children_stand_where_first_ones_do_not() -> None:
    """A wide tree gains more per round than its chain of first children."""
    taken = []
    for tree in ((1, 1), (4, 2)):
        _, drafting = _sessions("gpt_neox", draft_tree=tree)
        result = drafting.generate(PROMPT, temperature=0, max_tokens=40).finish()
        taken.append(result.speculation.acceptance_length)
    assert taken[1] > taken[0] + 0.1


@pytest.mark.parametrize(
    ("target", "draft"), [("mamba", {}), ("hybrid", {}), ("hybrid", CHAIN)],
    ids=["mamba", "hybrid", "hybrid chain"],
)  # fmt: skip
@pytest.mark.parametrize("length", range(1, 9))
def test_an_answer_may_end_at_any_token_of_a_path(
    target: str, draft: dict[str, object], length: int
) -> None:
    sessions = _sessions(target, "mamba", **draft)
    for session in sessions:
        session.generate(PROMPT, temperature=0, max_tokens=length).finish()
        session.generate(" more", temperature=0, max_tokens=2).finish()
    check_same(*sessions)


@pytest.mark.parametrize("cancelled", [False, True], ids=["closed", "cancelled"])
@pytest.mark.parametrize("after", range(1, 6))
def test_ending_it_in_the_middle_of_a_path(after: int, cancelled: bool) -> None:
    sessions, made = _sessions("hybrid"), []
    for session in sessions:
        generation = session.generate(PROMPT, temperature=0, max_tokens=32)
        for _ in range(after):
            next(generation)
        if cancelled:
            generation.cancel()
            generation.finish()
        generation.close()
        assert generation.result.finish_reason == "cancelled"
        made.append(generation.result.tokens)
    assert made[0] == made[1] and len(made[0]) < 16
    check_same(*sessions)


def test_stop_strings_end_inside_a_path() -> None:
    plain, drafting = _sessions("mamba")
    text = _sessions("mamba")[0].generate(PROMPT, temperature=0, max_tokens=24).finish().text
    stop = text[5:8]
    for session in (plain, drafting):
        result = session.generate(PROMPT, temperature=0, max_tokens=24, stop=(stop,)).finish()
        assert result.text == text[: text.index(stop)]
    check_same(plain, drafting)


def test_end_tokens_end_inside_a_path() -> None:
    """A drafter may propose the end token: nothing after it is output."""
    plain, drafting = _mamba2()
    bias = {session_models.END: 3.0}
    for text in ("one two", "three", "four five"):
        results = [
            session.chat(text, temperature=0, max_tokens=20, logit_bias=bias).finish()
            for session in (plain, drafting)
        ]
        assert results[0].tokens == results[1].tokens
        assert results[0].finish_reason == results[1].finish_reason
        check_same(plain, drafting)
    assert results[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("drafter", "draft"),
    [("mamba", {"draft_tree": (2, 2, 2)}), ("llama", {"draft_tree": (2, 2, 2)}),
     ("mamba", CHAIN | {"draft_tokens": 6})],
)  # fmt: skip
def test_the_context_fills_up_as_it_would_without(drafter: str, draft: dict[str, object]) -> None:
    plain, drafting = _sessions("gpt_neox", drafter, **draft)
    results = [
        session.generate(PROMPT, temperature=0, max_tokens=500).finish()
        for session in (plain, drafting)
    ]
    assert results[0].finish_reason == results[1].finish_reason == "context"
    assert results[0].tokens == results[1].tokens and len(plain.tokens) == 96


@pytest.mark.parametrize("draft", [{}, CHAIN], ids=["tree", "chain"])
def test_a_drafter_of_less_context_falls_silent_when_it_is_full(draft: dict[str, object]) -> None:
    plain, drafting = _sessions("llama", "drafting hybrid", capacity=80, **draft)
    results = [
        session.generate(PROMPT, temperature=0, max_tokens=60).finish()
        for session in (plain, drafting)
    ]
    assert results[0].tokens == results[1].tokens
    figures = results[1].speculation
    assert figures is not None and figures.problem == ""
    assert figures.rounds > 5 and figures.steps > 20


def test_sampled_tokens_have_the_targets_distribution() -> None:
    sessions = _sessions("gpt_neox", draft_tree=(3, 1))
    third_tokens_are_alike(sessions, [5, 9, 11], 300, temperature=0.9, top_k=3)


@pytest.mark.parametrize("target", ["mamba", "hybrid"])
def test_a_walk_over_what_a_session_can_do(target: str, tmp_path: Path) -> None:
    """Answers that end anywhere, undone, regenerated, saved and resumed: always the same."""
    sessions = _sessions(target, capacity=64)
    marks = [session.snapshot() for session in sessions]
    rng = np.random.default_rng(6)
    verbs = ["generate", "generate", "close", "undo", "regenerate", "mark", "restore", "save",
             "load"]  # fmt: skip
    saved = False
    for step in range(30):
        verb, count = str(rng.choice(verbs)), int(rng.integers(1, 10))
        prompt = [int(token) for token in rng.integers(10, 200, 3)]
        if len(sessions[0].tokens) > 40 or (verb == "load" and not saved):
            verb = "restore"
        outcomes = []
        for at, session in enumerate(sessions):
            options = {"temperature": 0, "max_tokens": count}
            made: object = None
            if verb == "generate":
                made = session.generate(prompt, **options).finish().tokens
            elif verb == "close":
                generation = session.generate(prompt, **options)
                made = next(generation, None)
                generation.close()
            elif verb == "undo" and session.undo_levels:
                session.undo()
            elif verb == "regenerate":
                with suppress(StateError):  # there was no answer
                    made = session.regenerate(**options).finish().tokens
            elif verb == "mark":
                marks[at] = session.snapshot()
            elif verb == "restore":
                session.restore(marks[at])
            elif verb == "save":
                session.save(tmp_path / str(at))
                saved = True
            elif verb == "load":
                session.load(tmp_path / str(at))
            outcomes.append(made)
        assert outcomes[0] == outcomes[1], (step, verb)
        check_same(*sessions)


def test_a_failure_in_the_middle_of_a_tree_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, drafting = _sessions("hybrid")
    for session in (plain, drafting):
        session.generate(PROMPT, temperature=0, max_tokens=5).finish()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("edge.runtime.speculate.accept.agree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafting.generate(" more", temperature=0, max_tokens=9).finish()
    check_same(plain, drafting)
    for session in (plain, drafting):
        session.generate(" more", temperature=0, max_tokens=9).finish()
    check_same(plain, drafting)


def test_a_drafter_that_says_nan_is_dropped_and_tried_again() -> None:
    plain, drafting = _sessions("llama")
    context = drafting.drafting.drafter.context
    for turn in range(3):
        if turn == 1:
            state = context.state
            if isinstance(state, DeviceState):
                state.recurrent.data.view(np.float32)[:] = np.nan
            else:
                for ring in state.rings.values():
                    ring[:] = np.nan
        results = [
            session.generate(PROMPT, temperature=0, max_tokens=9).finish()
            for session in (plain, drafting)
        ]
        assert results[0].tokens == results[1].tokens
        assert ("not finite" in results[1].speculation.problem) is (turn == 1)
    check_same(plain, drafting)


def test_memory_is_taken_with_the_session_and_counted() -> None:
    target, drafter = model("gpt_neox"), model("mamba")
    drafting = target.session(draft=drafter, draft_tree=(3, 2, 1, 1)).drafting
    one = drafter.engine.new_state(window=6).nbytes
    batches = [drafter.engine.new_state(batch=size, window=1).nbytes for size in (3, 6)]
    assert drafting.drafter.nbytes == one + sum(batches)
    assert drafting.window == 1 + 3 + 6 + 6 + 6
    assert target.session(draft=drafter, draft_tokens=4).drafting.drafter.nbytes == one


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft_tree": ()}, "draft_tree"),
        ({"draft_tree": (2, 0)}, "at least 1"),
        ({"draft_tree": (2, -1)}, "at least 1"),
        ({"draft_tree": (2, 1.5)}, "at least 1"),
        ({"draft_tree": (2,) * 8}, "at most 255"),
        ({"draft_tree": (256,)}, "at most 255"),
        ({"draft_tree": (1,) * 65}, "64 deep"),
        ({"draft_tree": (9,) * 400}, "at most 255"),
        ({"draft_tree": (2, 1), "draft_tokens": 3}, "draft_tokens"),
    ],
)
def test_refusals(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError) as refused:
        model("llama").session(draft=model("mamba"), **options)
    assert says in str(refused.value)


def test_trees_of_those_who_say_one_thing_only() -> None:
    for draft in ("ngram", session_models.model("chat")):
        with pytest.raises(InputError, match="chains"):
            model("llama").session(draft=draft, draft_tree=(2, 1))
        # without a second child it is a chain
        if draft == "ngram":
            model("llama").session(draft=draft, draft_tree=(1, 1))


def test_what_the_bandit_has_learned_stays_with_the_session() -> None:
    _, drafting = _sessions("gpt_neox", draft_tree=None)
    policy = drafting.drafting.policy
    assert isinstance(policy, Bandit)
    trees = [arm for arm in policy.arms if not arm.chain]
    assert policy.arms[0] is NO_DRAFT and trees
    pulls = [0]
    for _ in range(3):
        drafting.generate(PROMPT, temperature=0, max_tokens=20).finish()
        assert drafting.drafting.policy is policy
        pulls.append(sum(policy.pulls.values()))
        drafting.undo()
    assert pulls == sorted(set(pulls))
    # the first answer takes a step, to learn its cost; later ones know it
    assert policy.experience.costs.step.count > 0
    attention = model("gpt_neox").session(draft=model("llama")).drafting.policy
    assert all(arm.chain for arm in attention.arms)


def test_spreading_a_state() -> None:
    engine = model("hybrid").engine
    rng = np.random.default_rng(1)
    one, two, six = (engine.new_state(batch=b, window=2, capacity=32) for b in (1, 2, 6))
    engine.run(rng.integers(0, 256, (1, 5)), one, commit=True)
    one.spread(two)
    for name, values in two.arrays().items():
        np.testing.assert_array_equal(values, np.repeat(one.arrays()[name], 2, 0))
    engine.run(rng.integers(0, 256, (2, 1)), two)
    two.spread(six)
    assert six.position == two.position == 6 and six.reach == 0 and one.position == 5
    for name, values in six.arrays().items():
        np.testing.assert_array_equal(values, np.repeat(two.arrays()[name], 3, 0))
    other = engine.new_state(batch=4, window=2, capacity=32)
    small = engine.new_state(batch=2, window=2, capacity=3)
    for source, target, says in (
        (two, one, "over 1"),
        (six, other, "over 4"),
        (one, small, "room for 3"),
        (one, model("llama").engine.new_state(batch=2), "different models"),
    ):
        with pytest.raises(edge.errors.StateError, match=says):
            source.spread(target)
    with pytest.raises(EngineError, match="in use"):
        one.spread(one)
