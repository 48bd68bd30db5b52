"""Answers that call tools, with valid calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from edge.errors import InputError
from edge.runtime.constrain.mask import open_mask
from edge.runtime.constrain.statement import Constraint
from edge.runtime.constrain.tools import tool_use
from edge.text.template import ChatTemplate
from edge.text.tools import ToolCall
from tests.text_samples import tokenizer
from tests.tool_samples import CALLS, ELEMENTS, FORMS, GO, STOP, TOOLS, use_of, using, valid


@pytest.mark.parametrize(
    "name, kind",
    [
        (name, kind)
        for name in ("hermes", "bare", "single", "elements")
        for kind in ("chat", "bytes")
    ]
    + [("control", "chat"), ("none", "chat")],  # bytes have no control tokens
)
def test_a_random_model_makes_only_right_calls(name: str, kind: str) -> None:
    tiny = using(name, kind)
    for seed, choice in enumerate(["required", "go", "stop", "required"]):
        session = tiny.session(draft="ngram" if seed == 3 else None, seed=seed)
        answer = session.chat(
            "x", tools=TOOLS, tool_choice=choice, parallel_tool_calls=seed < 3,
            temperature=2.0, max_tokens=300,
        )  # fmt: skip
        assert "".join(answer) == "" and answer.result.tool_calls
        valid(answer.result.tool_calls)
        if choice != "required" or seed == 3:
            [call] = answer.result.tool_calls
            assert answer.result.finish_reason == "stop" and choice in (call.name, "required")


def test_a_call_among_text_where_it_may_be_either() -> None:
    tiny = using("control")
    marker = next(s.id for s in tiny.tokenizer.specials if s.text == "<|system|>")
    session = tiny.session(seed=5)
    plain = session.chat("x", tools=TOOLS, max_tokens=8, logit_bias={6: -100.0, marker: -100.0})
    assert plain.finish().text and not plain.result.tool_calls
    answer = session.chat(
        "y", tools=TOOLS, temperature=1.0, max_tokens=200, parallel_tool_calls=False,
        logit_bias={marker: 100.0},
    )  # fmt: skip
    assert "".join(answer) == "" and answer.result.finish_reason == "stop"
    valid(answer.result.tool_calls)
    held = len(session.tokens)
    # the next turn runs only the new tokens, and so does another session that loads this one
    talk = [*session.messages, {"role": "tool", "content": "done"}]
    assert session.messages[-1].tool_calls == answer.result.tool_calls
    after = session.chat(talk, tools=TOOLS, max_tokens=3).finish()
    assert after.reused_tokens >= held - 1
    session.undo()
    assert session.messages == tuple(talk[:-1]) and len(session.tokens) == held


def test_calls_are_saved_with_the_talk(tmp_path: Path) -> None:
    session = using("none").session(seed=1)
    session.chat("x", tools=TOOLS, tool_choice="stop").finish()
    session.chat(
        [*session.messages, {"role": "tool", "content": "ok", "tool_call_id": "c"}], max_tokens=2
    ).finish()
    session.save(tmp_path / "talk")
    again = using("none").session()
    again.load(tmp_path / "talk")
    assert again.messages == session.messages and again.messages[1].tool_calls
    assert again.messages[2].tool_call_id == "c"
    assert again.chat("and now?", max_tokens=2).finish().reused_tokens


@pytest.mark.parametrize("name", ["hermes", "control", "bare", "elements"])
def test_what_the_grammar_of_a_free_answer_allows(name: str) -> None:
    tiny = using(name)
    use = use_of(tiny)
    form = FORMS[name][1]

    def within(text: str) -> bool:
        ids = tiny.tokenizer.encode(text, special=True)
        mask = open_mask(tiny.tokenizer, Constraint("grammar", use.grammar or ""), continued=True)
        assert mask is not None
        return mask.within(ids) == len(ids)

    one = ToolCall("", "stop", "{}")
    for right in ("Hello < [you] there", form.write([one]), form.write([*CALLS, one])):
        assert within(right)
    assert within("Well.\n" + form.write([one]))  # in form "bare" it is text
    for wrong in (
        form.head + "fly", form.head + 'stop", "arguments": {"x"',
        form.head + 'go", "arguments": {"where": "u', form.write([one]) + " and",
    ):  # fmt: skip
        assert not within(wrong)


SIDES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5, "pattern": "^[a-c]+/"},
        "side": {"$ref": "#/$defs/Side"},
        "sides": {"type": "array", "items": {"$ref": "#/$defs/Side"}, "maxItems": 2},
        "ok": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "size": {"type": ["integer", "null"], "minimum": 3, "maximum": 20},
        "kind": {"enum": ["a b", 3, None, True]},
        "free": {"type": "string", "maxLength": 30},
    },
    "required": ["name", "side", "sides", "ok", "note", "size", "kind"],
    "additionalProperties": False,
    "$defs": {"Side": {"enum": ["left", "right"]}},
}


def test_elements_are_held_to_their_part_of_the_schema() -> None:
    tool = {"name": "big", "parameters": SIDES}
    for seed in range(4):
        session = using("elements", "bytes").session(seed=seed)
        answer = session.chat(
            "x", tools=[tool], tool_choice="big", temperature=2.0, max_tokens=900
        ).finish()
        jsonschema.validate(answer.tool_calls[0].arguments, SIDES)
    tiny = using("elements", "bytes")
    use = use_of(tiny, "big", [tool])
    words = ["a/", "left", "[]", "True", "None", "7", "3"]
    text = ELEMENTS.head + "big>\n" + "".join(
        f"<parameter={key}>\n{word}\n</parameter>\n"
        for key, word in zip(SIDES["required"], words, strict=True)
    ) + ELEMENTS.tail  # fmt: skip
    reader = use.reader()
    assert reader is not None and reader.feed(text) == ""
    assert reader.calls[0].arguments == {
        "name": "a/", "side": "left", "sides": [], "ok": True, "note": None, "size": 7, "kind": 3,
    }  # fmt: skip
    more = {"type": "object", "additionalProperties": True, "x-unknown": 1}
    assert use_of(tiny, "big", [{"name": "big", "parameters": more}]).grammar
    apart = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    for wrong, said in (
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}}, "more than 1000 schemas"),
        ({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": apart}, "more than 1000 schemas"),
        (more, "x-unknown.*is not supported"),
        ({"properties": {"a>b": {}}}, "a>b.*cannot be written"),
        ({"required": ["a"]}, "not among the properties"),
        ({"properties": {"a": {"enum": ["\n</parameter>\n"]}}}, "the marker that ends texts"),
    ):
        with pytest.raises(InputError, match=f"tools: big.parameters.*{said}"):
            use_of(tiny, "big", [{"name": "big", "parameters": wrong, "strict": True}])


@pytest.mark.parametrize(
    "wrong",
    [{"properties": {"a": {"type": kind}}} for kind in (5, None, [["string"]])]
    + [{"properties": properties} for properties in ([1], "a", 5, None)]
    + [{"properties": {"a": {}}, "required": required} for required in (5, None, [["a"]])]
    + [{"properties": {"a": {"enum": 5}}}],
    ids=str,
)
@pytest.mark.parametrize("form", ["elements", "hermes"])
def test_what_is_no_schema_is_refused(form: str, wrong: dict[str, Any]) -> None:
    template, made = ChatTemplate(FORMS[form][0], tokenizer("spm")), {"name": "f"}
    with pytest.raises(InputError, match=r"tools\.0\.function\.parameters|tools: f\.parameters"):
        tool_use([made | {"parameters": wrong}], "required", True, template, tokenizer("spm"))


class Point(BaseModel):
    """A schema from pydantic."""

    x: int


def test_tools_that_cannot_be_used_are_refused_by_name() -> None:
    tiny = using("none")
    assert use_of(tiny, "f", [{"name": "f", "parameters": Point}]).grammar
    assert use_of(tiny, "none").reader() is None
    session = tiny.session()
    odd = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "thing"}}}}
    for asked, said in (
        ({"tools": [GO, odd]}, r"tools\.1\.function\.parameters"),
        ({"tools": [{"name": "a b", "size": 1}, 5]}, r"\.size is unknown.*\.name must.*tools\.1"),
        ({"tools": [STOP, STOP]}, "twice"),
        ({"tools": "go"}, "list"),
        ({"tools": TOOLS, "tool_choice": "fly"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "regex": "a"}, "regex: .*together with tools"),
    ):
        with pytest.raises(InputError, match=said):
            session.chat("x", **asked)
    for item in ({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]},
                 {"role": "tool", "content": "x", "tool_call_id": 5}):  # fmt: skip
        with pytest.raises(InputError, match=r"messages\.1\.tool_call"):
            session.chat([{"role": "user", "content": "x"}, item, {"role": "user", "content": "y"}])
    assert not session.messages
