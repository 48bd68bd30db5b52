"""Request bodies: their fields, the values these accept, and the sampling parameters among them.

Nothing that would change the output is dropped silently: a parameter is used, accepted because its
value has no effect, or refused. A null is the same as an absence, as in the API.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from edge.errors import InputError
from edge.runtime.constrain.statement import KINDS
from edge.runtime.constrain.tools import MAX_TOOLS
from edge.runtime.model import Model
from edge.runtime.transcript import read_call
from edge.text.template import Message
from edge.text.tokenizer import check_text
from edge.text.tools import ToolCall

MOST_INPUTS = 2048  # the API's limit on the texts of one embeddings request
COMPLETION_TOKENS = 16  # the API's default of /v1/completions
BIAS = 100.0  # the API's limit on a logit bias
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# checked by the sampler, under the same names
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "repetition_window")  # fmt: skip
MOST_CHOICES = 128  # the API's limit on the answers to one request
MOST_LOGPROBS = 20  # the API's limit on the alternatives to a token


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
    """Accept a text or token ids; a list of one prompt counts as that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if not _is_ids(value) and not isinstance(value, str):
        raise PydanticCustomError("invalid_type", "must be one text, or one list of token ids")
    return value


def _inputs(value: Any) -> Any:
    """Accept texts and lists of token ids; a single one becomes a list of one."""
    single = isinstance(value, str) or (isinstance(value, list) and bool(value) and _is_ids(value))
    inputs = [value] if single else value
    if not isinstance(inputs, list) or not all(isinstance(v, str) or _is_ids(v) for v in inputs):
        raise PydanticCustomError("invalid_type", "must be texts, or lists of token ids")
    return inputs


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _choice(value: Any) -> Any:
    """Return the tool choice: a word, or the name of the function to call."""
    try:
        return value if isinstance(value, str) else value["function"]["name"]
    except (KeyError, TypeError):
        raise PydanticCustomError("invalid_value", "must be a word, or name a function") from None


Text = Annotated[str, AfterValidator(_text)]
# tags in angle brackets are left out of the names in error messages
Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Annotated[Text, BeforeValidator(_text_part)]], Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-BIAS, le=BIAS)]
Nothing = Annotated[list[Any], Field(max_length=0)]
Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class _JsonSchema(_StrictModel):
    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool = True  # no effect: every answer follows the schema


class AskedFormat(_StrictModel):
    """The API's way to request JSON."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> AskedFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PydanticCustomError(
                "invalid_value", "json_schema and the type json_schema require each other"
            )
        return self

    def constraint(self) -> dict[str, Any]:
        """Return the constraint under the names of `SamplingParams`."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.schema_}
        return {"json_schema": {"type": "object"}} if self.type == "json_object" else {}


class StructuredOutputs(_StrictModel):
    """vLLM's way to constrain an answer."""

    json_: Annotated[Any, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def constraint(self) -> dict[str, Any]:
        """Return the constraint under the names of `SamplingParams`."""
        given = {"json_schema": self.json_, "regex": self.regex, "grammar": self.grammar,
                 "choices": self.choice}  # fmt: skip
        if self.json_object and self.json_ is None:
            given["json_schema"] = {"type": "object"}
        return given


class UnsupportedInMessage(_StrictModel):
    """Fields of messages that clients send back as received: accepted when empty, else refused."""

    refusal: Literal[""] = ""
    annotations: Nothing = []
    audio: None = None
    function_call: None = None
    name: Literal[""] = ""


class Unsupported(_StrictModel):
    """Unsupported parameters, with the values that have no effect."""

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
    def _read_calls(cls, value: Any, info: ValidationInfo) -> list[ToolCall]:
        if value and info.data.get("role") != "assistant":
            raise PydanticCustomError("invalid_value", "only in messages of the assistant")
        try:
            return [read_call(call) for call in value]
        except (KeyError, TypeError, ValueError, RecursionError, InputError):
            message = "must be function calls, with arguments that are a JSON object"
            raise PydanticCustomError("invalid_value", message) from None

    @field_validator("tool_call_id")
    @classmethod
    def _only_for_tools(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("role") != "tool":
            raise PydanticCustomError("invalid_value", "only in messages of a tool")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _require_content(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "Field required")
        return "" if value is None else value

    def read(self) -> Message:
        """Return the message for the model's template; text parts are joined unchanged."""
        text = self.content if isinstance(self.content, str) else "".join(self.content)
        role = ROLES.get(self.role, self.role)
        return Message(role, text, None, tuple(self.tool_calls), self.tool_call_id)


class StreamOptions(_StrictModel):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False  # nothing is padded here


class GenerationBody(Unsupported):
    """Parameters that chat and text completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    # any 64-bit number: signed in the API, unsigned here
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    logit_bias: dict[TokenKey, Bias] = {}
    response_format: AskedFormat = AskedFormat()
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
    # billing, routing, caching and speed: any value is accepted
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
    def _only_one_constraint(
        cls, value: StructuredOutputs, info: ValidationInfo
    ) -> StructuredOutputs:
        form = info.data.get("response_format")
        if form is not None and form.constraint() and any(value.constraint().values()):
            raise PydanticCustomError("invalid_value", "cannot be given with response_format")
        return value

    @field_validator("stream_options")
    @classmethod
    def _only_with_stream(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise PydanticCustomError("invalid_value", "only with stream")
        return value

    def sampling(self, model: Model) -> dict[str, Any]:
        """Return the requested sampling under the names of `SamplingParams`."""
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
    def _same_limit(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("max_tokens") not in (None, value):
            raise PydanticCustomError("invalid_value", "differs from max_tokens")
        return value

    def sampling(self, model: Model) -> dict[str, Any]:
        """Return the requested sampling, with this model's own stop strings added."""
        sampling = super().sampling(model)
        sampling["logprobs"] = self.top_logprobs or 0 if self.logprobs else None
        if self.max_completion_tokens is not None:
            sampling["max_tokens"] = self.max_completion_tokens
        if any(sampling.get(kind) is not None for kind in KINDS):
            return sampling  # a model's own stop strings would cut a constrained answer short
        return sampling | {"stop": (*(model.defaults.get("stop") or ()), *self.stop)}


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[Text | list[int], BeforeValidator(_prompt)] = ""
    max_tokens: Any = COMPLETION_TOKENS
    logprobs: Logprobs | None = None

    def sampling(self, model: Model) -> dict[str, Any]:
        return super().sampling(model) | {"logprobs": self.logprobs}


class EmbeddingBody(_StrictModel):
    """The body of /v1/embeddings. `pooling` is an addition to the API."""

    model: str | None = None
    input: Annotated[
        list[Text | list[int]],
        BeforeValidator(_inputs),
        Field(min_length=1, max_length=MOST_INPUTS),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last"] = "mean"
    user: Any = None


UNSUPPORTED = {*Unsupported.model_fields, *UnsupportedInMessage.model_fields}
