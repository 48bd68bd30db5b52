"""The API's /v1/responses, translated to /v1/chat/completions.

Source: the types of the `openai` client, 3.54. Conversations are kept for `previous_response_id`,
in memory of fixed size.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from edge.apps.serve.bodies import SAMPLING
from edge.apps.serve.errors import ApiError, encode, invalid
from edge.apps.serve.ollama import Kind
from edge.apps.serve.requests import ParsedRequest
from edge.apps.serve.response_format import ResponseFormat
from edge.errors import InputError
from edge.runtime.model import Model
from edge.runtime.transcript import read_call

Given = Mapping[str, Any]
PATH = "/v1/responses"
KEPT_BYTES = 16 << 20
_LOGPROBS = "message.output_text.logprobs"
# parameters that mean the same in both, including those beyond the API
_UNCHANGED = {"model", "stream", "stream_options", "parallel_tool_calls", "top_logprobs", "seed",
              "logit_bias", "user", "metadata", "service_tier", "safety_identifier",
              "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
              *SAMPLING}  # fmt: skip
_TRANSLATED = {"input", "instructions", "max_output_tokens", "text", "tools", "tool_choice",
               "include", "previous_response_id", "store"}  # fmt: skip
# values that have no effect; others are refused
_NO_EFFECT: Mapping[str, Any] = {"background": [False], "truncation": ["disabled"],
                                 "reasoning": [{}, {"effort": "none"}]}  # fmt: skip
# field in errors about chats → field that the client sent
_SENT_FIELDS = {"max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
                "messages": "input",
                "response_format.json_schema": "text.format",
                "response_format": "text.format"}  # fmt: skip
_MESSAGE = re.compile(r"\bmessages\.(\d+)(\.\w+)?")
_OUTPUT_FIELDS = {".content": ".output", ".tool_call_id": ".call_id"}


class KeptResponses:
    """Conversations by the response that ended them, of at most `most` bytes.

    The least recently used one is dropped first.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._max_bytes = most
        # as JSON: parsed, what clients may send takes twenty times as much memory
        self._items: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def keep(self, name: str, items: list[Any]) -> None:
        encoded = encode(items)
        try:
            self._items[name] = encoded
            self._size += len(encoded)
            while self._size > self._max_bytes:
                self._size -= len(self._items.popitem(last=False)[1])
        except BaseException:  # out of memory
            self._size = sum(map(len, self._items.values()))
            raise

    def items(self, name: Any) -> list[Any]:
        """Return the conversation up to the end of this response. Raises ApiError."""
        if not isinstance(name, str) or name not in self._items:
            raise invalid(
                f"no response {name!r:.80} is kept here: send the earlier conversation as input",
                "previous_response_id", "previous_response_not_found",
            )  # fmt: skip
        self._items.move_to_end(name)
        conversation: list[Any] = json.loads(self._items[name])
        return conversation


# the client's name for a message, and for its fields where they differ
_Place = tuple[str, Mapping[str, str]]


