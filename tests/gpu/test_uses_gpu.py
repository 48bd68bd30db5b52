"""What programs ask of a model, on a real GPU, beside the same on the CPU: forms, embeddings,
drafting, saved sessions, several threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge
from edge.errors import EngineError
from edge.runtime.model import Model

pytestmark = pytest.mark.gpu

ENGINE, OTHER = "cuda", "ort"
QUESTION = "Hello, how are you?"
SCHEMA = {
    "type": "object",
    "properties": {"do": {"enum": ["go", "stop"]}, "speed": {"enum": [1, 2, 3]}},
    "required": ["do", "speed"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Model]:
    try:
        yield edge.load("demo-fp16", engine=ENGINE)
    except EngineError as error:
        pytest.skip(f"no GPU to run on: {error}")


@pytest.fixture(scope="module")
def other() -> Model:
    return edge.load("demo-fp16", engine=OTHER)


def said(model: Model, question: str = QUESTION, **options: Any) -> str:
    drafting = {name: options.pop(name) for name in list(options) if name.startswith("draft")}
    answer = model.session(**drafting).chat(question, **{"temperature": 0, **options}).finish()
    return answer.text


def test_answers_are_those_of_the_other_engine(gpu: Model, other: Model) -> None:
    assert said(gpu, max_tokens=48) == said(other, max_tokens=48)


@pytest.mark.parametrize(
    "form",
    [{"choices": ["left", "right", "stop"]}, {"regex": r"\d{1,3} cm"}, {"json_schema": SCHEMA}],
    ids=lambda form: next(iter(form)),
)
def test_an_answer_has_its_form(gpu: Model, other: Model, form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    answer = said(gpu, max_tokens=64, **form)
    assert answer == said(other, max_tokens=64, **form)
    if "json_schema" in form:
        assert set(json.loads(answer)) == {"do", "speed"}


def test_embeddings_are_those_of_the_other_engine(gpu: Model, other: Model) -> None:
    texts = ["The ball is red.", "Go left.", "a" * 300]
    found, expected = gpu.embed(texts), other.embed(texts)
    assert found.shape == expected.shape
    assert np.abs(np.asarray(found) - np.asarray(expected)).max() < 1e-4


@pytest.mark.parametrize(
    "drafting",
    [{"draft_tokens": 4}, {"draft_tree": (3, 2, 1)}, {}],
    ids=str,
)
def test_drafting_changes_no_answer(gpu: Model, drafting: dict[str, Any]) -> None:
    draft = edge.load("demo-draft", engine=ENGINE)
    assert said(gpu, max_tokens=96, draft=draft, **drafting) == said(gpu, max_tokens=96)


def test_a_session_goes_on_elsewhere(gpu: Model, other: Model, tmp_path: Path) -> None:
    answers = []
    for first, then in ((gpu, other), (other, gpu), (gpu, gpu)):
        session = first.session()
        session.chat(QUESTION, max_tokens=24, temperature=0).finish()
        session.save(tmp_path / "state")
        later = then.session()
        later.load(tmp_path / "state")
        answer = later.chat("And then?", max_tokens=24, temperature=0).finish()
        assert answer.prompt_tokens
        answers.append(answer.text)
    assert len(set(answers)) == 1, answers


def test_threads_get_what_they_get_alone(gpu: Model) -> None:
    questions = [QUESTION, "Do you like music?", "What did you do today?", "Who are you?"]
    alone = [said(gpu, question, max_tokens=48) for question in questions]
    joined = gpu.joined()
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(lambda question: said(joined, question, max_tokens=48), questions))
    assert together == alone


def test_sampled_answers_are_those_of_the_other_engine(gpu: Model, other: Model) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 32}
    assert said(gpu, **options) == said(other, **options)
