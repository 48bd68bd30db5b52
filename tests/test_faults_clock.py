"""A wall clock that jumps (row 54 of the fault table) does not affect deadlines and timings."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.session_models import model

ROOT = Path(__file__).parent.parent
YEARS = 10 * 365.25 * 24 * 3600
# uses of the time of day that nothing waits for: dates of answers and of the log of requests, a
# template's date, reports, the lists of saved chats and of models
TELLING = {
    "apps/serve/answers.py": {"time.time"},
    "apps/serve/app.py": {"time.time", "datetime.now"},
    "apps/serve/ollama.py": {"datetime.now"},
    "apps/serve/response_format.py": {"time.time"},
    "edge/text/jinja_values.py": {"datetime.now"},
    "apps/measure/machine.py": {"datetime.now"},
    "apps/chat/files.py": {"time.localtime"},
    "apps/models/listing.py": {"time.time"},
}
WALL = {"time", "time_ns", "localtime", "gmtime", "ctime", "now", "utcnow", "today"}
MODULES = re.compile(r"\b(?:time|datetime|date)\b")  # a file without these words needs no parsing


def wall_clocks(file: Path) -> Iterator[str]:
    """Return the calls that read the time of day, as module.name; also `clock()`s under other
    names.
    """
    text = file.read_text()
    if not MODULES.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in WALL:
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else None
            owner = node.value.id if isinstance(node.value, ast.Name) else owner
            if owner and MODULES.fullmatch(owner):
                yield f"{owner}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            yield from (f"time.{name.name}" for name in node.names if name.name in WALL)


def test_row_54_only_what_tells_the_time_asks_the_wall_clock() -> None:
    found = {}
    for part in ("apps", "edge", "runtime", "export", "plugins"):
        folder = ROOT / part
        assert folder.is_dir()
        for file in sorted(folder.rglob("*.py")):
            if used := set(wall_clocks(file)):
                found[file.relative_to(ROOT).as_posix()] = used
    assert found == TELLING


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A wall clock that is off by ten years, alternately forward and back."""
    real = time.time
    asked: list[float] = []

    def jumps() -> float:
        asked.append(0.0)
        return real() + (YEARS if len(asked) % 2 else -YEARS)

    monkeypatch.setattr(time, "time", jumps)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumps() * 1e9))
    assert abs(time.time() - time.time()) > YEARS
    return asked


def test_row_54_answers_deadlines_and_timings(jumping: list[float]) -> None:
    asked, began = len(jumping), time.monotonic()
    session = model("bytes").session(draft="ngram")
    result = session.generate("one", deadline_s=3600.0, temperature=0, max_tokens=50).finish()
    spent = time.monotonic() - began
    assert result.finish_reason == "length"
    times = result.timings
    assert 0 < times.prompt_s <= times.token_s[0] <= times.token_s[-1] <= times.total_s <= spent
    assert list(times.token_s) == sorted(times.token_s)
    late = session.generate("two", deadline_s=1e-9, max_tokens=1 << 31).finish()
    assert late.finish_reason == "deadline"
    assert len(jumping) == asked, "somebody looked at the clock"


def test_row_54_a_server_keeps_its_deadlines(jumping: list[float]) -> None:
    from edge.apps.serve.jobs import Ended, Job
    from tests.server_process import PATIENCE
    from tests.test_serve_worker import Events, ask, model_of, new_worker

    worker, events = new_worker(), Events()
    model = model_of(worker)
    for _ in range(2):
        worker.submit(Job(ask(model, "x", 5), time.monotonic() + PATIENCE, events.append))
        ended = events.last()
        assert isinstance(ended, Ended) and len(ended.results[0].tokens) == 5
    worker.stop()
    assert worker.join(PATIENCE)