class ResponseRequest:
    """One request: the body that was sent, and the conversation that it continues."""

    def __init__(self, kept: KeptResponses) -> None:
        self.kept = kept
        self.sent: Given = {}
        self.items: list[Any] = []
        self._places: list[_Place] = []

    def kind(self) -> Kind:
        """Return the route for this request."""
        return Kind(self.form, self.chat)

    def named(self, problem: ApiError) -> ApiError:
        """Translate a refusal of the chat to the names that the client sent."""
        message, param = problem.message, problem.param or ""
        message, param = _MESSAGE.sub(self._rename, message), _MESSAGE.sub(self._rename, param)
        for old, new in _SENT_FIELDS.items():
            message, param = message.replace(old, new), param.replace(old, new)
        return ApiError(problem.status, message, code=problem.code, param=param or None,
                        headers=problem.headers)  # fmt: skip

    def _rename(self, match: re.Match[str]) -> str:
        if int(match[1]) >= len(self._places):  # quoted from the client's text
            return match[0]
        place, fields = self._places[int(match[1])]
        return place + fields.get(match[2], match[2] or "")

    def form(self, asked: ParsedRequest, name: str, model: Model) -> ResponseFormat:
        return ResponseFormat(asked, name, model, self)

    def chat(self, sent: Given) -> dict[str, Any]:
        """Translate the body to /v1/chat/completions. Raises ApiError."""
        given = self.sent = {key: value for key, value in sent.items() if value is not None}
        unknown = [key for key, value in given.items() if key not in _UNCHANGED | _TRANSLATED
                   and value not in _NO_EFFECT.get(key, ())]  # fmt: skip
        if unknown:
            names = ", ".join(f"{name:.40}" for name in unknown[:20])
            raise invalid(f"not supported here: {names}", unknown[0][:40], "unsupported_parameter")
        include, text = given.get("include", []), given.get("text", {})
        if include not in ([], [_LOGPROBS]):
            raise invalid(f"include: must be [{_LOGPROBS!r}], or empty", "include")
        if not isinstance(text, dict) or text.keys() - {"format", "verbosity"}:
            raise invalid("text: must be an object with format", "text")
        if not isinstance(given.get("store", True), bool):
            raise invalid("store: must be true or false", "store", "invalid_type")
        messages = self._messages()
        if "instructions" in given:
            messages.insert(0, {"role": "system", "content": given["instructions"]})
            self._places.insert(0, ("instructions", {".content": ""}))
        return {key: value for key, value in given.items() if key in _UNCHANGED} | {
            "messages": messages,
            "max_completion_tokens": given.get("max_output_tokens"),
            "logprobs": bool(include) or "top_logprobs" in given,
            "response_format": _format(text.get("format")),
            "verbosity": text.get("verbosity"),
            "tools": _tools(given.get("tools")),
            "tool_choice": _choice(given.get("tool_choice")),
        }

    def _messages(self) -> list[Any]:
        """Return all items as messages: those of the continued response, then the new ones."""
        new = self.sent.get("input", [])
        if isinstance(new, str):
            new = [{"role": "user", "content": new}]
        if not isinstance(new, list):
            raise invalid("input: must be a text or a list of items", "input", "invalid_type")
        previous = self.sent.get("previous_response_id")
        kept = [] if previous is None else self.kept.items(previous)
        self.items = [*kept, *new]
        places = ["previous_response_id"] * len(kept) + [f"input.{i}" for i in range(len(new))]
        messages, self._places = _to_messages(self.items, places)
        return messages


def _to_messages(items: Sequence[Any], places: Sequence[str]) -> tuple[list[Any], list[_Place]]:
    """Convert items to messages; return these and the place that each comes from.

    Calls join the assistant's message that they follow. `places`: places of the items.
    """
    messages: list[Any] = []
    origins: list[_Place] = []
    for place, item in zip(places, items, strict=True):
        fields: Mapping[str, str] = {}
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            known = {"role", "content", "type", "id", "status", "phase"}
            rest = {key: value for key, value in item.items() if key not in known and value}
            if not isinstance(rest.get("tool_calls", []), list):
                where = f"{place}.tool_calls"
                raise invalid(f"{where}: must be a list", where, "invalid_type")
            content = _content(item.get("content"), f"{place}.content")
            messages.append({"role": item.get("role"), "content": content, **rest})
        elif kind == "function_call":
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": "", "tool_calls": []})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            try:
                read_call(call)
            except (KeyError, TypeError, ValueError, RecursionError, InputError):
                raise invalid(
                    f"{place}: must have call_id, name, and arguments that are a JSON object",
                    place,
                ) from None
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content, fields = _content(item.get("output"), f"{place}.output"), _OUTPUT_FIELDS
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            )
        else:
            raise invalid(
                f"{place}: must be a message, function_call or function_call_output",
                place, "unsupported_content",
            )  # fmt: skip
        origins += [(place, fields)] * (len(messages) - len(origins))
    return messages, origins


def _content(given: Any, place: str) -> Any:
    """Return a text, or its parts as a chat takes them."""
    if not isinstance(given, list):
        return given
    parts = []
    for part in given:
        if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text"):
            raise invalid(f"{place}: only text is supported", place, "unsupported_content")
        parts.append({"type": "text", "text": part.get("text")})
    return parts


def _format(given: Any) -> Any:
    """Translate `text.format`; in chats the fields of a schema are one level deeper."""
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    fields = {key: value for key, value in given.items() if key != "type"}
    return {"type": "json_schema", "json_schema": fields}


def _tools(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    for index, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise invalid(f"tools.{index}: only functions are supported", f"tools.{index}")
    return [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
        for tool in given
    ]


def _choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given
