"""Tools, calls of them, templates that declare them, and a model that uses one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jsonschema

import edge
from edge.runtime.constrain.tools import ToolUse, tool_use
from edge.runtime.model import Model
from edge.text.template import ChatTemplate
from edge.text.tools import HERMES, CallForm, ToolCall, json_form
from edge.text.xml_calls import XmlForm
from tests.session_models import bundle

GO: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "go",
        "description": "Drive to a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {"enum": ["left", "right"]},
                "steps": {"type": "integer", "minimum": 0, "maximum": 99},
                "say": {"type": "string", "maxLength": 6},
            },
            "required": ["where", "steps", "say"],
        },
    },
}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop", "strict": True}}
TOOLS = [GO, STOP]
SCHEMA = GO["function"]["parameters"] | {"additionalProperties": False}

# in the forms of models' own templates, in our words
_SAID = "{{ '<|' ~ m.role ~ '|>' ~ m.content }}"
DECLARES = "{% if tools %}{{ '<|system|>' ~ (tools | tojson) ~ '<|end|>' }}{% endif %}"
_ASKS = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"


def _template(calls: str, declares: str = DECLARES) -> str:
    loop = "{% for m in messages %}" + _SAID + calls + "{{ '<|end|>' }}{% endfor %}"
    return declares + loop + _ASKS


_EACH = (
    '{% for c in m.tool_calls or [] %}{% set f = c.function %}{{ BEGIN ~ \'{"name": "\' ~ f.name'
    " ~ '\", \"arguments\": ' ~ (f.arguments | tojson) ~ '}' ~ END }}{% endfor %}"
)
_LISTED = (
    "{% if m.tool_calls %}{{ BEGIN ~ '[' }}{% for c in m.tool_calls %}{{ '{\"name\": \"' ~"
    " c.function.name ~ '\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' ~ END }}{% endif %}"
)


def _between(source: str, begin: str, end: str) -> str:
    return source.replace("BEGIN", f"'{begin}'").replace("END", f"'{end}'")


ELEMENTS_TEMPLATE = _template(
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' ~ c.function.name ~ '>\n' }}"
    "{% for key, value in c.function.arguments | items %}{{ '<parameter=' ~ key ~ '>\n' ~"
    " (value | tojson if value is not string else value) ~ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}"
)
ELEMENTS = XmlForm(
    "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>\n<tool_call>\n<function=",
    "</function>\n</tool_call>", "<parameter=", ">\n", "\n</parameter>\n",
)  # fmt: skip
_HERMES = _template(_between(_EACH, "\\n<tool_call>\\n", "\\n</tool_call>"))
LLAMA = CallForm('{"name": "', '", "arguments": ', '}{"name": "', "}")
FORMS: dict[str, tuple[str, CallForm]] = {
    "hermes": (_HERMES, HERMES),
    "nemotron": (
        _template(_between(_LISTED, "<TOOLCALL>", "</TOOLCALL>")),
        json_form("<TOOLCALL>", "</TOOLCALL>", listed=True),
    ),
    # starts with a control token, like Granite 3's `<|tool_call|>`
    "control": (_template(_between(_LISTED, "<|system|>", "")), json_form("<|system|>", "", True)),
    # nothing marks a call except its position at the beginning, as in Llama 3
    "bare": (_template(_between(_EACH, "", "").replace("END", "")), LLAMA),
    # declares tools, but does not render earlier calls
    "marker": (
        _template("") + "{# <|tool_call|> #}", json_form("<|tool_call|>", "", listed=True)
    ),
    # refuses a second call, as Llama 3.1's does
    "single": (
        "{% for m in messages %}{% if m.tool_calls | default([]) | length > 1 %}"
        "{{ raise_exception('one call at most') }}{% endif %}{% endfor %}"
        + _template(_between(_EACH, "<call>", "").replace("END", "")),
        CallForm('<call>{"name": "', '", "arguments": ', "", "}"),
    ),
    # one element per argument, as in Qwen3-Coder, Qwen3.5 and Nemotron 3
    "elements": (ELEMENTS_TEMPLATE, ELEMENTS),
    # calls that are not JSON, and lose their arguments
    "xml": (
        _template("{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>"
                  "</function></tool_call>{% endfor %}"), HERMES,
    ),
    # drops the tools' results
    "deaf": (
        _HERMES.replace("m in messages", "m in messages if m.role != 'tool'"),
        HERMES,
    ),
    "none": (_template("", ""), HERMES),
}  # fmt: skip


def using(name: str, kind: str = "chat") -> Model:
    """Return a tiny random model that uses one of these templates."""
    tiny = edge.load(bundle(kind), threads=1)
    tiny.template = ChatTemplate(FORMS[name][0], tiny.tokenizer)
    return tiny


def use_of(tiny: Model, choice: str = "auto", tools: Sequence[Any] = TOOLS) -> ToolUse:
    assert tiny.template is not None
    use = tool_use(tools, choice, True, tiny.template, tiny.tokenizer)
    assert use is not None
    return use


CALLS = (ToolCall("c1", "go", '{"where": "left", "steps": 4, "say": "a"}'),
         ToolCall("c2", "stop", "{}"))  # fmt: skip


def valid(calls: Sequence[ToolCall]) -> None:
    for call in calls:
        jsonschema.validate(call.arguments, SCHEMA if call.name == "go" else {"maxProperties": 0})
