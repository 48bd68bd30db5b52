"""Sessions on the CUDA engine, interpreted: an exported bundle, answers, drafts, rewinding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edge
from edge.errors import InputError
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.model import Model
from tests.facts import facts
from tests.on_device import ON_GPU
from tests.same_talk import check_talk
from tests.session_models import bundle, model


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Model:
    if not ON_GPU:
        monkeypatch.setenv("EDGE_DEVICE", "interpret")
    loaded = edge.load(bundle("chat"), engine="cuda")
    assert isinstance(loaded.engine, CudaEngine) and loaded.engine.name == "cuda"
    return loaded


def test_the_same_answers_as_onnx_runtime(cuda: Model, tmp_path: Path) -> None:
    check_talk(cuda, tmp_path / "talk", window=2)


def test_a_tree_of_drafts(cuda: Model) -> None:
    """Drafter and target run on the device: the drafter's state is spread there, the target's
    selects a path.
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


@pytest.mark.parametrize("tree", ["ucb", (3, 3, 2)])
def test_a_tree_that_no_kernel_takes_is_refused_at_once(cuda: Model, tree: Any) -> None:
    with pytest.raises(InputError, match=facts("too large", "cuda", 16)):
        cuda.session(draft=cuda, draft_tree=tree)
    cuda.session(draft=cuda)  # which chooses the shape itself
