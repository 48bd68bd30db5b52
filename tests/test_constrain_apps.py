"""Answer forms in the programs: `edge-chat`, the API, a robot's goal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from edge.apps.chat import main
from edge.apps.constraints import FormOptions
from jetson.ros2.edge_chat.edge_chat.talker import GoalRequest, NodeSettings, Talker
from tests.facts import says
from tests.programs import called
from tests.server_process import HELLO, Server, is_error
from tests.session_models import bundle
from tests.test_chat_once import run

SCHEMA = {
    "type": "object",
    "properties": {"left": {"type": "boolean"}, "steps": {"enum": [1, 2, 3]}},
    "required": ["left", "steps"],
    "additionalProperties": False,
}
HOT: dict[str, Any] = {"model": "demo", "temperature": 2.0, "seed": 5, "max_tokens": 200}


# -- edge-chat -------------------------------------------------------------------------------------


def test_options_of_edge_chat(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "g.lark").write_text('start: ("a" | "b")+ "."')
    hot = ["-p", "hello", "--temperature", "3", "--seed", "2", "--threads", "1"]
    for option, value, pattern in (
        ("--json-schema", str(tmp_path / "schema.json"), r'\{"left": \w+, "steps": [123]\}'),
        ("--grammar", str(tmp_path / "g.lark"), r"[ab]+\."),
    ):
        code, out, err = run(str(bundle("bytes")), *hot, option, value)
        assert code == 0 and re.fullmatch(pattern, out.strip()), (out, err)
    code, out, _ = run(str(bundle("bytes")), *hot, "--choices", "a, b", "--choices", "a, c")
    assert code == 0 and out.strip() in ("a, b", "a, c")
    assert FormOptions(json_schema='{"type": "null"}').read()["json_schema"] == '{"type": "null"}'
    assert FormOptions(choices=["left, right"]).read()["choices"] == ("left", "right")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--json-schema", "nowhere.json"], "--json-schema: cannot be read: No such file"),
        (["--json-schema", '{"type": "thing"}'], "--json-schema: Invalid type: thing"),
        (["--regex", "[a"], "--regex: "),
        (["--regex", "a", "--choices", "a,b"], "--regex: cannot be given together with --choices"),
    ],
)
def test_refusals_of_edge_chat_name_the_option(options: list[str], said: str) -> None:
    code, out, err = called(main, bundle("bytes"), "-p", "hello", *options)
    assert (code, out) == (1 if "cannot be read" in said else 2, "") and said in err


# -- the API ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def test_response_format(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "way", "schema": SCHEMA,
                                                        "strict": True}}  # fmt: skip
    answer = client.chat.completions.create(messages=HELLO, response_format=form, **HOT)
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(
        messages=HELLO, response_format=form, stream=True, **HOT
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == answer.choices[0].message.content
    loose: Any = {"type": "json_object"}
    answer = client.chat.completions.create(messages=HELLO, response_format=loose, **HOT)
    text = answer.choices[0].message.content or ""
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    cut = client.chat.completions.create(
        messages=HELLO, response_format=form, **(HOT | {"max_tokens": 3})
    )
    assert cut.choices[0].finish_reason == "length"


def test_the_clients_own_way_with_pydantic(client: openai.OpenAI) -> None:
    class Way(BaseModel):
        left: bool
        steps: Literal[1, 2, 3]

    answer = client.chat.completions.parse(
        messages=HELLO, response_format=Way, **(HOT | {"temperature": 0.3})
    )
    assert isinstance(answer.choices[0].message.parsed, Way)


def test_structured_outputs(client: openai.OpenAI) -> None:
    for form, pattern in (
        ({"choice": ["left", "right"]}, "left|right"),
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"grammar": 'start: "x" | "y" "z"'}, "x|yz"),
        ({"json": SCHEMA}, r"\{.*\}"),
        ({"json": json.dumps(SCHEMA)}, r"\{.*\}"),
    ):
        extra = {"structured_outputs": form}
        chat = client.chat.completions.create(messages=HELLO, extra_body=extra, **HOT)
        assert re.fullmatch(pattern, chat.choices[0].message.content or "")
        text = client.completions.create(prompt="Once", extra_body=extra, **HOT)
        assert re.fullmatch(pattern, text.choices[0].text)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    ],
)  # fmt: skip
def test_bad_forms_are_refused_by_name(server: Server, extra: dict[str, Any], param: str) -> None:
    status, _, answer = server.request(
        "POST", "/v1/chat/completions", {"messages": HELLO, "max_tokens": 1} | extra
    )
    assert status == 400 and is_error(answer), answer
    assert answer["error"]["param"] == param, answer


def test_a_conflict_names_both_as_the_request_does(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "go"}}
    for extra, said in (
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}},
         ("structured_outputs.regex: ", "structured_outputs.choice")),
        ({"response_format": {"type": "json_object"}, "tools": [tool]},
         ("response_format: ", "together with", "tools")),
    ):  # fmt: skip
        body = {"messages": HELLO, "max_tokens": 1} | extra
        _, _, answer = server.request("POST", "/v1/chat/completions", body)
        assert says(answer["error"]["message"], *said)


# -- a robot's goal --------------------------------------------------------------------------------


def test_a_goal_of_the_action() -> None:
    talker = Talker()
    talker.configure(NodeSettings(threads=1, temperature=2.0, warmup_tokens=0))
    talker.activate()
    try:
        ask = GoalRequest("Which way?", seed=3)
        for request, pattern in (
            (replace(ask, choices=("left", "right")), "left|right"),
            (replace(ask, regex="[0-9]{2} cm"), "[0-9]{2} cm"),
            (replace(ask, json_schema=json.dumps(SCHEMA)), r"\{.*\}"),
        ):
            outcome = talker.start(request).wait(60)
            assert outcome is not None and outcome.finish_reason == "stop", outcome
            assert re.fullmatch(pattern, outcome.text)
        outcome = talker.start(replace(ask, regex="[a")).wait(60)
        assert outcome is not None and outcome.finish_reason == "error"
        assert "regex" in outcome.error and talker.refusal() is None
    finally:
        talker.shutdown()
