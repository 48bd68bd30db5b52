"""Text embeddings: the last hidden states, pooled, on every engine that has them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import edge
from edge.errors import BundleError, ContextFullError, EngineError, InputError
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.embed import Embedder
from edge.runtime.model import Model
from tests.facts import facts
from tests.session_models import bundle

TOKENS = [7 + 11 * i % 300 for i in range(37)]  # two chunks of 16, and a rest


@cache
def loaded(kind: str, engine: str) -> Model:
    return edge.load(kind if kind.startswith("demo") else bundle(kind), engine=engine, threads=1)


@cache
def judge(kind: str) -> NDArray[np.float64]:
    """Return the last hidden states [T, D] of transformers."""
    from transformers import AutoModel

    path = bundle(kind)
    network = AutoModel.from_pretrained(path.with_name(f"{kind}-source"), dtype=torch.float32)
    with torch.no_grad():
        found = network.eval()(torch.tensor([TOKENS])).last_hidden_state
    return found[0].double().numpy()


@pytest.mark.parametrize("engine", ["cpu", "ort"])
@pytest.mark.parametrize("kind", ["chat", "hybrid"])
def test_the_vector_is_of_the_hidden_states_of_transformers(kind: str, engine: str) -> None:
    model, states = loaded(kind, engine), judge(kind)
    mean = model.embed(TOKENS, normalize=False)
    np.testing.assert_allclose(mean, states.mean(0), atol=2e-5)
    last = model.embed([TOKENS[:5], TOKENS], pooling="last")
    wanted = states[[4, -1]] / np.linalg.norm(states[[4, -1]], axis=1, keepdims=True)
    assert last.dtype == np.float32 and last.shape == (2, 32)
    np.testing.assert_allclose(last, wanted, atol=2e-5)
    # a text of one chunk, after longer ones: nothing of them remains
    np.testing.assert_array_equal(model.embed(TOKENS, normalize=False), mean)


def test_where_the_head_reads_int8_the_vectors_are_of_what_it_reads() -> None:
    texts = ["The ball is red.", "Five times six is thirty."]
    one, other = (loaded("demo", engine).embed(texts) for engine in ("cpu", "ort"))
    assert (one * other).sum(1).min() > 0.9995
    assert (one[0] * one[1]).sum() < 0.9


def test_texts_are_read_as_prompts_are() -> None:
    model = loaded("hybrid", "cpu")
    tokens = model.tokenizer.encode("a red ball")
    if model.tokenizer.bos is not None and model.tokenizer.add_bos:
        tokens.insert(0, model.tokenizer.bos)
    np.testing.assert_array_equal(model.embed("a red ball"), model.embed(tokens))
    np.testing.assert_array_equal(model.joined().embed("a red ball"), model.embed(tokens))
    assert model.embed(np.array(tokens)).shape == (32,)
    assert model.embed([]).shape == (0, 32)


def test_it_says_what_it_cannot_read() -> None:
    model = loaded("hybrid", "cpu")
    with pytest.raises(InputError, match="empty"):
        model.embed(["a", ""])
    with pytest.raises(ContextFullError, match="context of 64"):
        model.embed([3] * 65)
    with pytest.raises(InputError, match="pooling: must be mean or last"):
        model.embed("a", pooling="max")  # type: ignore[arg-type]
    halted = model.embedder().embed(TOKENS, halted=lambda: True)
    assert halted is None


def test_an_engine_of_logits_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("hybrid", "cpu")
    other = type("Executor", (PlanExecutor,), {})
    with monkeypatch.context() as patch:
        # TensorRT's executor runs an engine that ends with its logits
        patch.setattr("edge.runtime.cuda.engine.PlanExecutor", other)
        with pytest.raises(EngineError, match="engine: engine cpu gives logits"):
            Embedder(model)
    ort = loaded("hybrid", "ort")
    monkeypatch.setattr(ort, "fingerprint", "another")
    with pytest.raises(BundleError, match=facts("changed", "loaded")):
        Embedder(ort)
