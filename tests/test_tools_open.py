"""Calls that an answer opens: split into any pieces, and never closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.text.tools import HERMES, CallForm
from edge.text.xml_calls import XmlForm
from tests.tool_samples import GO

XML = XmlForm(
    "<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>\n<tool_call>\n<function=",
    "</function>\n</tool_call>", "<parameter=", ">\n", "\n</parameter>\n",
)  # fmt: skip
PIECES = [" ", "\n", "a", "<", "<tool_call>", "\n", "<function=", "go", ">\n", '"', "{", "}",
          HERMES.head, HERMES.middle, HERMES.tail, "<parameter=", "\n</parameter>\n", "</function>",
          "x" * 300, " " * 400]  # fmt: skip


def _read(form: CallForm, parts: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = form.reader([GO])
    shown = "".join(reader.feed(part) for part in parts)
    return shown + reader.finish(), [(call.name, call.source) for call in reader.calls]


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.sampled_from([HERMES, XML]))
def test_how_an_answer_is_cut_into_pieces_makes_no_difference(
    parts: list[str], form: CallForm
) -> None:
    text = "".join(parts)
    assert _read(form, parts) == _read(form, list(text)) == _read(form, [text])


class _Counted(str):
    """A text that counts the characters read from it and from its parts."""

    read = 0

    def find(self, *given: Any) -> int:
        _Counted.read += len(self) - (given[1] if len(given) > 1 else 0)
        return super().find(*given)

    def rstrip(self, *given: Any) -> str:
        _Counted.read += len(self) - len(super().rstrip(*given))
        return _Counted(super().rstrip(*given))

    def __getitem__(self, key: Any) -> str:
        found = _Counted(super().__getitem__(key))
        _Counted.read += len(found)
        return found

    def __add__(self, other: str) -> _Counted:
        return _Counted(str(self) + other)

    def __radd__(self, other: str) -> _Counted:
        return _Counted(other + str(self))


@pytest.mark.parametrize("form", [HERMES, XML], ids=["json", "xml"])
@pytest.mark.parametrize(
    "start, piece",
    [("", " "), ("", "\n"), ("", "<tool_cal"), ("HEAD", "abc"), ("CALL", "k"), ("CALL", "[1, ")],
)
def test_what_an_open_call_holds_is_not_read_again(form: CallForm, start: str, piece: str) -> None:
    """An endless space, name or value: twice the pieces take twice the work, not four times."""
    opened = {"": "", "HEAD": form.head, "CALL": f"{form.head}go{form.middle}"}[start]
    if start and piece != "abc" and isinstance(form, XmlForm):
        opened += form.opens + ("" if piece == "k" else f"steps{form.named}")

    def work(count: int) -> int:
        reader, _Counted.read = form.reader([GO]), 0
        for part in [opened, *[piece] * count]:
            reader.feed(_Counted(part))
        return _Counted.read

    assert work(4000) > 0 and work(8000) < 2.5 * work(4000)
