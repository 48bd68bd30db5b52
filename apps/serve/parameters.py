"""Parameters of a request: taken, accepted because they change nothing, or refused.

Nothing that would change the output is dropped silently. A null is the same as an absence, as in
the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge.apps.serve.errors import ApiError, invalid

# sampling parameters by their name here: name in `SamplingParams`
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
COMMON = {"model", "stream", "stream_options", "max_tokens", "stop", "seed", "logit_bias"}
# accepted whatever they hold: they concern billing, routing, caching and speed
HARMLESS = {
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "prediction",
    "parallel_tool_calls",
}
# not supported, accepted with these values because they ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "top_logprobs": (),
}
BIAS = 100.0  # the API's bounds of a logit bias


@dataclass(frozen=True)
class Parameters:
    """Attributes:
    sampling: for `make_params`, without defaults.
    stream, include_usage: how the answer is sent.
    """

    sampling: Mapping[str, Any]
    stream: bool
    include_usage: bool


def read(body: Mapping[str, Any], *, own: set[str], name: str, chat: bool) -> Parameters:
    """Check every parameter but those in `own`, which the caller reads. 400 or 404 naming one.

    `name`: the model that is served.
    """
    given = {key: value for key, value in body.items() if value is not None}
    _check_model(given.get("model"), name)
    _check_known(given, own | ({"max_completion_tokens"} if chat else set()), chat)
    sampling = {SAMPLING[key]: given[key] for key in SAMPLING if key in given}
    sampling["max_tokens"] = _max_tokens(given)
    sampling["stop"] = _stop(given.get("stop"))
    sampling["seed"] = _seed(given.get("seed"))
    sampling["logit_bias"] = _bias(given.get("logit_bias"))
    stream = _flag(given.get("stream"), "stream")
    return Parameters(sampling, stream, _usage(given.get("stream_options"), stream))


def _check_model(model: Any, name: str) -> None:
    if model is None:
        return
    if not isinstance(model, str):
        raise invalid("model: must be a string", "model", "invalid_type")
    if model != name:
        raise ApiError(
            404, f"there is no model {model!r:.100}; this server has {name!r}",
            code="model_not_found", param="model",
        )  # fmt: skip


def _check_known(given: Mapping[str, Any], own: set[str], chat: bool) -> None:
    problems: list[tuple[str, str, str]] = []
    for key, value in given.items():
        if key in own or key in COMMON or key in SAMPLING or key in HARMLESS:
            continue
        # in the older API a number: 0 asks for the chosen token's
        accepted = ((False,) if chat else ()) if key == "logprobs" else NEUTRAL.get(key)
        if accepted is None:
            problems.append((key, f"{key[:64]!r} is no parameter", "unknown_parameter"))
        elif value not in accepted:
            problems.append((key, _unsupported(key, accepted), "unsupported_parameter"))
    if problems:
        first = problems[0]
        raise invalid("; ".join(text for _, text, _ in problems), first[0][:64], first[2])


def _unsupported(key: str, accepted: tuple[Any, ...]) -> str:
    values = " or ".join(map(repr, accepted))
    return f"{key} is not supported" + (f", except as {values}" if accepted else "")


def _max_tokens(given: Mapping[str, Any]) -> Any:
    old, new = given.get("max_tokens"), given.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens and max_completion_tokens differ", "max_completion_tokens")
    return old if new is None else new


def _stop(value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
        raise invalid("stop: must be a string or a list of strings", "stop", "invalid_type")
    return tuple(value)


def _seed(value: Any) -> int | None:
    """Any 64-bit number: the API's are signed, ours are not."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid("seed: must be a whole number", "seed", "invalid_type")
    if not -(1 << 63) <= value < 1 << 64:
        raise invalid("seed: must be a 64-bit number", "seed")
    return value % (1 << 64)


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid("logit_bias: must map token ids to numbers", "logit_bias", "invalid_type")
    out: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid(f"logit_bias: {key!r:.40} is no token id", "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= BIAS:
            raise invalid(
                f"logit_bias: must be from -100 to 100, not {bias!r:.40}", f"logit_bias.{key}"
            )
        out[int(key)] = float(bias)
    return out


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool | None):
        raise invalid(f"{name}: must be true or false", name, "invalid_type")
    return bool(value)


def _usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    name = "stream_options"
    if not stream:
        raise invalid(f"{name}: only with stream", name)
    if not isinstance(value, dict):
        raise invalid(f"{name}: must be an object", name, "invalid_type")
    for key, option in value.items():
        if key == "include_obfuscation" and not option:
            continue  # nothing is padded here
        if key != "include_usage":
            raise invalid(f"{name}.{key[:64]} is not supported", name, "unsupported_parameter")
    return _flag(value.get("include_usage"), f"{name}.include_usage")
