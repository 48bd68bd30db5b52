"""What a checkpoint says about text: its tokenizer, chat template, special tokens and defaults."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edge.bundle import GenerationDefaults, TokenizerInfo
from edge.config import ModelConfig
from edge.errors import ExportError
from edge.export.checkpoint import Checkpoint

BYTES = 256
CHAT_TEMPLATE = "chat_template.jinja"
# state-spaces' own checkpoints carry no tokenizer, whatever they were trained with
_REMEDY = (
    "name the tokenizer it was trained with by --tokenizer; state-spaces' models use "
    "EleutherAI/gpt-neox-20b's tokenizer.json"
)


def without_tokenizer(info: TokenizerInfo, config: ModelConfig) -> str | None:
    """What to tell the user of a model that will read bytes only because nothing better is there.

    None for one with a tokenizer and for byte-level models, which need none.
    """
    if info.kind != "bytes" or config.vocab_size == BYTES:
        return None
    return f"the checkpoint has no tokenizer, so the bundle reads text as bytes: {_REMEDY}"


def tokenizer_info(
    checkpoint: Checkpoint, config: ModelConfig, given: Path | None = None
) -> tuple[TokenizerInfo, list[tuple[Path, str]]]:
    """The manifest's entry, and (file to copy, path in the bundle) pairs.

    `given`: a tokenizer file, or a directory with one, to use instead of the checkpoint's own.
    tokenizer.json goes before a SentencePiece model; with neither the model reads bytes. Raises
    ExportError: fewer than 256 tokens and no tokenizer, one that cannot be read, or one with more
    tokens than the model has.
    """
    files = {p.name: p for p in checkpoint.tokenizer_files} if given is None else _given(given)
    pieces = next((p for name, p in files.items() if name.endswith(".model")), None)
    found = files.get("tokenizer.json") or pieces
    settings = _settings(files.get("tokenizer_config.json"))
    special = _special(checkpoint.generation)
    if found is None:
        if given is None and checkpoint.no_tokenizer is not None:
            raise checkpoint.no_tokenizer
        if config.vocab_size < BYTES:
            raise ExportError("has no tokenizer", file=checkpoint.path, remedy=_REMEDY)
        return TokenizerInfo(kind="bytes", vocab_size=BYTES, **_below(BYTES, special)), []
    size, ids = _read(found)
    if size > config.vocab_size:
        raise ExportError(
            f"has {size} tokens, the model {config.vocab_size}",
            file=found,
            remedy="do tokenizer and weights come from the same model?",
        )
    for key in ("bos", "eos"):
        token = _content(settings.get(f"{key}_token"))
        if not special.get(key) and token in ids:
            special[key] = ids[token] if key == "bos" else (ids[token],)
    copies = [(p, f"tokenizer/{p.name}") for p in (found, files.get("tokenizer_config.json")) if p]
    info = TokenizerInfo(
        kind="sentencepiece" if found is pieces else "tokenizer.json",
        file=copies[0][1],
        sha256=hashlib.sha256(found.read_bytes()).hexdigest(),
        vocab_size=size,
        add_bos=settings.get("add_bos_token") is True and special.get("bos") is not None,
        **special,
    )
    return info, copies


def _given(path: Path) -> dict[str, Path]:
    """Tokenizer files at a path the user named, by name. Raises ExportError when there is none."""
    found = [path] if path.is_file() else sorted(path.glob("*")) if path.is_dir() else []
    names = ("tokenizer.json", "tokenizer_config.json")
    files = {p.name: p for p in found if p.name in names or p.suffix == ".model"}
    if not files.keys() - {"tokenizer_config.json"}:
        raise ExportError("holds no tokenizer.json and no .model file", file=path)
    return files


def _special(generation: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos": generation.get("bos_token_id"),
        "eos": tuple(generation.get("eos_token_ids", ())),
        "pad": generation.get("pad_token_id"),
    }


def _below(limit: int, special: dict[str, Any]) -> dict[str, Any]:
    """The special tokens whose ids are below `limit`."""
    bos, pad = (special[k] if (special[k] or 0) < limit else None for k in ("bos", "pad"))
    return {"bos": bos, "pad": pad, "eos": tuple(t for t in special["eos"] if t < limit)}


def _settings(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as problem:
        raise ExportError(f"cannot be read as JSON: {problem}", file=path) from None
    return values if isinstance(values, dict) else {}


def _content(token: Any) -> str | None:
    """A special token is a string, or an object that holds one."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read(path: Path) -> tuple[int, dict[str, int]]:
    """How many ids the tokenizer has, and its vocabulary."""
    try:
        if path.name == "tokenizer.json":
            from tokenizers import Tokenizer

            vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab()
        else:
            from sentencepiece import SentencePieceProcessor

            model = SentencePieceProcessor(model_file=str(path))
            vocabulary = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    except Exception as problem:  # both libraries raise bare Exception kinds of their own
        raise ExportError(f"cannot be read as a tokenizer: {problem}", file=path) from None
    return max(vocabulary.values(), default=-1) + 1, vocabulary


def chat_template(checkpoint: Checkpoint) -> str | None:
    """The Jinja template, from its own file or from tokenizer_config.json; None without one."""
    files = {p.name: p for p in checkpoint.tokenizer_files}
    if CHAT_TEMPLATE in files:
        return files[CHAT_TEMPLATE].read_text("utf-8")
    template = _settings(files.get("tokenizer_config.json")).get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """Sampling defaults in generation_config.json; `do_sample: false` is temperature 0.

    Raises ExportError naming the field when a value is out of range.
    """
    if checkpoint.manifest is not None:
        return checkpoint.manifest.generation
    files = {p.name: p for p in checkpoint.tokenizer_files}
    path = files.get("generation_config.json")
    values = _settings(path)
    named = {
        "temperature": 0.0 if values.get("do_sample") is False else values.get("temperature"),
        "top_k": values.get("top_k"),
        "top_p": values.get("top_p"),
        "min_p": values.get("min_p"),
        "repetition_penalty": values.get("repetition_penalty"),
        "max_tokens": values.get("max_new_tokens"),
        "stop": tuple(values.get("stop_strings") or ()),
    }
    try:
        return GenerationDefaults.model_validate({k: v for k, v in named.items() if v is not None})
    except ValueError as problem:
        raise ExportError(f"has values out of range: {problem}", file=path) from None


def licence(checkpoint: Checkpoint) -> str | None:
    """As the weights state it, or `license:` in the front matter of README.md, where model hubs
    keep it; None without.
    """
    readme = checkpoint.card
    if checkpoint.stated_licence is not None or readme is None:
        return checkpoint.stated_licence
    lines = readme.read_text("utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:100]:
        if line.strip() == "---":
            break
        key, _, value = line.partition(":")
        if key.strip() == "license" and value.strip():
            return value.strip()[:200]
    return None
