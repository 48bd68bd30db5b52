"""Mamba drafts for Transformers and hybrids: the target's own words, whatever is drafted."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from edge.apps.chat import app as chat
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler
from edge.runtime.session import Session
from edge.runtime.speculate.model_drafter import Vocabulary, shared_ids
from tests import session_models
from tests.markov_models import shares
from tests.speculate_samples import third_tokens_are_alike
from tests.speculation_models import bundle, model

TARGETS = ["gpt_neox", "llama", "hybrid"]
PROMPT = "the state of the model"
CONTROL = ("<|turn|>", "<|over|>")


def _sessions(target: str, tokens: int | None = 4, **options: object) -> tuple[Session, Session]:
    made = model(target)
    drafting = made.session(draft=model("mamba"), draft_tokens=tokens, seed=3, **options)
    return made.session(seed=3, **options), drafting


def _same(plain: Session, drafting: Session) -> None:
    assert plain.tokens == drafting.tokens and plain.pending == drafting.pending
    expected = plain._context.state.arrays()
    for name, values in drafting._context.state.arrays().items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_greedy_words_and_states_are_those_without_drafting(target: str) -> None:
    """Attention is cut short and Mamba goes back to a kept state; some drafts stand, some fall."""
    plain, drafting = _sessions(target)
    accepted = drafted = 0
    for prompt in (PROMPT, " is the whole of the past", " then"):
        results = [
            session.generate(prompt, temperature=0, max_tokens=11).finish()
            for session in (plain, drafting)
        ]
        assert results[0].tokens == results[1].tokens and results[0].text == results[1].text
        figures = results[1].speculation
        assert figures is not None and figures.problem == ""
        accepted, drafted = accepted + figures.accepted, drafted + figures.drafted
        _same(plain, drafting)
    assert 0 < accepted < drafted, "a drafter that is always or never right proves less"


@pytest.mark.parametrize("after", range(1, 7))
def test_an_answer_may_end_at_any_token_of_a_round(after: int) -> None:
    sessions = _sessions("hybrid")
    for session in sessions:
        session.generate(PROMPT, temperature=0, max_tokens=after).finish()
    _same(*sessions)


def test_the_context_fills_up_as_it_would_without() -> None:
    plain, drafting = _sessions("gpt_neox", 6)
    results = [
        session.generate(PROMPT, temperature=0, max_tokens=500).finish()
        for session in (plain, drafting)
    ]
    assert results[0].finish_reason == results[1].finish_reason == "context"
    assert results[0].tokens == results[1].tokens and len(plain.tokens) == 96


def test_a_drafter_of_less_context_falls_silent_when_it_is_full() -> None:
    target = model("llama")
    plain = target.session(capacity=80)
    drafting = target.session(draft=model("drafting hybrid"), draft_tokens=3, capacity=80)
    results = [
        session.generate(PROMPT, temperature=0, max_tokens=60).finish()
        for session in (plain, drafting)
    ]
    assert results[0].tokens == results[1].tokens
    figures = results[1].speculation
    assert figures is not None and figures.problem == ""
    assert figures.rounds > 5 and figures.steps > 20


def test_sampled_tokens_have_the_targets_distribution() -> None:
    third_tokens_are_alike(_sessions("gpt_neox", 2), [5, 9, 11], 500, temperature=0.9, top_k=4)


def test_one_vocabulary_in_two_files_is_the_same() -> None:
    one, other = model("gpt_neox"), model("mamba")
    assert one.tokenizer.fingerprint != other.tokenizer.fingerprint
    assert one.config.vocab_size != other.config.vocab_size
    assert shared_ids(one.tokenizer, other.tokenizer) == one.tokenizer.vocab_size
    chatty = model("llama", CONTROL)
    assert chatty.tokenizer.vocab_size == one.tokenizer.vocab_size + 2
    assert shared_ids(chatty.tokenizer, other.tokenizer) == other.tokenizer.vocab_size
    assert shared_ids(other.tokenizer, chatty.tokenizer) == other.tokenizer.vocab_size
    assert shared_ids(session_models.model("chat").tokenizer, other.tokenizer) == 0


def test_control_tokens_that_only_the_target_has() -> None:
    """Its drafter reads something else in their place, and never says them."""
    target = model("llama", CONTROL)
    turn = target.tokenizer.encode(CONTROL[0], special=True)
    prompt = [*turn, *target.tokenizer.encode(PROMPT), *turn]
    plain = target.session()
    drafting = target.session(draft=model("mamba"), draft_tokens=3)
    options = {"temperature": 0, "max_tokens": 12, "repetition_penalty": 1.1,
               "logit_bias": {turn[0]: 2.0}}  # fmt: skip
    results = [session.generate(prompt, **options).finish() for session in (plain, drafting)]
    assert results[0].tokens == results[1].tokens
    assert results[1].speculation is not None and results[1].speculation.problem == ""
    # the other way round: the target knows nothing of them
    reverse = model("mamba").session(draft=target, draft_tokens=3)
    plain = model("mamba").session()
    results = [s.generate(PROMPT, temperature=0, max_tokens=9).finish() for s in (plain, reverse)]
    assert results[0].tokens == results[1].tokens


def test_what_the_drafter_lacks_has_no_probability() -> None:
    vocabulary = Vocabulary(size=6, shared=4, stand_in=3)
    assert vocabulary.read([0, 5, 3, 4]) == [0, 3, 3, 3]
    logits = np.arange(8, dtype=np.float32)
    params = SamplingParams(temperature=1.5, top_p=0.999, repetition_penalty=1.3,
                            logit_bias={5: 50.0})  # fmt: skip
    drawn_from = Sampler(params).distribution(vocabulary.allowed(logits), [5, 2, 4])
    assert shares(drawn_from).keys() == {0, 1, 2, 3}
    assert Vocabulary(6, 6).allowed(logits).tolist() == [0, 1, 2, 3, 4, 5]


def test_chat_takes_a_mamba_bundle_for_a_transformer() -> None:
    arguments = [str(bundle("gpt_neox")), "-p", PROMPT, "--temperature", "0", "--max-tokens", "9",
                 "--threads", "1"]  # fmt: skip
    runs = [
        CliRunner().invoke(chat, [*arguments, *extra])
        for extra in ([], ["--draft", str(bundle("mamba")), "--draft-tokens", "3"])
    ]
    assert [run.exit_code for run in runs] == [0, 0], runs[1].output
    assert runs[0].stdout == runs[1].stdout
    assert "drafted" in runs[1].stderr
