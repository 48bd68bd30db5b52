"""Requests of the API: what may be asked for, checked, and turned into tokens and parameters.

Nothing that would change the output is dropped silently: a parameter is taken, accepted because its
value asks for nothing, or refused. A null is the same as an absence, as in the API. All faults of a
request are told at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from edge.apps.serve.errors import ApiError, invalid
from edge.bundle.strict_json import loads
from edge.errors import InputError
from edge.runtime.constrain.mask import open_mask
from edge.runtime.constrain.statement import KINDS
from edge.runtime.constrain.tools import MAX_TOOLS, ToolUse, tool_use
from edge.runtime.model import Model
from edge.runtime.sampling import SamplingParams, make_params
from edge.runtime.transcript import read_call
from edge.text.template import Message
from edge.text.tokenizer import check_text
from edge.text.tools import Declared, ToolCall

COMPLETION_TOKENS = 16  # the API's default of /v1/completions
BIAS = 100.0  # the API's bounds of a logit bias
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# checked by the sampler, and called there as they are here
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "repetition_window")  # fmt: skip
MOST_CHOICES = 128  # the API's bound of answers to one request
MOST_LOGPROBS = 20  # and of tokens to report in the place of one
# where clients wrote what holds an answer to a form
FORM_FIELDS = {"json_schema": "response_format.json_schema.schema"}
VLLM_FIELDS = {"json_schema": "structured_outputs.json", "regex": "structured_outputs.regex",
               "grammar": "structured_outputs.grammar",
               "choices": "structured_outputs.choice"}  # fmt: skip


@dataclass(frozen=True)
class ParsedRequest:
    """A request that was understood.

    Attributes:
        chat: whether the answer is a message; otherwise it continues a text.
        tokens: the whole prompt.
        stream, include_usage: how the answer is sent.
        gap: white space that the model writes before a message and that is no part of it.
        count: how many answers.
        tools: what they may call.
    """

    chat: bool
    tokens: tuple[int, ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    gap: str = ""
    count: int = 1
    tools: ToolUse | None = None


# -- the fields ----------------------------------------------------------------------------------


def _text(value: str) -> str:
    try:
        check_text(value)
    except InputError as problem:
        raise PydanticCustomError("invalid_value", "{said}", {"said": problem.message}) from None
    return value


def _text_part(value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {"type", "text"} or value["type"] != "text":
        raise PydanticCustomError("unsupported_content", "only text parts are supported")
    return value["text"]


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("invalid_type", "must be a string or a list of strings")
    return tuple(stops)


def _prompt(value: Any) -> Any:
    """A text or token ids; a list of one prompt is a prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not ids and not isinstance(value, str):
        raise PydanticCustomError("invalid_type", "must be one text, or one list of token ids")
    return value


def _choice(value: Any) -> Any:
    """Of tools: a word, or the name of the one that is to be called."""
    try:
        return value if isinstance(value, str) else value["function"]["name"]
    except (KeyError, TypeError):
        raise PydanticCustomError("invalid_value", "must be a word, or name a function") from None


Text = Annotated[str, AfterValidator(_text)]
# tags in brackets are left out of the names that clients are told
Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Annotated[Text, BeforeValidator(_text_part)]], Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-BIAS, le=BIAS)]
Nothing = Annotated[list[Any], Field(max_length=0)]
Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class _JsonSchema(_Fields):
    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool = True  # or not: no answer is outside the schema


class ResponseFormat(_Fields):
    """The API's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PydanticCustomError(
                "invalid_value", "json_schema goes with the type json_schema, and with it alone"
            )
        return self

    def constraint(self) -> dict[str, Any]:
        """By the names of `SamplingParams`."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.schema_}
        return {"json_schema": {"type": "object"}} if self.type == "json_object" else {}


