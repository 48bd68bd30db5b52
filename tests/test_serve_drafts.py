"""Drafting in the server: the same greedy answers, whatever requests came before."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

import edge
from edge.apps.cli import app
from edge.apps.serve.answers import AnswerFormat
from edge.apps.serve.jobs import Ended, Event, Job, Piece
from edge.apps.serve.requests import ParsedRequest
from edge.apps.serve.slot import Slot
from edge.apps.serve.worker import ModelWorker
from edge.errors import EngineError, InputError
from edge.runtime.parameters import SamplingParams
from edge.runtime.speculate.choose import drafting
from edge.runtime.speculate.draft import Drafter
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
    # a bandit may not use a drafter that costs as much as its target
    assert verified or tree is None


def test_a_server_that_drafts_answers_and_says_so() -> None:
    ask: dict[str, Any] = {"model": "demo-fp16", "messages": HELLO, "temperature": 0,
                           "max_tokens": 12}  # fmt: skip
    with Server(bundle="demo-fp16") as server:
        plain = server.client().chat.completions.create(**ask)
    with Server("--draft", "demo-draft", "--draft-tokens", "3", bundle="demo-fp16") as server:
        client = server.client()
        whole = client.chat.completions.create(**ask)
        chunks = list(client.chat.completions.create(stream=True, **ask))
    assert whole.choices[0].message.content == plain.choices[0].message.content != ""
    assert (plain.model_extra or {}).keys() == {"timings"}
    figures = (whole.model_extra or {})["speculation"]
    assert figures["drafter"] == "demo-draft" and figures["accept"] == "exact"
    assert not figures["lossy"] and not figures["given_up"]
    rounds, steps, accepted = (figures[n] for n in ("rounds", "plain_steps", "accepted_tokens"))
    assert rounds > 0 and figures["drafted_tokens"] <= 3 * rounds
    assert figures["acceptance_length"] == pytest.approx(1 + accepted / rounds)
    # the first token is the prompt's
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 1 + rounds + steps + accepted
    assert (chunks[-1].model_extra or {})["speculation"].keys() == figures.keys()
    assert all("speculation" not in (chunk.model_extra or {}) for chunk in chunks[:-1])


class Failing(Drafter):
    """A drafter whose model fails."""

    name, nbytes = "failing", 0

    def __init__(self, why: str) -> None:
        self._why = why

    def propose(self, *_: object) -> NoReturn:
        raise EngineError(self._why, file="a/path")


def _figures(kind: str = "chat", accept: str = "exact", fails: str = "") -> dict[str, Any]:
    """Return the second answer's draft figures; `fails`: the drafter's error, if any."""
    target = model(kind)
    drafts = drafting(target, edge.load(bundle(kind), threads=1), 3, None, None, accept)
    assert drafts is not None
    if fails:
        drafts = replace(drafts, drafter=Failing(fails))
    slot = Slot(target, capacity=None, cache_bytes=0, drafting=drafts)
    assert target.template is not None
    tokens = tuple(target.template.encode([Message("user", QUESTIONS[0])]))
    ask = ParsedRequest(True, tokens, GREEDY, stream=False, include_usage=False)
    posted: list[Event] = []
    worker = ModelWorker(lambda: (target, [slot]))
    worker.start()
    for _ in range(2):
        done = threading.Event()

        def post(event: Event, done: threading.Event = done) -> None:
            posted.append(event)
            if not isinstance(event, Piece):
                done.set()

        while worker.state == "loading":
            time.sleep(0.01)
        worker.submit(Job(ask, time.monotonic() + 60, post))
        assert done.wait(60)
    worker.stop()
    assert worker.join(60)
    ended = posted[-1]
    assert isinstance(ended, Ended)
    return AnswerFormat(ask, "it", target).whole([], ended)["speculation"]


def test_an_answer_that_lost_by_the_rule_says_so() -> None:
    found = _figures(accept="top-3")
    assert found["accept"] == "top-3" and found["lossy"] is True


def test_a_drafter_that_fails_is_told_of_in_answers_and_once_in_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = _figures(fails="logits hold NaN")
    assert found["given_up"] is True and found["acceptance_length"] is None
    assert "path" not in str(found)
    assert capsys.readouterr().err == "failing given up: a/path: logits hold NaN\n"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--accept", "top-0"], "--accept"),
        (["--accept", "top-3"], "--accept"),
        (["--draft-tokens", "2"], "--draft-tokens"),
        (["--draft", "ngram", "--draft-tree", "a"], "--draft-tree"),
        (["--draft", "ngram", "--draft-tokens", "2", "--draft-auto"], "--draft-tokens"),
    ],
)
def test_refused_before_anything_is_opened(options: list[str], field: str) -> None:
    done = CliRunner().invoke(app, ["serve", "demo", "--port", "0", *options])
    assert isinstance(done.exception, InputError)
    assert done.exception.field == field and done.exception.remedy
