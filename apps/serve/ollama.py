"""The ollama API: requests translated to the OpenAI API, and answers in ollama's shape.

Source: github.com/ollama/ollama, docs/api.md. Durations are in nanoseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edge.apps.serve.answers import AnswerFormat
from edge.apps.serve.answers import embeddings as openai_embeddings
from edge.apps.serve.bodies import SAMPLING
from edge.apps.serve.errors import ApiError, encode, invalid
from edge.apps.serve.jobs import Embedded, Ended, Piece
from edge.bundle import Manifest, open_bundle
from edge.bundle.reader import WEIGHT_FILE
from edge.runtime.engines import title
from edge.runtime.model import Model
from edge.tensors import parameters

# ollama's options → our names; errors about other options use ollama's names
OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty",
           "repeat_last_n": "repetition_window"}  # fmt: skip
# options of loading and placement, or without effect on answers here
WITHOUT_EFFECT = {"num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread",
                  "use_mmap", "use_mlock", "numa", "low_vram"}  # fmt: skip
KNOWN = {*OPTIONS, *SAMPLING, "stop", "seed"}
RAW_TOKENS = 256  # default for a raw text, which nothing else bounds
_LOGPROBS = ("logprobs", "top_logprobs")
Given = Mapping[str, Any]


class OllamaFormat(AnswerFormat):
    """Formatter of one answer as lines of JSON."""

    media_type = "application/x-ndjson"
    end = b""

    @staticmethod
    def line(chunk: Given) -> bytes:
        return encode(chunk) + b"\n"

    @staticmethod
    def error(problem: ApiError) -> dict[str, Any]:
        return {"error": problem.message}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        text = self._shown(piece)
        return self._part(text) | self._logged([piece]) if text or piece.logprobs else None

    def closing(self, ended: Ended) -> list[dict[str, Any]]:
        """Return the last line, which holds all tool calls."""
        return [self._last_part("", ended)]

    def whole(self, pieces: Sequence[Piece], ended: Ended) -> dict[str, Any]:
        return self._last_part("".join(map(self._shown, pieces)), ended) | self._logged(pieces)

    def _logged(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        if self._asked.params.logprobs is None:
            return {}
        return {"logprobs": self._entries([entry for p in pieces for entry in p.logprobs])}

    def _part(self, text: str) -> dict[str, Any]:
        return part(str(self._head["model"]), self.text_fields(text))

    @staticmethod
    def text_fields(text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _last_part(self, text: str, ended: Ended) -> dict[str, Any]:
        [result], times = ended.results, ended.results[0].timings
        last = self._part(text)
        if result.tool_calls:
            last["message"]["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.arguments}}
                for call in result.tool_calls
            ]
        return last | {
            "done": True,
            "done_reason": "stop" if result.finish_reason == "stop" else "length",
            "total_duration": _nanoseconds(times.total_s),
            "load_duration": 0,
            "prompt_eval_count": len(self._asked.tokens),
            "prompt_eval_duration": _nanoseconds(times.prompt_s),
            "eval_count": len(result.tokens),
            "eval_duration": _nanoseconds(times.total_s - times.prompt_s),
        }


class GenerateFormat(OllamaFormat):
    """Formatter of an answer of /api/generate."""

    @staticmethod
    def text_fields(text: str) -> dict[str, Any]:
        return {"response": text}


def part(name: str, fields: Given) -> dict[str, Any]:
    """Return an answer, or the next part of one, that is not the last."""
    now = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
    return {"model": name, "created_at": now, **fields, "done": False}


def only_loaded(given: Given, name: str, empty: Given) -> dict[str, Any]:
    """Return the answer to a request that only loads a model, or lets it go. `empty`: its text."""
    lets_go = re.fullmatch(r"0+(\.0*)?[a-z]*", str(given.get("keep_alive", "")))
    reason = "unload" if lets_go else "load"
    return part(name, empty) | {"done": True, "done_reason": reason}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def listed(name: str, path: Path) -> dict[str, Any]:
    """Describe a model as /api/tags lists it. Raises EdgeError."""
    with open_bundle(path) as bundle:
        manifest, digest = bundle.manifest, bundle.fingerprint
    return {"name": name, "model": name, "modified_at": _modified_at(path), "digest": digest,
            "size": sum(file.size for file in manifest.files),
            "details": _details(manifest)}  # fmt: skip


def running(name: str, model: Model, states: int) -> dict[str, Any]:
    """Describe the loaded model as /api/ps does; its states take `states` bytes."""
    weights = model.manifest.entry(WEIGHT_FILE)
    size = states + (weights.size if weights else 0)
    on_gpu = title(model.engine).startswith(("cuda", "tensorrt"))
    return listed(name, model.path) | {
        "expires_at": "9999-12-31T23:59:59Z", "size": size, "size_vram": size if on_gpu else 0,
        "context_length": model.config.max_context,
    }  # fmt: skip


def show(path: Path) -> dict[str, Any]:
    """Describe a model as /api/show does. The template is the bundle's, in Jinja."""
    with open_bundle(path) as bundle:
        manifest, template = bundle.manifest, ""
        if manifest.chat_template is not None:
            template = bundle.read(manifest.chat_template).decode(errors="replace")
    model, defaults = manifest.model, manifest.generation.model_dump(exclude_none=True)
    return {
        "license": manifest.provenance.licence or "",
        "modelfile": "",
        "parameters": "\n".join(
            f"{name} {item}" for name, value in defaults.items()
            for item in (value if isinstance(value, tuple | list) else (value,))
        ),
        "template": template,
        "details": _details(manifest),
        "model_info": {
            "general.architecture": model.family,
            "general.parameter_count": parameters(model),
            f"{model.family}.block_count": len(model.layers),
            f"{model.family}.context_length": model.max_context,
            f"{model.family}.embedding_length": model.d_model,
            f"{model.family}.vocab_size": model.vocab_size,
        },
        "capabilities": ["completion", "embedding", *(["tools"] if template else [])],
        "modified_at": _modified_at(path),
    }  # fmt: skip


