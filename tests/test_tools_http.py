"""Tools over HTTP, as the OpenAI client calls them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.server_process import HELLO, Server, is_error
from tests.session_models import bundle
from tests.tool_samples import SCHEMA, TOOLS


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(bundle=str(bundle("bytes"))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


HOT: dict[str, Any] = {"model": "bytes", "temperature": 1.5, "max_tokens": 400, "tools": TOOLS}


def test_the_openai_client_calls_and_tells_the_result(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "go"}}
    answer = client.chat.completions.create(
        messages=HELLO,
        tool_choice=named,
        seed=1,
        n=2,
        **HOT,  # type: ignore[call-overload]
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    said = answer.choices[0].message
    talk = [
        *HELLO,
        said.model_dump(),
        {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "there"},
    ]
    after = client.chat.completions.create(messages=talk, **(HOT | {"max_tokens": 4}))
    assert after.choices[0].message.tool_calls is None
    free = client.chat.completions.create(
        messages=HELLO, tool_choice="none", **(HOT | {"max_tokens": 4})
    )
    assert free.choices[0].message.content and free.usage is not None


def test_streamed_arguments_are_the_whole_ones(client: openai.OpenAI) -> None:
    given: dict[str, Any] = HOT | {"messages": HELLO, "tool_choice": "required", "seed": 7}
    whole = client.chat.completions.create(**given).choices[0]
    calls: list[dict[str, Any]] = []
    chunks = list(client.chat.completions.create(**given, stream=True))
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.id:
                assert delta.function and delta.index == len(calls)
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            assert delta.function is not None
            calls[delta.index]["arguments"] += delta.function.arguments or ""
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    made = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
    assert [(c["name"], c["arguments"]) for c in calls][: len(made)] == made
    assert len({c["id"] for c in calls}) == len(calls)
    alone = client.chat.completions.create(**given, parallel_tool_calls=False)
    assert len(alone.choices[0].message.tool_calls) == 1
    assert alone.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "extra, param",
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "fly"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}},
         "response_format"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]},
         "messages.0.tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",
          "arguments": "{"}}]}, *HELLO]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f",
          "arguments": "{}"}}], "content": "x"}]}, "messages.0.tool_calls"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_wrong_tools_are_a_400(server: Server, extra: dict[str, Any], param: str) -> None:
    body = {"messages": HELLO, "max_tokens": 1} | extra
    status, _, answer = server.request("POST", "/v1/chat/completions", body)
    assert status == 400 and is_error(answer), answer
    assert answer["error"]["param"] == param, answer