class StructuredOutputs(_Fields):
    """vLLM's way to ask for a form."""

    json_: Annotated[Any, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def constraint(self) -> dict[str, Any]:
        """By the names of `SamplingParams`."""
        given = {"json_schema": self.json_, "regex": self.regex, "grammar": self.grammar,
                 "choices": self.choice}  # fmt: skip
        if self.json_object and self.json_ is None:
            given["json_schema"] = {"type": "object"}
        return given


class UnsupportedInMessage(_Fields):
    """What messages have that clients send back as they received them: empty, or refused."""

    refusal: Literal[""] = ""
    annotations: Nothing = []
    audio: None = None
    function_call: None = None
    name: Literal[""] = ""


class Unsupported(_Fields):
    """Parameters that are not supported, with the values that ask for nothing."""

    best_of: Literal[1] = 1
    store: Literal[False] = False
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    functions: Nothing = []
    function_call: Literal["none", "auto"] = "none"
    modalities: list[Literal["text"]] = []
    reasoning_effort: Literal["none"] = "none"
    verbosity: Literal["medium"] = "medium"
    audio: None = None
    web_search_options: None = None
    moderation: None = None


class ChatMessage(UnsupportedInMessage):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] = []
    tool_call_id: Text | None = None
    content: Content = Field(cast(Any, None), validate_default=True)

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _calls(cls, value: Any, info: ValidationInfo) -> list[ToolCall]:
        if value and info.data.get("role") != "assistant":
            raise PydanticCustomError("invalid_value", "only in messages of the assistant")
        try:
            return [read_call(one) for one in value]
        except (KeyError, TypeError, ValueError, RecursionError, InputError):
            said = "must be calls of functions, with arguments that are JSON of an object"
            raise PydanticCustomError("invalid_value", said) from None

    @field_validator("tool_call_id")
    @classmethod
    def _of_a_result(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("role") != "tool":
            raise PydanticCustomError("invalid_value", "only in messages of a tool")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _something(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return "" if value is None else value

    def read(self) -> Message:
        """The message for the model's template; text parts are joined as they stand."""
        text = self.content if isinstance(self.content, str) else "".join(self.content)
        role = ROLES.get(self.role, self.role)
        return Message(role, text, None, tuple(self.tool_calls), self.tool_call_id)


class StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # nothing is padded here


class GenerationBody(Unsupported):
    """The parameters that both kinds of generation have."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    # any 64-bit number: the API's are signed, ours are not
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: dict[TokenKey, Bias] = {}
    response_format: ResponseFormat = ResponseFormat()
    structured_outputs: StructuredOutputs = StructuredOutputs()
    max_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_window: Any = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    # of billing, routing, caching and speed: accepted whatever they hold
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    prediction: Any = None

    @field_validator("structured_outputs")
    @classmethod
    def _one_form(cls, value: StructuredOutputs, info: ValidationInfo) -> StructuredOutputs:
        asked = info.data.get("response_format")
        if asked is not None and asked.constraint() and any(value.constraint().values()):
            raise PydanticCustomError("invalid_value", "cannot be given with response_format")
        return value

    @field_validator("stream_options")
    @classmethod
    def _only_with_stream(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise PydanticCustomError("invalid_value", "only with stream")
        return value

    def sampling(self, model: Model) -> dict[str, Any]:
        """What was asked for, by the names of `SamplingParams`."""
        form = self.response_format.constraint() or self.structured_outputs.constraint()
        return (
            {name: getattr(self, name) for name in SAMPLING}
            | form
            | {
                "max_tokens": self.max_tokens,
                "stop": self.stop,
                "seed": None if self.seed is None else self.seed % (1 << 64),
                "logit_bias": {int(token): bias for token, bias in self.logit_bias.items()},
            }
        )


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Any = None
    tools: Any = None
    tool_choice: Annotated[str, BeforeValidator(_choice)] = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Logprobs | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise PydanticCustomError("invalid_value", "only with logprobs")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("max_tokens") not in (None, value):
            raise PydanticCustomError("invalid_value", "differs from max_tokens")
        return value

    def sampling(self, model: Model) -> dict[str, Any]:
        """Answers end where this model's turns end, and where it was asked for."""
        found = super().sampling(model)
        found["logprobs"] = self.top_logprobs or 0 if self.logprobs else None
        if self.max_completion_tokens is not None:
            found["max_tokens"] = self.max_completion_tokens
        if any(found.get(kind) is not None for kind in KINDS):
            return found  # a model's own stop strings would cut what has to be whole
        return found | {"stop": (*(model.defaults.get("stop") or ()), *self.stop)}


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[Text | list[int], BeforeValidator(_prompt)] = ""
    max_tokens: Any = COMPLETION_TOKENS
    logprobs: Logprobs | None = None

    def sampling(self, model: Model) -> dict[str, Any]:
        return super().sampling(model) | {"logprobs": self.logprobs}


UNSUPPORTED = {*Unsupported.model_fields, *UnsupportedInMessage.model_fields}

# -- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fault:
    param: str
    message: str
    code: str = "invalid_value"


def read(given: Mapping[str, Any], *, chat: bool, model: Model, max_tokens: int) -> ParsedRequest:
    """Check, encode. Takes as long as the prompt does: not for the event loop.

    `max_tokens`: of the prompt. Raises ApiError, EdgeError.
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


def parse(data: bytes) -> Mapping[str, Any]:
    """A JSON object, bounded and strict. Raises ApiError 400 for anything else."""
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
    """The body, its sampling parameters and its tools. Raises ApiError with all faults."""
    faults: list[_Fault] = []
    body, tools, sampling = None, None, {name: given.get(name) for name in SAMPLING}
    try:
        body = kind.model_validate(given)
        sampling = body.sampling(model)
    except ValidationError as problem:
        faults += map(_fault, problem.errors(include_url=False, include_context=False))
    try:
        if isinstance(body, ChatBody) and model.template is not None:
            tools = tool_use(
                body.tools, body.tool_choice, body.parallel_tool_calls,
                model.template, model.tokenizer,
            )  # fmt: skip
        if tools is not None and isinstance(body, ChatBody):
            # the model's own stop strings are for its talk
            stops = sampling if tools.free else sampling | {"stop": body.stop}
            sampling = tools.sampling(stops, model.defaults)
        params = make_params(model.defaults, sampling)
        open_mask(model.tokenizer, params.constraint, continued=kind is CompletionBody)
    except InputError as problem:
        field = problem.field or ""
        named = FORM_FIELDS if given.get("response_format") else VLLM_FIELDS
        field = named.get(field.partition(".")[0], field)
        faults.append(_Fault(field, f"{field}: {problem.message}"))
    else:
        size = model.tokenizer.vocab_size
        faults += [
            _Fault(f"logit_bias.{token}", f"logit_bias: {token} is not below {size}")
            for token in params.logit_bias
            if token >= size
        ]
    if faults or body is None:
        first = faults[0]
        raise invalid("; ".join(fault.message for fault in faults), first.param, first.code)
    return body, params, tools


def _fault(error: Any) -> _Fault:
    """One of pydantic's errors as the API says it."""
    kind, message = error["type"], _in_plain_words(error)
    loc = error["loc"][:-2] if error["loc"][-1:] == ("[key]",) else error["loc"]
    names = [str(part)[:64] for part in loc if not str(part).startswith("<")]
    param = ".".join(names)
    if not param:
        return _Fault(param, message)
    if kind == "extra_forbidden":
        return _Fault(param, f"unknown parameter {param!r}", "unknown_parameter")
    if refused := [index for index, name in enumerate(names) if name in UNSUPPORTED]:
        param = ".".join(names[: refused[0] + 1])
        why = "" if kind == "none_required" else f": {message}"
        return _Fault(param, f"{param} is not supported{why}", "unsupported_parameter")
    wrong_type = kind.endswith("_type") or kind == "missing"
    code = kind if kind == "unsupported_content" else "invalid_type" if wrong_type else None
    return _Fault(param, f"{param}: {message}", code or "invalid_value")


def _in_plain_words(error: Any) -> str:
    """pydantic's message, where it would show how we check instead of what to send."""
    message = str(error["msg"])
    if error["type"] == "literal_error":
        return message.replace("Input should be", "must be")
    if error["type"] == "string_pattern_mismatch":
        return "must have token ids as its keys, written in digits"
    return message


class _Encoder:
    """Prompts to tokens, no more than `most` of them."""

    def __init__(self, model: Model, most: int) -> None:
        self._model = model
        self._most = most

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Declared]) -> list[int]:
        template = self._model.template
        if template is None:
            raise ApiError(
                400, "this model has no chat template: use /v1/completions to continue a text",
                code="no_chat_template", param="messages",
            )  # fmt: skip
        if messages[-1].role == "assistant":
            raise invalid("messages: must end with a message to answer", "messages")
        read = [message.read() for message in messages]
        self._check_size(sum(len(message.content.encode()) for message in read), "messages")
        return self._checked(template.encode(read, tools=tools), "messages")

    def text(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self._model.tokenizer
        if isinstance(prompt, str):
            self._check_size(len(prompt.encode()), "prompt")
            tokens = tokenizer.encode(prompt)
            if tokenizer.bos is not None and (tokenizer.add_bos or not tokens):
                tokens.insert(0, tokenizer.bos)
        else:
            tokens, size = prompt, tokenizer.vocab_size
            if outside := [token for token in tokens if not 0 <= token < size]:
                raise invalid(
                    f"prompt: token {outside[0]} is not between 0 and {size - 1}", "prompt"
                )
        if not tokens:
            raise invalid("the prompt is empty", "prompt")
        return self._checked(tokens, "prompt")

    def _check_size(self, size: int, param: str) -> None:
        """Refuse, before it is encoded, what cannot fit whatever its tokens are."""
        self._check(-(-size // self._model.tokenizer.longest_piece), param)

    def _checked(self, tokens: list[int], param: str) -> list[int]:
        self._check(len(tokens), param)
        return tokens

    def _check(self, count: int, param: str) -> None:
        if count > self._most:
            raise ApiError(
                400, f"the prompt has at least {count} tokens, this server takes {self._most}",
                code="context_length_exceeded", param=param,
            )  # fmt: skip
