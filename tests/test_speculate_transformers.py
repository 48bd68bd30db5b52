"""Mamba drafts for Transformers and hybrids: the target's own words, whatever is drafted."""

from __future__ import annotations

import numpy as np
from typer.testing import CliRunner

from edge.apps.chat import app as chat
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.model_drafter import Vocabulary, shared_ids
from tests import session_models
from tests.markov_models import shares
from tests.speculation_models import bundle, model

PROMPT = "the state of the model"
CONTROL = ("<|turn|>", "<|over|>")


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
    """Its drafter reads other tokens in their place, and never proposes them."""
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
    # the reverse: the target does not know them
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
