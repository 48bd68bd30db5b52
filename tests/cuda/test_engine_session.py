"""Sessions on the CUDA engine, interpreted: an exported bundle, answers, drafts, going back."""

from __future__ import annotations

from pathlib import Path

import pytest

import edge
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.model import Model
from tests.session_models import bundle, model

GREEDY = {"temperature": 0.0, "max_tokens": 2}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("EDGE_DEVICE", "interpret")
    loaded = edge.load(bundle("chat"), engine="cuda")
    assert isinstance(loaded.engine, CudaEngine) and loaded.engine.name == "cuda"
    return loaded


def test_the_same_answers_as_onnx_runtime(cuda: Model, tmp_path: Path) -> None:
    sessions = [each.session(window=2, seed=1) for each in (cuda, model("chat"))]
    texts = []
    for session in sessions:
        first = session.chat("hi", **GREEDY).finish()
        second = session.chat("and", **GREEDY).finish()
        assert second.reused_tokens > 0, "the state goes on from the first answer"
        session.undo()
        again = session.chat("and", **GREEDY).finish()
        assert again.tokens == second.tokens
        texts.append((first.tokens, second.tokens))
    assert texts[0] == texts[1]
    sessions[0].save(tmp_path / "talk")
    other = model("chat").session(window=2)
    other.load(tmp_path / "talk")
    assert other.tokens == sessions[0].tokens == sessions[1].tokens
    last = [s.chat("so", **GREEDY).finish().tokens for s in (other, sessions[1])]
    assert last[0] == last[1]


def test_a_tree_of_drafts(cuda: Model) -> None:
    """Drafter and target on the device: the drafter's state is spread there, the target's selects
    a path.
    """
    plain, drafting = model("chat").session(), cuda.session(draft=cuda, draft_tree=(2, 1))
    expected, result = (
        session.generate("one two", temperature=0, max_tokens=4).finish()
        for session in (plain, drafting)
    )
    assert result.tokens == expected.tokens and drafting.tokens == plain.tokens
    figures = result.speculation
    assert figures is not None and figures.problem == ""
    assert figures.drafted == 4 and figures.accepted > 0
