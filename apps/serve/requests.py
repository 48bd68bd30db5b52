"""Requests of the API, checked and turned into tokens and parameters.

All faults of a request are reported at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from edge.apps.serve.bodies import (
    SAMPLING,
    UNSUPPORTED,
    ChatBody,
    ChatMessage,
    CompletionBody,
    EmbeddingBody,
)
from edge.apps.serve.errors import ApiError, invalid
from edge.bundle.strict_json import loads
from edge.errors import InputError
from edge.runtime.constrain.mask import open_mask
from edge.runtime.constrain.tools import ToolUse, tool_use
from edge.runtime.embed import Pooling
from edge.runtime.model import Model
from edge.runtime.parameters import SamplingParams, make_params, plain_number
from edge.text.tools import Declared

# constraint → the request's field that it came from
FORM_FIELDS = {"json_schema": "response_format.json_schema.schema"}
VLLM_FIELDS = {"json_schema": "structured_outputs.json", "regex": "structured_outputs.regex",
               "grammar": "structured_outputs.grammar",
               "choices": "structured_outputs.choice"}  # fmt: skip


@dataclass(frozen=True)
class ParsedRequest:
    """A valid request for answers.

    Attributes:
        chat: whether the answer is a message; otherwise it continues a text.
        tokens: the whole prompt.
        stream, include_usage: how the answer is sent.
        gap: white space that the model writes before a message and that is no part of it.
        count: number of answers.
        tools: tools that the answers may call.
    """

    chat: bool
    tokens: tuple[int, ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    gap: str = ""
    count: int = 1
    tools: ToolUse | None = None


@dataclass(frozen=True)
class EmbeddingRequest:
    """A valid request for embeddings.

    Attributes:
        inputs: tokens of each text.
        pooling: see `Model.embed`.
        base64: whether the vectors are sent in Base64.
        tokens: empty, as there is no prompt to answer.
    """

    inputs: tuple[tuple[int, ...], ...]
    pooling: Pooling
    base64: bool
    tokens: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.inputs))


@dataclass(frozen=True)
class _Fault:
    param: str
    message: str
    code: str = "invalid_value"


def read(given: Mapping[str, Any], *, chat: bool, model: Model, max_tokens: int) -> ParsedRequest:
    """Check and encode a request. Too slow for the event loop when the prompt is long.

    `max_tokens`: maximum tokens of the prompt. Raises ApiError or EdgeError.
    """
    encoder = _Encoder(model, max_tokens)
    body, params, tools = _checked(given, ChatBody if chat else CompletionBody, model)
    gap = ""
    if isinstance(body, ChatBody):
        tokens = encoder.chat(body.messages, tools.declared if tools else ())
        gap = model.template.gap if model.template is not None else ""
    else:
        tokens = encoder.text(body.prompt)
    usage = body.stream_options.include_usage
    return ParsedRequest(chat, tuple(tokens), params, body.stream, usage, gap, body.n, tools)


def read_embeddings(given: Mapping[str, Any], *, model: Model, max_tokens: int) -> EmbeddingRequest:
    """Check and encode a request of /v1/embeddings. `max_tokens`: maximum tokens of each text."""
    encoder, width = _Encoder(model, max_tokens), model.config.d_model
    try:
        body = EmbeddingBody.model_validate(given)
    except ValidationError as problem:
        faults = problem.errors(include_url=False)
        raise _refusal([_fault(fault) for fault in faults]) from None
    if body.dimensions not in (None, width):
        raise invalid(f"dimensions: vectors of this model have {width}", "dimensions")
    inputs = tuple(tuple(encoder.text(text, "input")) for text in body.input)
    return EmbeddingRequest(inputs, body.pooling, body.encoding_format == "base64")


def parse(data: bytes) -> Mapping[str, Any]:
    """Parse a JSON object, bounded and strict. Raises ApiError 400 for anything else."""
    try:
        body = loads(data)
    except UnicodeDecodeError as problem:
        raise ApiError(
            400, f"the body is not UTF-8 at byte {problem.start}", code="invalid_json"
        ) from None
    except (ValueError, RecursionError) as problem:
        raise ApiError(400, f"the body is not JSON: {problem}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _checked(
    given: Mapping[str, Any], kind: type[ChatBody] | type[CompletionBody], model: Model
) -> tuple[ChatBody | CompletionBody, SamplingParams, ToolUse | None]:
    """Return the body, its sampling parameters and its tools. Raises ApiError with all faults."""
    faults: list[_Fault] = []
    body, tools, sampling = None, None, {name: given.get(name) for name in SAMPLING}
    try:
        body = kind.model_validate(given)
        sampling = body.sampling(model)
    except ValidationError as problem:
        faults += map(_fault, problem.errors(include_url=False))
    try:
        if isinstance(body, ChatBody) and model.template is not None:
            tools = tool_use(
                body.tools, body.tool_choice, body.parallel_tool_calls,
                model.template, model.tokenizer,
            )  # fmt: skip
        if tools is not None and isinstance(body, ChatBody):
            # the model's own stop strings apply to free text only
            stops = sampling if tools.free else sampling | {"stop": body.stop}
            sampling = tools.sampling(stops, model.defaults)
        params = make_params(model.defaults, sampling)
        open_mask(model.tokenizer, params.constraint, continued=kind is CompletionBody)
    except InputError as problem:
        field = problem.field or ""
        form_fields = FORM_FIELDS if given.get("response_format") else VLLM_FIELDS
        if isinstance(body, ChatBody) and body.response_format.type == "json_object":
            form_fields = {"json_schema": "response_format"}
        field = form_fields.get(field.partition(".")[0], field)
        # a conflict names a second constraint
        message = re.sub(
            r"(?<=given together with )\w+",
            lambda other: form_fields.get(other[0], other[0]),
            problem.message,
        )
        faults.append(_Fault(field, f"{field}: {message}"))
    else:
        size = model.tokenizer.vocab_size
        faults += [
            _Fault(f"logit_bias.{token}", f"logit_bias: {token} is not below {size}")
            for token in params.logit_bias
            if token >= size
        ]
    if faults or body is None:
        raise _refusal(faults)
    return body, params, tools


def _refusal(faults: Sequence[_Fault]) -> ApiError:
    first = faults[0]
    return invalid("; ".join(fault.message for fault in faults), first.param, first.code)


def _fault(error: Any) -> _Fault:
    """Convert one of pydantic's errors to the API's terms."""
    kind, message = error["type"], _plain_message(error)
    loc = error["loc"][:-2] if error["loc"][-1:] == ("[key]",) else error["loc"]
    names = [str(part)[:64] for part in loc if not str(part).startswith("<")]
    param = ".".join(names)
    if not param:
        return _Fault(param, message)
    if kind == "extra_forbidden":
        known = dict.fromkeys(CompletionBody.model_fields, "/v1/completions")
        known |= dict.fromkeys(ChatBody.model_fields, "/v1/chat/completions")
        route = known.get(param)
        hint = f" (it belongs to {route})" if route else _suggest(param, list(known))
        text = f"unknown parameter {param!r}{'' if names[1:] else hint}"
        return _Fault(param, text, "unknown_parameter")
    if refused := [index for index, name in enumerate(names) if name in UNSUPPORTED]:
        param = ".".join(names[: refused[0] + 1])
        why = "" if kind == "none_required" else f": {message}"
        return _Fault(param, f"{param} is not supported{why}", "unsupported_parameter")
    wrong_type = kind.endswith("_type") or kind == "missing"
    code = kind if kind == "unsupported_content" else "invalid_type" if wrong_type else None
    return _Fault(param, f"{param}: {message}", code or "invalid_value")


# pydantic's kind of error → what the client must send
_KINDS = {
    "string_type": "a text", "list_type": "a list", "bool_type": "true or false",
    "bool_parsing": "true or false", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object", "int_type": "a whole number",
    "int_from_float": "a whole number", "int_parsing": "a whole number",
    "float_type": "a number", "float_parsing": "a number",
}  # fmt: skip
_BOUNDS = {
    "greater_than_equal": "at least {}", "greater_than": "more than {}",
    "less_than_equal": "at most {}", "less_than": "less than {}",
}  # fmt: skip


def _plain_message(error: Any) -> str:
    """Return pydantic's message, reworded where it says how we check instead of what to send."""
    message, kind, given = str(error["msg"]), error["type"], error["input"]
    if kind == "string_pattern_mismatch":
        return "must have token ids as its keys, written in digits"
    if kind in _KINDS or kind in _BOUNDS:
        what = _KINDS.get(kind) or _BOUNDS[kind].format(*map(plain_number, error["ctx"].values()))
        is_scalar = isinstance(given, (str, int, float, type(None)))
        return f"must be {what}" + (f", not {json.dumps(given)[:60]}" if is_scalar else "")
    if kind == "literal_error" and isinstance(error["input"], str):
        message += _suggest(error["input"], re.findall(r"'(\w+)'", message))
    message = message.replace("Field required", "is missing").replace(" after validation", "")
    return re.sub(r"^\w+ should (be|have)", r"must \1", message)