def _details(manifest: Manifest) -> dict[str, Any]:
    count, family = parameters(manifest.model), manifest.model.family
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    return {"parent_model": manifest.provenance.source, "format": "edge", "family": family,
            "families": [family], "parameter_size": size,
            "quantization_level": manifest.quantization.recipe}  # fmt: skip


def _modified_at(path: Path) -> str:
    timestamp = (path / "manifest.json").stat().st_mtime
    return datetime.fromtimestamp(timestamp, timezone.utc).isoformat()


def chat(given: Given) -> dict[str, Any]:
    """Translate a body of /api/chat to the OpenAI API."""
    messages = given.get("messages")
    if isinstance(messages, list):
        messages = [_message(m) if isinstance(m, dict) else m for m in messages]
    return {**_common(given, {"messages", "tools", *_LOGPROBS}), **_logprobs(given),
            "messages": messages, "tools": given.get("tools")}  # fmt: skip


def embed(given: Given) -> dict[str, Any]:
    """Translate a body of /api/embed. Texts that are too long are refused, despite `truncate`."""
    known = _common(given, {"input", "truncate", "dimensions"})
    return {"input": given.get("input"), "dimensions": given.get("dimensions"),
            **{key: known[key] for key in ("model",) if key in known}}  # fmt: skip


def embed_one(given: Given) -> dict[str, Any]:
    """Translate a body of /api/embeddings, the older form of /api/embed."""
    known = _common(given, {"prompt"})
    return {"input": given.get("prompt"),
            **{key: known[key] for key in ("model",) if key in known}}  # fmt: skip


def embedding(made: Embedded, name: str) -> dict[str, Any]:
    """Return the answer of /api/embeddings."""
    return {"embedding": made.vectors[0].tolist()}


