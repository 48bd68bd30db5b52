"""Several requests at once in one model: batched, fair, and each answered as alone."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from typing import Any

import pytest

import edge
from edge.apps.serve.jobs import Ended, Event, Job, Piece
from edge.apps.serve.requests import ParsedRequest
from edge.apps.serve.slots import make_slots
from edge.apps.serve.worker import ModelWorker
from edge.errors import StateError
from edge.runtime import memory
from edge.runtime.joined import JoinedEngine
from edge.runtime.model import Model
from edge.runtime.parameters import SamplingParams
from tests.server_process import PATIENCE

ENDLESS = {6: -100.0}  # without the token that ends the draft model's answers
HOW: list[tuple[str, dict[str, Any]]] = [
    ("x", {"temperature": 0, "max_tokens": 40}),
    ("y " * 200, {"temperature": 1.0, "seed": 1, "max_tokens": 20}),
    ("z", {"temperature": 0.7, "seed": 2, "max_tokens": 30, "repetition_penalty": 1.2}),
    ("x y", {"temperature": 0.7, "seed": 2, "max_tokens": 9, "logprobs": 1}),
]


class Client:
    """A job, and its events."""

    def __init__(
        self, worker: ModelWorker, text: str, *, endless: bool = False, **how: Any
    ) -> None:
        assert worker.served is not None
        if endless:
            how |= {"max_tokens": 1_000_000, "temperature": 0}
        params = SamplingParams(logit_bias=ENDLESS, **how)
        tokens = tuple(worker.served.model.tokenizer.encode(text))
        self.events: queue.Queue[Event] = queue.Queue()
        self.job = Job(
            ParsedRequest(False, tokens, params, False, False),
            time.monotonic() + PATIENCE, self.events.put,
        )  # fmt: skip
        worker.submit(self.job)

    def first(self) -> Event:
        return self.events.get(timeout=PATIENCE)

    def ended(self) -> Ended:
        while isinstance(event := self.first(), Piece):
            pass
        assert isinstance(event, Ended), event
        return event


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Any:
    """Return a worker with three conversations at once; the model loaded under another name has
    one.
    """
    ready, engine = threading.Event(), getattr(request, "param", "auto")

    def load(count: int) -> tuple[Model, Any]:
        model = edge.load("demo-draft", engine=engine, threads=1)
        return make_slots(model, count, capacity=None, cache_bytes=1 << 20)

    found = ModelWorker(lambda: load(3), ready.set, name="first", load_other=lambda name: load(1))
    found.start()
    assert ready.wait(PATIENCE)
    yield found
    found.stop()
    assert found.join(PATIENCE)


@pytest.mark.parametrize("worker", ["auto", "ort"], indirect=True)
def test_each_is_answered_as_alone(worker: ModelWorker) -> None:
    """Four at once for three places."""
    alone = [Client(worker, text, **how).ended().results[0] for text, how in HOW]
    clients = [Client(worker, text, **how) for text, how in HOW]
    for one, client in zip(alone, clients, strict=True):
        found = client.ended().results[0]
        assert (found.text, found.tokens, found.logprobs) == (one.text, one.tokens, one.logprobs)


def test_three_run_a_fourth_waits_and_another_model_waits_for_all(worker: ModelWorker) -> None:
    running = [Client(worker, text, endless=True) for text in "xyz"]
    for client in running:
        assert isinstance(client.first(), Piece)
    assert (worker.parallel, worker.running) == (3, 3)
    engine = worker.served.model.engine if worker.served else None
    assert isinstance(engine, JoinedEngine)
    until = time.monotonic() + PATIENCE
    while engine.name == "cpu" and engine.size < 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    waiting = Client(worker, "x", max_tokens=3, temperature=0)
    time.sleep(0.05)
    assert worker.waiting == 1 and not waiting.job.begun
    running[1].job.cancel()
    assert running[1].ended().results[0].finish_reason == "cancelled"
    assert len(waiting.ended().results[0].tokens) == 3

    async def other() -> Any:
        wanted = asyncio.ensure_future(worker.obtain("other", time.monotonic() + PATIENCE))
        await asyncio.sleep(0.05)
        assert not wanted.done(), "two run"
        for client in running:
            client.job.cancel()
        return await wanted

    assert len(asyncio.run(other()).slots.slots) == 1
    assert (worker.name, worker.parallel) == ("other", 1)
    Client(worker, "x", max_tokens=2, temperature=0).ended()


def test_a_conversation_goes_on_in_the_state_that_has_read_it(worker: ModelWorker) -> None:
    how: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    first = Client(worker, "x " * 40, **how).ended()
    Client(worker, "y " * 40, **how).ended()
    said = "x " * 40 + first.results[0].text
    again = Client(worker, said + " and", **how)
    assert again.ended().reused >= 40


def test_how_many_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = edge.load("demo-draft", threads=1)
    joins = 4 if model.engine.name == "cpu" else 1
    sizes = {"capacity": None, "cache_bytes": 0}
    assert len(make_slots(model, None, **sizes)[1]) == joins
    plan = model.engine.memory_plan(window=4)
    each = plan["state_ring"] + plan["kv_cache"] + plan["logits"] + plan["snapshot"]
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * each)
    assert len(make_slots(model, None, **sizes)[1]) == min(joins, 2)
    with pytest.raises(StateError, match=r"of memory.*--parallel"):
        make_slots(model, 4, **sizes)
