"""Read a checkpoint's text files: tokenizer, chat template, special tokens and defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edge.bundle import GenerationDefaults, TokenizerInfo
from edge.config import ModelConfig
from edge.errors import EdgeError, ExportError, Faults
from edge.export.checkpoint import Checkpoint
from edge.export.checkpoint.checkpoint import is_model_file
from edge.export.checkpoint.files import MAX_TEMPLATE_BYTES, read_file, read_utf8
from edge.export.tokenizer_files import (
    CHAT_TEMPLATE,
    GENERATION,
    find_tokenizer,
    given_files,
    read_settings,
)
from edge.text.hf_checks import growth

BYTES = 256
# state-spaces' checkpoints ship without the tokenizer they were trained with
_REMEDY = (
    "name the tokenizer it was trained with: --tokenizer FILE; state-spaces' models use "
    "EleutherAI/gpt-neox-20b's tokenizer.json, and --tokenizer bytes reads text as bytes"
)
# these classes prepend `bos` unless their settings say otherwise
_ADD_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer")


def tokenizer_info(
    checkpoint: Checkpoint, config: ModelConfig, given: Path | None = None
) -> tuple[TokenizerInfo, list[tuple[Path, str]]]:
    """Return the manifest's tokenizer entry, and (file to copy, path in the bundle) pairs.

    `given` is a tokenizer file, or a directory with one, to use instead of the checkpoint's, or
    AS_BYTES to read text as bytes, the default for models of 256 tokens. Of several, the first
    counts: tokenizer.json, a SentencePiece model, tekken.json, vocab.json with merges.txt. Raises
    ExportError when there is no tokenizer, when it cannot be read, or when it has more tokens than
    the model.
    """
    files = {p.name: p for p in checkpoint.tokenizer_files}
    if given is not None:
        files = given_files(given)
    found = find_tokenizer(checkpoint, files)
    special = _special_ids(checkpoint.generation)
    if found is None:
        _check_reads_bytes(checkpoint, config, given)
        return TokenizerInfo(kind="bytes", vocab_size=BYTES, **_ids_below(BYTES, special)), []
    size, ids = _read_vocabulary(found.file)
    if size > config.vocab_size:
        raise ExportError(
            f"has {size} tokens, the model {config.vocab_size}",
            file=found.original,
            remedy="do tokenizer and weights come from the same model?",
        )
    for key in ("bos", "eos"):
        token = _token_text(found.settings.get(f"{key}_token"))
        if not special.get(key) and token in ids:
            special[key] = ids[token] if key == "bos" else (ids[token],)
    copies = [(found.file, f"tokenizer/{found.name}")]
    if (settings := files.get("tokenizer_config.json")) is not None:
        copies.append((settings, f"tokenizer/{settings.name}"))
    bos = next((piece for piece, i in ids.items() if i == special["bos"]), None)
    info = TokenizerInfo(
        kind="tokenizer.json" if found.name == "tokenizer.json" else "sentencepiece",
        file=copies[0][1],
        sha256=hashlib.sha256(read_file(found.file)).hexdigest(),
        vocab_size=size,
        add_bos=bos is not None and _adds_bos(found.settings, found.file, bos),
        **special,
    )
    return info, copies


def _check_reads_bytes(checkpoint: Checkpoint, config: ModelConfig, given: Path | None) -> None:
    """Raise ExportError unless the model reads bytes or the user chose bytes."""
    if given is None and checkpoint.no_tokenizer is not None:
        raise checkpoint.no_tokenizer
    if config.vocab_size < BYTES:
        raise ExportError(
            f"has no tokenizer, and its {config.vocab_size} tokens are too few for 256 bytes",
            file=checkpoint.path, remedy=_REMEDY,
        )  # fmt: skip
    if given is None and config.vocab_size != BYTES:
        raise ExportError("has no tokenizer", file=checkpoint.path, remedy=_REMEDY)


def _adds_bos(settings: Mapping[str, Any], tokenizer_file: Path, bos: str) -> bool:
    """Return whether texts begin with `bos`, decided as transformers does."""
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    kind = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
    # Llama 1 checkpoints may lack tokenizer_config.json
    if kind in _ADD_BOS or (not kind and is_model_file(tokenizer_file)):
        return True
    if tokenizer_file.name != "tokenizer.json":
        return False
    step = read_settings(tokenizer_file).get("post_processor")
    steps = step.get("processors") if isinstance(step, dict) else None
    for processor in [step, *(steps if isinstance(steps, list) else [])]:
        if isinstance(processor, dict) and processor.get("type") == "TemplateProcessing":
            first = (processor.get("single") or [None])[0]
            return isinstance(first, dict) and first.get("SpecialToken", {}).get("id") == bos
    return False


def copied(checkpoint: Checkpoint, given: Path | None = None) -> dict[str, bytes]:
    """Return name → text file of a model made of `checkpoint`, which then exports as it was read.

    `given` is the tokenizer that replaced the checkpoint's, as in `tokenizer_info`: its files take
    the place of the checkpoint's own, whose chat template and generation defaults stay. AS_BYTES
    has no file.
    """
    files = {file.name: file for file in checkpoint.tokenizer_files}
    contents = {name: read_file(file) for name, file in files.items()}
    if given is None:
        return contents
    # the template may be in tokenizer_config.json, which does not stay
    if (template := chat_template(checkpoint)) is not None:
        contents[CHAT_TEMPLATE] = template.encode()
    kept = {name: contents[name] for name in (CHAT_TEMPLATE, GENERATION) if name in contents}
    return kept | {name: read_file(file) for name, file in given_files(given).items()}


def _special_ids(generation: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos": generation.get("bos_token_id"),
        "eos": tuple(generation.get("eos_token_ids", ())),
        "pad": generation.get("pad_token_id"),
    }


def _ids_below(limit: int, special: dict[str, Any]) -> dict[str, Any]:
    """Return the special tokens whose ids are below `limit`."""
    bos, pad = (special[k] if (special[k] or 0) < limit else None for k in ("bos", "pad"))
    return {"bos": bos, "pad": pad, "eos": tuple(t for t in special["eos"] if t < limit)}


def _token_text(token: Any) -> str | None:
    """Return the text of a special token, given as a string or as an object that holds one."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_vocabulary(path: Path) -> tuple[int, dict[str, int]]:
    """Return the number of ids of the tokenizer, and its vocabulary."""
    try:
        if path.name == "tokenizer.json":
            from tokenizers import Tokenizer

            data = read_file(path)
            growth(json.loads(data))  # before the library acts on the file
            vocabulary: dict[str, int] = Tokenizer.from_str(data.decode()).get_vocab()
        else:
            from sentencepiece import SentencePieceProcessor

            model = SentencePieceProcessor(model_file=str(path))
            vocabulary = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    except (KeyboardInterrupt, SystemExit, EdgeError):
        raise
    except BaseException as problem:  # both libraries raise their own types, Rust panics included
        raise ExportError(f"cannot be read as a tokenizer: {problem}", file=path) from None
    if len(set(vocabulary.values())) < len(vocabulary):
        raise ExportError("gives one id to several pieces", file=path, field="model.vocab")
    return max(vocabulary.values(), default=-1) + 1, vocabulary


