"""Drafting in the server: the same greedy answers, whatever was asked before."""

from __future__ import annotations

import pytest

import edge
from edge.apps.server.slot import Slot
from edge.runtime.sampling import SamplingParams
from edge.runtime.speculate.choose import drafting
from edge.text.template import Message
from tests.server_process import HELLO, Server
from tests.session_models import bundle, model

GREEDY = SamplingParams(temperature=0, max_tokens=14)
QUESTIONS = ("one two three one two three", "one two", "three one two three one")


@pytest.mark.parametrize("kind", ["chat", "hybrid"])
@pytest.mark.parametrize("tree", [None, (2, 1)], ids=["bandit", "tree"])
def test_answers_are_those_without_drafts(kind: str, tree: tuple[int, ...] | None) -> None:
    target = model(kind)
    drafts = drafting(target, edge.load(bundle(kind), threads=1), None, tree, None)
    plain = Slot(target, capacity=None, cache_bytes=1 << 20)
    drafted = Slot(target, capacity=None, cache_bytes=1 << 20, drafting=drafts)
    template = target.template
    assert template is not None
    verified = 0
    for question in (*QUESTIONS, *QUESTIONS):
        tokens = template.encode([Message("user", question)])
        wanted = plain.begin(tokens, GREEDY, continued=False).finish()
        found = drafted.begin(tokens, GREEDY, continued=False).finish()
        assert found.tokens == wanted.tokens
        assert found.speculation is not None and found.speculation.problem == ""
        verified += found.speculation.rounds
    assert verified


def test_a_server_that_drafts_answers() -> None:
    wanted = []
    for options in ([], ["--draft", "demo-draft", "--draft-tokens", "3"]):
        with Server(*options, bundle="demo-fp16") as server:
            found = server.client().chat.completions.create(
                model="demo-fp16", messages=HELLO, temperature=0, max_tokens=12
            )
            wanted.append(found.choices[0].message.content)
    assert wanted[0] == wanted[1] != ""
