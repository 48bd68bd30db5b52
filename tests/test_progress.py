"""Loading: progress reports to callers, for loading and for prompts, and the progress bar."""

from __future__ import annotations

import io
import itertools
import re
import time
from pathlib import Path

import pytest

import edge
from edge.apps import progress
from edge.apps.models import download
from tests.hub_server import COMMIT, FakeHub, serving
from tests.session_models import bundle, model


@pytest.mark.parametrize("engine", ["cpu", "ort"])
def test_loading_tells_of_every_byte(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no file is known to be unchanged
    told: list[tuple[str, int, int]] = []
    edge.load(bundle("chat"), engine=engine, on_progress=lambda *now: told.append(now))
    size = (bundle("chat") / "weights.bin").stat().st_size
    assert ("checking", size, size) in told
    assert (("loading", size, size) in told) == (engine == "cpu")
    assert all(0 < done <= total for _, done, total in told)


def test_what_the_callback_raises_ends_the_loading() -> None:
    def stop(*_: object) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        edge.load(bundle("chat"), engine="cpu", on_progress=stop)


def test_models_of_the_same_bytes_share_their_weights() -> None:
    one, other, third = (edge.load("demo-bytes", threads=n) for n in (1, 1, 2))
    assert one.engine is other.engine and one is not other and third.engine is not one.engine
    assert edge.load("demo-bytes", threads=1, engine="ort").engine is not one.engine


def test_a_prompt_tells_of_its_chunks() -> None:
    told: list[tuple[str, int, int]] = []
    session = model("chat").session()
    session.generate([5] * 37, max_tokens=1, on_progress=lambda *now: told.append(now)).finish()
    assert told == [("prefill", done, 37) for done in (0, 16, 32, 37)]
    talk = model("chat").session()
    answer = talk.chat("x" * 60, max_tokens=1, on_progress=lambda *_: talk.cancel()).finish()
    assert answer.finish_reason == "cancelled" and answer.prompt_tokens == 0


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())


@pytest.mark.parametrize("already", [0, 3 << 20], ids=["whole", "begun anew"])
def test_a_pull_shows_bytes_rate_and_time_left(
    already: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, content = _Screen(), bytes(8 << 20)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "120")
    with serving(FakeHub({"some/model": {"vocab.txt": content}})) as hub:
        url = f"{hub.url}/some/model/resolve/{COMMIT}/vocab.txt"
        if already:
            (tmp_path / f"vocab.txt{download.PART}").write_bytes(content[:already])
        # without a hash, the part is fetched again, and its bytes are no longer counted
        download.fetch([download.RemoteFile("vocab.txt", url, len(content))], tmp_path, {})
    assert (tmp_path / "vocab.txt").read_bytes() == content
    assert re.search(r"fetching .*8\.4/8\.4 MB \d+\.\d [kMG]B/s 0:00:0\d", screen.text())


@pytest.mark.parametrize(
    "unit, shown",
    [("bytes", r"\d/9\.0 GB 4\.2 MB/s 0:3\d:\d\d"), ("tokens", r" 4200000 tokens/s 0:3\d:\d\d")],
)
def test_the_bar_has_a_rate_and_the_time_left(
    unit: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = _Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(progress, "PATIENCE_S", 0)
    seconds = itertools.count(1)
    now = 0

    def counts() -> tuple[int, int]:
        nonlocal now
        now = next(seconds)
        return 4_200_000 * now, 9_000_000_000

    monkeypatch.setattr("rich.console.monotonic", lambda: float(now))
    until = time.monotonic() + 60
    with progress.waiting("loading x", counts, unit):
        while not re.search(shown, screen.text()) and time.monotonic() < until:
            time.sleep(0.01)
    before = len(screen.getvalue())
    monkeypatch.setattr(progress, "PATIENCE_S", 10)
    with progress.waiting("loading x", counts, unit):
        pass  # over before anybody could read a bar
    assert len(screen.getvalue()) == before
    assert "loading x" in screen.text() and re.search(shown, screen.text()), screen.text()
