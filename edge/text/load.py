"""The tokenizer and chat template of a bundle."""

from __future__ import annotations

from typing import Any

from edge.bundle import Bundle, TokenizerInfo
from edge.errors import TokenizerError
from edge.text.template import MAX_TEMPLATE, ChatTemplate
from edge.text.tokenizer import MAX_FILE, Tokenizer


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    """Load the bundle's tokenizer and check it against the manifest.

    Raises TokenizerError when the file is malformed or too large, or its vocabulary size is not the
    manifest's, and BundleError when the file was altered.
    """
    info = bundle.manifest.tokenizer
    data = b"" if info.file is None else _read(bundle, info.file, MAX_FILE)
    return make_tokenizer(info, data, f"{bundle.path}/{info.file}")


def make_tokenizer(info: TokenizerInfo, data: bytes, file: str) -> Tokenizer:
    """Build the tokenizer that `info` describes from its file's `data`, empty for bytes.

    Raises TokenizerError when `data` is malformed or its vocabulary size is not that of `info`.
    """
    ids: dict[str, Any] = {
        "bos": info.bos,
        "eos": info.eos,
        "pad": info.pad,
        "add_bos": info.add_bos,
    }
    tokenizer: Tokenizer
    if info.kind == "bytes":
        from edge.text.byte import ByteTokenizer

        tokenizer = ByteTokenizer(**ids)
    else:
        if info.kind == "sentencepiece":
            from edge.text.spm import SentencePieceTokenizer

            tokenizer = SentencePieceTokenizer(data, file=file, **ids)
        else:
            from edge.text.hf import HfTokenizer

            tokenizer = HfTokenizer(data, file=file, **ids)
    if tokenizer.vocab_size != info.vocab_size:
        raise TokenizerError(
            f"has {tokenizer.vocab_size} tokens, the manifest says {info.vocab_size}",
            file=file,
            field="tokenizer.vocab_size",
            remedy="export the model again",
        )
    return tokenizer


def load_template(bundle: Bundle, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the bundle's chat template; None for a base model. Raises TokenizerError if unusable."""
    path = bundle.manifest.chat_template
    if path is None:
        return None
    file = f"{bundle.path}/{path}"
    try:
        source = _read(bundle, path, MAX_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise TokenizerError(f"is not UTF-8: {problem}", file=file) from None
    return ChatTemplate(source, tokenizer, file=file)


def _read(bundle: Bundle, path: str, limit: int) -> bytes:
    entry = bundle.manifest.entry(path)
    if entry is not None and entry.size > limit:
        raise TokenizerError(
            f"has {entry.size} bytes, at most {limit} allowed", file=f"{bundle.path}/{path}"
        )
    return bundle.read(path)
