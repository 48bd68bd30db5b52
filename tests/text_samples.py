"""Small tokenizers of every kind, trained here, each with special tokens of several kinds."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import sentencepiece
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Fast

from edge.text.byte import ByteTokenizer
from edge.text.hf import HfTokenizer
from edge.text.spm import SentencePieceTokenizer
from edge.text.tokenizer import Tokenizer

CORPUS = [
    "the state of the model is the whole of the past",
    "a robot walks and then it stops: 12 steps <and> 7 turns",
    "Größe, naïve café, 東京 and 🦾 are not ASCII",
    "end user system assistant start of text <|> [INST] </s> <s>",
]
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


@cache
def spm_model(kind: str = "bpe", **options: Any) -> bytes:
    """Train a `.model` with 4 role symbols (user-defined), a user-defined newline, and control
    symbols
    """
    out = io.BytesIO()
    values: dict[str, Any] = {
        "vocab_size": 380,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": [*ROLES, "\n"],
        "hard_vocab_limit": False,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=out,
        model_type=kind,
        minloglevel=2,
        **(values | options),
    )
    return out.getvalue()


def byte_level(ignore_merges: bool = False, special: bool = True) -> bytes:
    """Train GPT-2's kind: byte-level BPE with special tokens, and white space as a plain added
    token.
    """
    fast = Fast(models.BPE(ignore_merges=ignore_merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False, use_regex=False)]
        if ignore_merges
        else [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|pad|>", *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_tokens([AddedToken("   ", normalized=False), AddedToken("<tool>", normalized=False)])
    if special:
        return str(fast.to_str()).encode()
    data = json.loads(fast.to_str())
    for token in data["added_tokens"]:
        token["special"] = False
    return json.dumps(data).encode()


def spaced_bpe() -> bytes:
    """Train Llama 2's kind: ▁ for spaces, bytes for unknown text, one space put before a text."""
    alphabet = sorted({c for line in CORPUS for c in line if c.isascii() and c != " "})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *alphabet, "th"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("t", "h")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    fast = Fast(model)
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    return str(fast.to_str()).encode()


def unigram() -> bytes:
    """Train a unigram model, which finds the spelling of a special token in its own vocabulary."""
    alphabet = sorted({c for line in CORPUS for c in line if c.isascii() and c != " "})
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("▁", -2.0)]
    fast = Fast(
        models.Unigram(
            [
                *pieces,
                *((c, -3.0) for c in alphabet),
                *((f"<0x{b:02X}>", -9.0) for b in range(256)),
            ],
            unk_id=0,
            byte_fallback=True,
        )
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast.add_special_tokens(["<s>", "</s>"])
    return str(fast.to_str()).encode()


@cache
def tokenizer(name: str) -> Tokenizer:
    """Return one of KINDS."""
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("spm"):
        options = {"add_dummy_prefix": True} if name == "spm-prefix" else {}
        model = spm_model("unigram" if name == "spm-unigram" else "bpe", **options)
        return SentencePieceTokenizer(model, bos=1, eos=(6,))
    if name == "byte-level":
        return HfTokenizer(byte_level(), bos=0, eos=(0, 5))
    if name == "byte-level-unflagged":
        return HfTokenizer(byte_level(special=False), bos=0, eos=(0, 5))
    if name == "byte-level-words":
        return HfTokenizer(byte_level(ignore_merges=True), bos=0, eos=(0, 5))
    if name == "spaced":
        return HfTokenizer(spaced_bpe(), bos=1, eos=(2,), add_bos=True)
    return HfTokenizer(unigram(), bos=2, eos=(1,))


KINDS = [
    "bytes",
    "spm",
    "spm-prefix",
    "spm-unigram",
    "byte-level",
    "byte-level-unflagged",
    "byte-level-words",
    "spaced",
    "unigram",
]
# decode(encode(text)) == text for every text, except where words are split at white space, which is
# dropped, and where a space and ▁ are one.
EXACT = ["bytes", "spm", "spm-prefix", "spm-unigram", "byte-level", "byte-level-unflagged"]