def chat_template(checkpoint: Checkpoint) -> str | None:
    """Return the Jinja template, from its own file or tokenizer_config.json, or None."""
    files = {p.name: p for p in checkpoint.tokenizer_files}
    if CHAT_TEMPLATE in files:
        return read_utf8(files[CHAT_TEMPLATE], MAX_TEMPLATE_BYTES)
    template = read_settings(files.get("tokenizer_config.json")).get("chat_template")
    if isinstance(template, list):
        defaults = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = defaults[-1].get("template") if defaults else None
    return template if isinstance(template, str) else None


# names in generation_config.json, where they differ
_PUBLISHED_NAMES = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}


def generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """Return the sampling defaults of generation_config.json; `do_sample: false` is temperature 0.

    Raises ExportError naming every field whose value has the wrong type or is out of range.
    """
    if checkpoint.manifest is not None:
        return checkpoint.manifest.generation
    files = {p.name: p for p in checkpoint.tokenizer_files}
    path = files.get(GENERATION)
    values = read_settings(path)
    stops = values.get("stop_strings")
    stops = [stops] if isinstance(stops, str) else stops
    renamed = {
        "temperature": 0.0 if values.get("do_sample") is False else values.get("temperature"),
        "top_k": values.get("top_k"),
        "top_p": values.get("top_p"),
        "min_p": values.get("min_p"),
        "repetition_penalty": values.get("repetition_penalty"),
        "max_tokens": values.get("max_new_tokens"),
        "stop": tuple(stops) if isinstance(stops, list) else stops,
    }
    try:
        stated = {name: value for name, value in renamed.items() if value is not None}
        return GenerationDefaults.model_validate(stated, strict=True)
    except ValidationError as problem:
        faults = Faults()
        for fault in problem.errors(include_url=False):
            name, *inner = map(str, fault["loc"])
            field = ".".join([_PUBLISHED_NAMES.get(name, name), *inner])
            faults.add(field, f"is {fault['input']!r:.60}: {fault['msg']}")
        faults.refuse(ExportError, file=path, remedy="correct it, or remove the field")
        raise


def licence(checkpoint: Checkpoint) -> str | None:
    """Return the licence stated by the weights, or by `license:` in README.md's front matter, where
    model hubs keep it, or None.
    """
    readme = checkpoint.card
    if checkpoint.stated_licence is not None or readme is None:
        return checkpoint.stated_licence
    lines = read_file(readme).decode("utf-8", "replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:100]:
        if line.strip() == "---":
            break
        key, _, value = line.partition(":")
        if key.strip() == "license" and value.strip():
            return value.strip()[:200]
    return None