def embeddings(made: Embedded, name: str) -> dict[str, Any]:
    """Return the answer of /api/embed."""
    return {"model": name, "embeddings": [vector.tolist() for vector in made.vectors],
            "total_duration": _nanoseconds(made.took_s), "load_duration": 0,
            "prompt_eval_count": made.asked.count}  # fmt: skip


def generate(given: Given) -> dict[str, Any]:
    """Translate a body of /api/generate: a user message, or with `raw` a text to continue."""
    out = _common(given, {"prompt", "system", "raw", *_LOGPROBS})
    prompt, system = given.get("prompt") or "", given.get("system")
    if given.get("raw"):
        if system:
            raise invalid("system cannot be given with raw", "system")
        logprobs = given.get("top_logprobs") or 0 if given.get("logprobs") else None
        return {"max_tokens": RAW_TOKENS, **out, "prompt": prompt, "logprobs": logprobs}
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return {**out, **_logprobs(given), "messages": messages}


def _logprobs(given: Given) -> dict[str, Any]:
    return {key: given[key] for key in _LOGPROBS if given.get(key)}


def _common(given: Given, own: set[str]) -> dict[str, Any]:
    options: dict[str, Any] = given.get("options") or {}
    form = given.get("format")
    if not isinstance(options, dict):
        raise invalid("options must be an object", "options")
    known = {"model", "stream", "options", "format", "keep_alive", *own}
    unknown = [key for key, value in given.items()
               if key not in known and value not in (None, False, "", [])]  # fmt: skip
    unknown += [f"options.{key}" for key in options if key not in KNOWN | WITHOUT_EFFECT]
    if unknown:
        names = ", ".join(f"{name:.40}" for name in unknown[:20])
        raise invalid(f"unknown parameters: {names}", unknown[0][:40], "unknown_parameter")
    out: dict[str, Any] = {OPTIONS.get(key, key): options[key] for key in options if key in KNOWN}
    if out.get("max_tokens") in (-1, -2):  # unbounded
        out["max_tokens"] = 1 << 30
    if isinstance(given.get("model"), str):
        out["model"] = given["model"].removesuffix(":latest")
    out["stream"] = given.get("stream", True)
    if form:
        out["structured_outputs"] = {"json_object": True} if form == "json" else {"json": form}
    return out


def _message(given: Given) -> dict[str, Any]:
    """Return a message without the fields that have no counterpart, or empty `images`."""
    left_out = {"tool_name", "thinking"}
    return {key: value for key, value in given.items()
            if key not in left_out and (key != "images" or value)}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A route that generates.

    Attributes:
        form: formatter of its answers.
        given: function that translates a body to the OpenAI API.
        chat: function that says whether a body asks for a message.
        embeds: function that formats embeddings, if the route makes them.
        loads: function that returns the fields of an empty text if a body, valid apart from that,
            only asks for loading the model.
    """

    form: Callable[..., AnswerFormat]
    given: Callable[[Given], Given] = dict
    chat: Callable[[Given], bool] = lambda given: True
    embeds: Callable[[Embedded, str], dict[str, Any]] | None = None
    loads: Callable[[Given], Given | None] = lambda given: None


KINDS = {
    "/v1/chat/completions": Kind(AnswerFormat),
    "/v1/completions": Kind(AnswerFormat, chat=lambda given: False),
    "/v1/embeddings": Kind(AnswerFormat, embeds=openai_embeddings),
    "/api/embed": Kind(OllamaFormat, embed, embeds=embeddings),
    "/api/embeddings": Kind(OllamaFormat, embed_one, embeds=embedding),
    "/api/chat": Kind(
        OllamaFormat,
        chat,
        loads=lambda given: None if given.get("messages") else OllamaFormat.text_fields(""),
    ),
    "/api/generate": Kind(
        GenerateFormat,
        generate,
        lambda given: not given.get("raw"),
        loads=lambda given: None if given.get("prompt") else GenerateFormat.text_fields(""),
    ),
}
