"""Requests as JSON to what is run: tokens of the prompt and how to sample from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.apps.serve import parameters
from edge.apps.serve.errors import ApiError, invalid
from edge.bundle.strict_json import loads
from edge.errors import InputError
from edge.runtime.model import Model
from edge.runtime.sampling import SamplingParams, make_params
from edge.text.template import Message
from edge.text.tokenizer import check_text

COMPLETION_TOKENS = 16  # the API's default of /v1/completions
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# of messages that clients send back as they received them
EMPTY = {"refusal", "annotations", "audio", "function_call", "tool_calls", "name"}


@dataclass(frozen=True)
class Ask:
    """A request that was understood.

    Attributes:
        chat: whether the answer is a message; else it continues a text.
        tokens: the whole prompt.
        gap: white space that the model writes before a message and that is no part of it.
    """

    chat: bool
    tokens: tuple[int, ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    gap: str = ""


def read(data: bytes, *, chat: bool, model: Model, name: str, max_tokens: int) -> Ask:
    """Parse, check, encode. Takes as long as the prompt does: not for the event loop.

    `max_tokens`: of the prompt. Raises ApiError, EdgeError.
    """
    body = parse(data)
    own = {"messages"} if chat else {"prompt"}
    given = parameters.read(body, own=own, name=name, chat=chat)
    sampling = dict(given.sampling)
    if chat:
        # what ends this model's turns, and what was asked for
        sampling["stop"] = (*(model.defaults.get("stop") or ()), *sampling["stop"])
    elif sampling["max_tokens"] is None:
        sampling["max_tokens"] = COMPLETION_TOKENS
    params = make_params(model.defaults, sampling)
    _check_bias(params, model)
    encode = _Encoder(model, max_tokens)
    tokens = encode.chat(body.get("messages")) if chat else encode.text(body.get("prompt"))
    gap = model.template.gap if chat and model.template is not None else ""
    return Ask(chat, tuple(tokens), params, given.stream, given.include_usage, gap)


def parse(data: bytes) -> Mapping[str, Any]:
    """A JSON object, bounded and strict. 400 when it is something else."""
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


def _check_bias(params: SamplingParams, model: Model) -> None:
    size = model.tokenizer.vocab_size
    for token in params.logit_bias:
        if token >= size:
            raise invalid(f"logit_bias: {token} is not below {size}", f"logit_bias.{token}")


class _Encoder:
    """Prompts to tokens, no more than `most` of them."""

    def __init__(self, model: Model, most: int) -> None:
        self._model = model
        self._most = most
        self._field = "prompt"

    def chat(self, messages: Any) -> list[int]:
        self._field = "messages"
        template = self._model.template
        if template is None:
            raise ApiError(
                400, "this model has no chat template: use /v1/completions to continue a text",
                code="no_chat_template", param="messages",
            )  # fmt: skip
        if not isinstance(messages, list) or not messages:
            raise invalid("messages: must be a list of at least one message", "messages")
        read = [_message(index, item) for index, item in enumerate(messages)]
        if read[-1].role == "assistant":
            raise invalid("messages: must end with a message to answer", "messages")
        self._check_size(sum(len(message.content.encode()) for message in read))
        return self._checked(template.encode(read))

    def text(self, prompt: Any) -> list[int]:
        tokenizer = self._model.tokenizer
        # a list of one prompt is a prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if prompt is None or isinstance(prompt, str):
            tokens = self._encoded(prompt or "")
            if tokenizer.bos is not None and (tokenizer.add_bos or not tokens):
                tokens.insert(0, tokenizer.bos)
        else:
            tokens = _ids(prompt, tokenizer.vocab_size)
        if not tokens:
            raise invalid("prompt: is empty", "prompt")
        return self._checked(tokens)

    def _encoded(self, prompt: str) -> list[int]:
        check_text(prompt)
        self._check_size(len(prompt.encode()))
        return self._model.tokenizer.encode(prompt)

    def _check_size(self, size: int) -> None:
        """Refuse, before it is encoded, what cannot fit whatever its tokens are."""
        self._check(-(-size // self._model.tokenizer.longest_piece))

    def _checked(self, tokens: list[int]) -> list[int]:
        self._check(len(tokens))
        return tokens

    def _check(self, count: int) -> None:
        if count > self._most:
            raise ApiError(
                400, f"the prompt has at least {count} tokens, this server takes {self._most}",
                code="context_length_exceeded", param=self._field,
            )  # fmt: skip


def _ids(prompt: Any, size: int) -> list[int]:
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise invalid(
            "prompt: must be one text, or one list of token ids", "prompt", "invalid_type"
        )
    for token in prompt:
        if not 0 <= token < size:
            raise invalid(f"prompt: token {token} is not between 0 and {size - 1}", "prompt")
    return list(prompt)


def _message(index: int, item: Any) -> Message:
    where = f"messages.{index}"
    if not isinstance(item, dict):
        raise invalid(f"{where}: must be an object", where, "invalid_type")
    for key, value in item.items():
        if key not in EMPTY | {"role", "content"}:
            raise invalid(f"{where}: {key[:64]!r} is no field", where, "unknown_parameter")
        if key in EMPTY and value not in (None, [], ""):
            raise invalid(f"{where}.{key} is not supported", f"{where}.{key}",
                          "unsupported_parameter")  # fmt: skip
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(
            f"{where}.role: must be system, developer, user or assistant", f"{where}.role"
        )
    return Message(ROLES[role], _content(item.get("content"), f"{where}.content"))


def _content(value: Any, where: str) -> str:
    """A text, or a list of parts that are texts, which are joined as they stand."""
    if not isinstance(value, str | list):
        raise invalid(f"{where}: must be a string or a list of text parts", where, "invalid_type")
    text = value if isinstance(value, str) else "".join(_parts(value, where))
    try:
        check_text(text)
    except InputError as problem:
        raise invalid(f"{where}: {problem.message}", where) from None
    return text


def _parts(parts: Sequence[Any], where: str) -> list[str]:
    texts: list[str] = []
    for index, part in enumerate(parts):
        fields = part if isinstance(part, dict) else {}
        text = fields.get("text")
        if fields.get("type") != "text" or not isinstance(text, str) or len(fields) > 2:
            raise invalid(
                f"{where}.{index}: only text parts are supported", f"{where}.{index}",
                "unsupported_content",
            )  # fmt: skip
        texts.append(text)
    return texts
