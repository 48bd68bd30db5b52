"""Answers in the API's shapes: whole, or in chunks."""

from __future__ import annotations

import secrets
import time
from typing import Any

from edge.apps.serve.requests import ParsedRequest
from edge.apps.serve.worker import Ended
from edge.runtime.speculate.accept import EXACT
from edge.runtime.speculate.shape import LOOK_UP

# the API knows two of our reasons; the others are told beside it
REASONS = {"stop": "stop", "length": "length"}


class AnswerFormat:
    """Writes one answer.

    Chat and completions differ in names only: `message` and `delta` hold the text of the one,
    `text` that of the other.
    """

    def __init__(self, asked: ParsedRequest, name: str, fingerprint: str) -> None:
        self._asked = asked
        self._gap = asked.gap
        kind = "chat.completion" if asked.chat else "text_completion"
        self._chunk_kind = f"{kind}.chunk" if asked.chat else kind
        self._kind = kind
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"fp_{fingerprint[:12]}",
        }

    def shown(self, piece: str) -> str:
        """The piece as clients get it: without white space that belongs to the template."""
        while self._gap and piece:
            if piece[0] != self._gap[0]:
                self._gap = ""
                break
            piece, self._gap = piece[1:], self._gap[1:]
        return piece

    def whole(self, text: str, ended: Ended) -> dict[str, Any]:
        """The response when it is not streamed."""
        said: dict[str, Any] = {"text": text}
        if self._asked.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **said, "logprobs": None, **_reason(ended)}
        return {
            **self._head,
            "object": self._kind,
            "choices": [choice],
            "usage": self._usage(ended),
            **_drafting(ended),
        }

    def opening(self) -> dict[str, Any] | None:
        """The first chunk, which says who speaks; None for completions."""
        return self._chunk({"role": "assistant", "content": ""}) if self._asked.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk of text."""
        return self._chunk({"content": text} if self._asked.chat else text)

    def closing(self, ended: Ended) -> list[dict[str, Any]]:
        """The last chunk, with the reason; then the usage, if it was asked for."""
        chunks = [self._chunk({} if self._asked.chat else "", ended)]
        if self._asked.include_usage:
            last = {**self._head, "object": self._chunk_kind, "choices": []}
            chunks.append({**last, "usage": self._usage(ended)})
        return chunks

    def _chunk(self, said: Any, ended: Ended | None = None) -> dict[str, Any]:
        reason = {"finish_reason": None} if ended is None else _reason(ended)
        key = "delta" if self._asked.chat else "text"
        choice = {"index": 0, key: said, "logprobs": None, **reason}
        chunk = {**self._head, "object": self._chunk_kind, "choices": [choice]}
        if ended is not None:
            chunk |= _drafting(ended)
        # chunks before the one with the usage have it as null
        return {**chunk, "usage": None} if self._asked.include_usage else chunk

    def _usage(self, ended: Ended) -> dict[str, Any]:
        prompt, made = len(self._asked.tokens), len(ended.result.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": ended.reused},
        }


def _reason(ended: Ended) -> dict[str, Any]:
    """`finish_reason`, with `finish_detail` where the API has no word for what ended the answer."""
    reason = ended.result.finish_reason
    if reason in REASONS:
        return {"finish_reason": REASONS[reason]}
    return {"finish_reason": "length", "finish_detail": reason}


def _drafting(ended: Ended) -> dict[str, Any]:
    """`speculation`, beyond the API: what drafts did for this answer, and the rule of acceptance.

    Why a drafter was given up is for the log, which may name files.
    """
    drafted = ended.result.speculation
    if drafted is None:
        return {}
    return {
        "speculation": {
            "drafter": drafted.drafter,
            "accept": drafted.accept,
            "lossy": drafted.accept != EXACT.name,
            "acceptance_length": drafted.acceptance_length,
            "rounds": drafted.rounds,
            "plain_steps": drafted.steps,
            "drafted_tokens": drafted.drafted,
            "accepted_tokens": drafted.accepted,
            "looked_up": sum(
                share.rounds for source, share in drafted.sources.items() if source == LOOK_UP
            ),
            "given_up": drafted.problem != "",
        }
    }
