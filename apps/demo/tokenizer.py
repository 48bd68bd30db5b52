"""Train the SentencePiece model that the chat model and its drafter share."""

from __future__ import annotations

import json
import random
from pathlib import Path

import sentencepiece as spm

from edge.apps.demo.data import read_conversations, read_documents

ROLES = ("system", "user", "assistant")
END = "<|end|>"
SYMBOLS = [*(f"<|{role}|>" for role in ROLES), END, "\n"]

# Turns are <|role|>text<|end|>, without bos. `</s>` separates conversations in training.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def _sentences(data: Path, text_lines: int) -> list[str]:
    """Return lines of all conversations, of few tldr pages, and of sampled documents, shuffled."""
    rng = random.Random(0)
    lines: list[str] = []
    for conversation in read_conversations(data / "chat.train.jsonl"):
        if conversation.source == "tldr" and rng.random() > 0.05:
            continue
        for _, content in conversation.turns:
            lines += [line for line in content.split("\n") if line.strip()]
    text = [line for d in read_documents(data / "pretrain.train.txt") for line in d.split("\n")]
    lines += rng.sample(text, min(text_lines, len(text)))
    rng.shuffle(lines)
    return lines


def train_tokenizer(data: Path, out: Path, vocab: int, text_lines: int = 30_000) -> Path:
    """Train on data/chat.train.jsonl and pretrain.train.txt. Return the path out/tokenizer.model.

    The model is BPE with byte fallback. Text is not changed (identity normalization, all spaces, no
    added leading space), so that decoding restores the encoded text.
    """
    out.mkdir(parents=True, exist_ok=True)
    prefix = out / "tokenizer"
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(_sentences(data, text_lines)),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=vocab,
        byte_fallback=True,
        split_digits=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=SYMBOLS,
        max_sentence_length=16384,
        num_threads=2,
        minloglevel=1,
    )
    prefix.with_suffix(".vocab").unlink()
    return prefix.with_suffix(".model")


def write_tokenizer_files(model: Path, out: Path) -> None:
    """Write tokenizer.model, tokenizer_config.json and chat_template.jinja to a checkpoint."""
    (out / "tokenizer.model").write_bytes(model.read_bytes())
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": "<s>",
        "eos_token": END,
        "unk_token": "<unk>",
        "additional_special_tokens": [f"<|{role}|>" for role in ROLES],
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
