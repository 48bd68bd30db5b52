"""A chat on another engine: the words of ONNX Runtime, and a file that either can continue."""

from __future__ import annotations

from pathlib import Path

from edge.runtime.model import Model
from tests.session_models import model


def check_talk(loaded: Model, file: Path, *, window: int, max_tokens: int = 2) -> None:
    """Check a chat. `loaded` is the bundle "chat" on the engine under test."""
    sessions = [each.session(window=window, seed=1) for each in (loaded, model("chat"))]
    texts = []
    for session in sessions:
        first = session.chat("hi", temperature=0, max_tokens=max_tokens).finish()
        second = session.chat("and", temperature=0, max_tokens=max_tokens).finish()
        assert second.reused_tokens > 0, "the state goes on from the first answer"
        session.undo()
        again = session.chat("and", temperature=0, max_tokens=max_tokens).finish()
        assert again.tokens == second.tokens
        texts.append((first.tokens, second.tokens))
    assert texts[0] == texts[1]
    sessions[0].save(file)
    other = model("chat").session(window=window)
    other.load(file)
    assert other.tokens == sessions[0].tokens == sessions[1].tokens
    last = [
        session.chat("so", temperature=0, max_tokens=max_tokens).finish().tokens
        for session in (other, *sessions)
    ]
    assert last[0] == last[1] == last[2]
