"""Tool calls read from text, however it is split."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edge.text.tools import HERMES, CallForm, ToolCall
from tests.tool_samples import ELEMENTS, FORMS, LLAMA

TEXTS = ["", "Let me see.", "a < b <tool_", '{"x"', "<tool_call", "[1]"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(
    form=st.sampled_from([HERMES, FORMS["nemotron"][1], LLAMA, ELEMENTS]),
    before=st.sampled_from(TEXTS),
    calls=st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
@settings(max_examples=60)
def test_calls_are_read_however_they_are_cut(
    form: CallForm, before: str, calls: list[dict[str, Any]], cuts: list[int]
) -> None:
    if form is LLAMA and calls:
        before = ""  # nothing marks a call except its position at the beginning
    if form is ELEMENTS:  # no name contains the text that ends a name
        calls = [{key: v for key, v in call.items() if ">" not in key} for call in calls]
    made = [ToolCall("", f"f{i}", json.dumps(value)) for i, value in enumerate(calls)]
    # only schemas tell the elements form which values are texts
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"properties": {
            key: {"enum": [value]} for key, value in call.items()}}}}
        for i, call in enumerate(calls)
    ]  # fmt: skip
    text = before + (form.write(made) if made else "")
    reader, shown, at = form.reader(tools), "", 0
    for cut in [*sorted(cuts), len(text)]:
        shown += reader.feed(text[at:cut])
        at = max(at, cut)
    shown += reader.finish()
    assert shown == before
    assert [(c.name, c.arguments) for c in reader.calls] == [(c.name, c.arguments) for c in made]
    for index, call in enumerate(reader.calls):
        own = [delta for delta in reader.deltas if delta.index == index]
        assert (own[0].id, own[0].name) == (call.id, call.name)
        assert "".join(delta.text for delta in own) == call.source
