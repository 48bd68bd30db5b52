"""Answers of /v1/responses: one response, whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edge.apps.serve.answers import AnswerFormat, extras
from edge.apps.serve.errors import ApiError
from edge.apps.serve.jobs import Ended, Piece
from edge.apps.serve.requests import ParsedRequest
from edge.runtime.model import Model
from edge.text.tools import CallDelta

if TYPE_CHECKING:
    from edge.apps.serve.responses import ResponseRequest

Given = Mapping[str, Any]
# finish reason → the API's word; other reasons are sent as they are
_ENDINGS = {"length": "max_output_tokens"}


class ResponseFormat(AnswerFormat):
    """Formatter of one response, whole or as events. A whole one is what its events build."""

    end = b""

    def __init__(
        self, asked: ParsedRequest, name: str, model: Model, request: ResponseRequest
    ) -> None:
        super().__init__(asked, name, model)
        self._request, sent = request, request.sent
        self._items: list[dict[str, Any]] = []
        self._count = 0
        params = asked.params
        self._body: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": self._head["created"],
            "model": name,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": sent.get("instructions"),
            "max_output_tokens": sent.get("max_output_tokens"),
            "metadata": sent.get("metadata") or {},
            "parallel_tool_calls": sent.get("parallel_tool_calls") is not False,
            "previous_response_id": sent.get("previous_response_id"),
            "store": sent.get("store") is not False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(sent.get("text") or {})},
            "tool_choice": sent.get("tool_choice") or "auto",
            "tools": [{"strict": True, **tool} for tool in sent.get("tools") or ()],
            "top_p": params.top_p,
            "truncation": "disabled",
            "output": self._items,
            "usage": None,
        }

    @staticmethod
    def line(chunk: Given) -> bytes:
        events = chunk["events"]
        return b"".join(b"event: %s\n" % event["type"].encode() + AnswerFormat.line(event)
                        for event in events)  # fmt: skip

    def failure(self, problem: ApiError) -> dict[str, Any]:
        error = self.error(self._request.named(problem))["error"]
        fields = {key: error[key] for key in ("code", "message", "param")}
        return {"events": [self._event("error", **fields)]}

    def opening(self) -> list[dict[str, Any]]:
        return [{"events": [self._event(f"response.{word}", response=self._body)
                            for word in ("created", "in_progress")]}]  # fmt: skip

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        events = list(self._add_piece(piece))
        return {"events": events} if events else None

    def closing(self, ended: Ended) -> list[dict[str, Any]]:
        events = list(self._finish(ended))
        return [{"events": [*events, self._event(f"response.{self._body['status']}",
                                                 response=self._body)]}]  # fmt: skip

    def whole(self, pieces: Sequence[Piece], ended: Ended) -> dict[str, Any]:
        for piece in pieces:
            list(self._add_piece(piece))
        list(self._finish(ended))
        return self._body

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the last item."""
        index = len(self._items) - 1
        return self._event(f"response.{kind}", item_id=self._items[index]["id"], output_index=index,
                           **fields)  # fmt: skip

    def _add_piece(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Add a piece to the output; yield its events."""
        text = self._shown(piece)
        formatted = self._logprobs(piece.logprobs)
        logprobs = formatted["content"] if formatted else []
        if text or logprobs:
            if not self._items or self._items[-1]["type"] != "message":
                yield from self._finish_item()
                yield from self._begin_message()
            part = self._items[-1]["content"][0]
            part["text"] += text
            part["logprobs"] += logprobs
            yield self._item_event(
                "output_text.delta", content_index=0, delta=text, logprobs=logprobs
            )
        for delta in piece.calls:
            yield from self._add_call(delta)

    def _begin_message(self) -> Iterator[dict[str, Any]]:
        part: dict[str, Any] = {
            "type": "output_text",
            "text": "",
            "annotations": [],
            "logprobs": [],
        }
        item: dict[str, Any] = {
            "type": "message", "id": f"msg_{secrets.token_hex(12)}", "role": "assistant",
            "status": "in_progress", "content": [],
        }  # fmt: skip
        yield self._add_item(item)
        item["content"] = [part]
        yield self._item_event("content_part.added", content_index=0, part=dict(part, logprobs=[]))

    def _add_call(self, delta: CallDelta) -> Iterator[dict[str, Any]]:
        if delta.name is not None:
            yield from self._finish_item()
            yield self._add_item(
                {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "call_id": delta.id,
                 "name": delta.name, "arguments": "", "status": "in_progress"}
            )  # fmt: skip
        if delta.text:
            self._items[-1]["arguments"] += delta.text
            yield self._item_event("function_call_arguments.delta", delta=delta.text)

    def _add_item(self, item: dict[str, Any]) -> dict[str, Any]:
        self._items.append(item)
        index = len(self._items) - 1
        return self._event("response.output_item.added", output_index=index, item=dict(item))

    def _finish_item(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Yield the events that end the last item, unless it has ended."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield self._item_event("output_text.done", content_index=0, text=part["text"],
                                   logprobs=part["logprobs"])  # fmt: skip
            yield self._item_event("content_part.done", content_index=0, part=part)
        else:
            yield self._item_event("function_call_arguments.done", arguments=item["arguments"])
        index = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _finish(self, ended: Ended) -> Iterator[dict[str, Any]]:
        [result] = ended.results
        reason = result.finish_reason
        complete = reason == "stop"
        called = {call.id for call in result.tool_calls}
        last = self._items[-1] if self._items else {}
        yield from self._finish_item(
            "completed" if complete or last.get("call_id") in called else "incomplete"
        )
        usage = self._usage(ended)
        self._body |= {
            "status": "completed" if complete else "incomplete",
            "completed_at": time.time() if complete else None,
            "incomplete_details": None if complete else {"reason": _ENDINGS.get(reason, reason)},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": ended.reused,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        self._body |= extras(result)
        if self._body["store"]:
            output = [item for item in self._items
                      if item["type"] == "message" or item["call_id"] in called]  # fmt: skip
            self._request.kept.keep(self._body["id"], [*self._request.items, *output])