def _suggest(word: str, known: Sequence[str]) -> str:
    """Return a question that suggests the known word closest to a misspelt one."""
    matches = get_close_matches(word[:64].lower(), known, 1, 0.75)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


class _Encoder:
    """Encoder of prompts of at most `most` tokens."""

    def __init__(self, model: Model, most: int) -> None:
        self._model = model
        self._max_tokens = most

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Declared]) -> list[int]:
        template = self._model.template
        if template is None:
            raise ApiError(
                400, "this model has no chat template: use /v1/completions to continue a text",
                code="no_chat_template", param="messages",
            )  # fmt: skip
        if messages[-1].role == "assistant":
            raise invalid("messages: must end with a message to answer", "messages")
        converted = [message.read() for message in messages]
        self._check_size(sum(len(message.content.encode()) for message in converted), "messages")
        return self._checked(template.encode(converted, tools=tools), "messages")

    def text(self, prompt: str | list[int], param: str = "prompt") -> list[int]:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, str):
            self._check_size(len(prompt.encode()), param)
            tokens = tokenizer.encode(prompt)
            if tokenizer.bos is not None and (tokenizer.add_bos or not tokens):
                tokens.insert(0, tokenizer.bos)
        else:
            tokens, size = prompt, tokenizer.vocab_size
            if outside := [token for token in tokens if not 0 <= token < size]:
                raise invalid(f"{param}: token {outside[0]} is not between 0 and {size - 1}", param)
        if (not prompt and param == "input") or not tokens:
            raise invalid(f"the {param} is empty", param)
        return self._checked(tokens, param)

    def _check_size(self, size: int, param: str) -> None:
        """Refuse, before encoding, a text that cannot fit whatever its tokens are."""
        self._check(-(-size // self._model.tokenizer.longest_piece), param)

    def _checked(self, tokens: list[int], param: str) -> list[int]:
        self._check(len(tokens), param)
        return tokens

    def _check(self, count: int, param: str) -> None:
        if count > self._max_tokens:
            raise ApiError(
                400,
                f"the prompt has at least {count} tokens; this server takes {self._max_tokens}",
                code="context_length_exceeded", param=param,
            )  # fmt: skip
