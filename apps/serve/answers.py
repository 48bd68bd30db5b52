"""Answers in the API's shapes: whole, or in chunks."""

from __future__ import annotations

import secrets
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from edge.apps.serve.errors import ApiError, encode
from edge.apps.serve.jobs import Embedded, Ended, Piece
from edge.apps.serve.requests import ParsedRequest
from edge.runtime.model import Model
from edge.runtime.result import GenerationResult, TokenLogprob
from edge.runtime.speculate.accept import EXACT
from edge.runtime.speculate.shape import LOOK_UP
from edge.text.tools import CallDelta

# finish reasons that the API has too; others are reported in `finish_detail`
REASONS = {"stop": "stop", "length": "length"}


def embeddings(made: Embedded, name: str) -> dict[str, Any]:
    """Return the answer of /v1/embeddings. Base64 encodes the numbers as little-endian f32."""
    plain = [vector.astype("<f4") for vector in made.vectors]
    encoded: list[Any] = [
        b64encode(vector.tobytes()).decode() if made.asked.base64 else vector.tolist()
        for vector in plain
    ]
    data = [
        {"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(encoded)
    ]
    usage = {"prompt_tokens": made.asked.count, "total_tokens": made.asked.count}
    return {"object": "list", "data": data, "model": name, "usage": usage}


class AnswerFormat:
    """Formatter of the answers to one request.

    Chat and completions differ in names only: `message` and `delta` hold the text of a chat,
    `text` that of a completion.

    Attributes:
        media_type: media type of a stream. end: its last bytes.
    """

    media_type = "text/event-stream"
    end = b"data: [DONE]\n\n"

    def __init__(self, asked: ParsedRequest, name: str, model: Model) -> None:
        self._asked = asked
        self._tokenizer = model.tokenizer
        self._gaps = [asked.gap] * asked.count
        kind = "chat.completion" if asked.chat else "text_completion"
        self._chunk_kind = f"{kind}.chunk" if asked.chat else kind
        self._kind = kind
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"fp_{model.fingerprint[:12]}",
        }

    @staticmethod
    def line(chunk: Mapping[str, Any]) -> bytes:
        """Encode a chunk for sending."""
        return b"data: " + encode(chunk) + b"\n\n"

    @staticmethod
    def error(problem: ApiError) -> dict[str, Any]:
        """Return the body of a refusal, or of a failure during the answer."""
        return problem.body()

    def failure(self, problem: ApiError) -> Mapping[str, Any]:
        """Return the chunk that ends a failed stream."""
        return self.error(problem)

    def _shown(self, piece: Piece) -> str:
        """Return the text for clients, without white space that belongs to the template."""
        text, gap = piece.text, self._gaps[piece.choice]
        while gap and text:
            if text[0] != gap[0]:
                gap = ""
                break
            text, gap = text[1:], gap[1:]
        self._gaps[piece.choice] = gap
        return text

    def whole(self, pieces: Sequence[Piece], ended: Ended) -> dict[str, Any]:
        """Return the response that is not streamed."""
        choices = []
        for index, result in enumerate(ended.results):
            own_pieces = [piece for piece in pieces if piece.choice == index]
            text = "".join(map(self._shown, own_pieces))
            content: dict[str, Any] = {"text": text}
            if self._asked.chat:
                content = {"message": _message(text, result)}
            logprobs = self._logprobs([entry for piece in own_pieces for entry in piece.logprobs])
            choices.append({"index": index, **content, "logprobs": logprobs, **_reason(result)})
        return {
            **self._head,
            "object": self._kind,
            "choices": choices,
            "usage": self._usage(ended),
            **extras(ended.results[0]),
        }

    def opening(self) -> list[dict[str, Any]]:
        """Return the first chunks, which name the role; none for completions."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(i, delta) for i in range(self._asked.count)] if self._asked.chat else []

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        """Return a chunk of text, or None if there is nothing to show."""
        text, logprobs = self._shown(piece), self._logprobs(piece.logprobs)
        if not text and not piece.logprobs and not piece.calls:
            return None
        delta: Any = text
        if self._asked.chat:
            delta = {"content": text} if text or not piece.calls else {}
            if piece.calls:
                delta["tool_calls"] = list(map(_delta, piece.calls))
        return self._chunk(piece.choice, delta, logprobs=logprobs)

    def closing(self, ended: Ended) -> list[dict[str, Any]]:
        """Return the last chunks, with the finish reasons; then the usage, if requested."""
        delta: Any = {} if self._asked.chat else ""
        chunks = [self._chunk(i, delta, result) for i, result in enumerate(ended.results)]
        chunks[-1] |= extras(ended.results[0])
        if self._asked.include_usage:
            last = {**self._head, "object": self._chunk_kind, "choices": []}
            chunks.append({**last, "usage": self._usage(ended)})
        return chunks

    def _chunk(
        self,
        index: int,
        delta: Any,
        result: GenerationResult | None = None,
        *,
        logprobs: Any = None,
    ) -> dict[str, Any]:
        reason = {"finish_reason": None} if result is None else _reason(result)
        key = "delta" if self._asked.chat else "text"
        choice = {"index": index, key: delta, "logprobs": logprobs, **reason}
        chunk = {**self._head, "object": self._chunk_kind, "choices": [choice]}
        # in earlier chunks the usage is null
        return {**chunk, "usage": None} if self._asked.include_usage else chunk

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Return logprobs in the shape of the chat or of the completions API."""
        if self._asked.params.logprobs is None:
            return None
        if self._asked.chat:
            return {"content": self._entries(logprobs), "refusal": None}
        return {
            "tokens": [self._spelled(entry.token) for entry in logprobs],
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                {self._spelled(token): _finite(value) for token, value in entry.top}
                for entry in logprobs
            ],
            "text_offset": [entry.at for entry in logprobs],
        }

    def _entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            self._token(entry.token, entry.logprob)
            | {"top_logprobs": [self._token(*alternative) for alternative in entry.top]}
            for entry in logprobs
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        text = data.decode(errors="replace") or self._tokenizer.id_to_piece(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    def _spelled(self, token: int) -> str:
        """Return a token as completions have it, with escapes for bytes that are no text."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode() or self._tokenizer.id_to_piece(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _usage(self, ended: Ended) -> dict[str, Any]:
        prompt = len(self._asked.tokens)
        generated = sum(len(result.tokens) for result in ended.results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": ended.reused},
        }


def _message(text: str, result: GenerationResult) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if result.tool_calls:
        message["content"] = text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.name, "arguments": call.source}}
            for call in result.tool_calls
        ]  # fmt: skip
    return message


def _delta(delta: CallDelta) -> dict[str, Any]:
    """Return the next part of a call; the first part names the function."""
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.text}}
    function = {"name": delta.name, "arguments": delta.text}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def _finite(logprob: float) -> float:
    """Clip a logprob to the API's lowest value, as JSON has no infinity."""
    return max(logprob, -9999.0)


def _reason(result: GenerationResult) -> dict[str, Any]:
    """Return `finish_reason`, with `finish_detail` for a reason that the API does not have."""
    reason = result.finish_reason
    if reason == "stop" and result.tool_calls:
        return {"finish_reason": "tool_calls"}
    if reason in REASONS:
        return {"finish_reason": REASONS[reason]}
    return {"finish_reason": "length", "finish_detail": reason}


def extras(result: GenerationResult) -> dict[str, Any]:
    """Return additions to the API: `timings` of an answer, from the model's start on it, and
    `speculation`: what drafts did for it, and the acceptance rule.

    Why a drafter was given up goes to the log only, since it may name files.
    """
    first, speed = result.timings.ttft_s, result.timings.tokens_per_s
    timings = {
        "ttft_ms": first and round(first * 1e3, 3),
        "tokens_per_s": speed and round(speed, 3),
    }
    drafted = result.speculation
    if drafted is None:
        return {"timings": timings}
    return {
        "timings": timings,
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
        },
    }
