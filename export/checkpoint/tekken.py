"""Read Mistral's tekken.json, a vocabulary of byte strings by rank, as a tokenizer.json.

As tiktoken does, pieces next to each other are joined where the joined bytes are in the vocabulary,
the lowest rank first. Special tokens have the first ids; the pieces follow by rank. A piece spelled
like a special token is left out, because a tokenizer.json has each text once; the same text is then
written with shorter pieces.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edge.errors import CheckpointError, Faults
from edge.export.checkpoint.bpe import (
    AddedToken,
    Rebuilt,
    Words,
    bpe_document,
    is_text,
    split_and_map,
)
from edge.export.checkpoint.fields import read_json
from edge.export.checkpoint.weights import check_pointer
from edge.text.hf import byte_alphabet
from edge.text.tokenizer import MAX_FILE

TEKKEN = "tekken.json"
MAX_SPECIAL = 1 << 16
MAX_BYTES = 1024  # of one piece
MAX_MERGES = 1 << 21
_REMEDY = "download it again, or give the original tokenizer.json with --tokenizer"
# of files that state none, as in mistral-common (tekken.py)
_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(file: Path) -> Rebuilt:
    """Return the tokenizer of a tekken.json. Raises CheckpointError naming all that is wrong."""
    check_pointer(file)
    values, faults = read_json(file), Faults()
    config = values.get("config")
    config = config if isinstance(config, dict) else {}
    if not isinstance(pattern := config.get("pattern"), str) or not is_text(pattern):
        faults.add("config.pattern", f"is {pattern!r:.40}, not an expression")
    special = _special_tokens(values.get("special_tokens"), config, faults)
    ranks = _ranks(values.get("vocab"), config, len(special), faults)
    faults.refuse(CheckpointError, file=file, remedy=_REMEDY)
    settings = {name: text for name, text in _NAMED.items() if text in _texts(special)}
    words = Words(split_and_map(str(pattern)), whole=True, begins=settings.get("bos_token"))
    vocabulary, merges = _as_text(ranks, _texts(special), len(special), file)
    whole = {token.content: i for i, token in enumerate(special)} | vocabulary
    data = bpe_document(words, whole, merges, dict(enumerate(special)))
    return Rebuilt(data, file, settings)


def _texts(special: list[AddedToken]) -> set[str]:
    return {token.content for token in special}


def _count(config: Mapping[str, Any], name: str, default: int, faults: Faults) -> int:
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        faults.add(f"config.{name}", f"is {value!r:.20}, not a number of tokens")
        return default
    return value


def _special_tokens(stated: object, config: Mapping[str, Any], faults: Faults) -> list[AddedToken]:
    """Return the special tokens by id, with those that only their number promises."""
    if stated is None:
        stated = [{"rank": i, "token_str": text} for i, text in enumerate(_SPECIAL)]
    if not isinstance(stated, list):
        faults.add("special_tokens", "is not a list of tokens")
        stated = []
    count = _count(config, "default_num_special_tokens", len(stated), faults)
    if not len(stated) <= count <= MAX_SPECIAL:
        faults.add(
            "config.default_num_special_tokens",
            f"is {count}, with {len(stated)} special tokens and at most {MAX_SPECIAL} allowed",
        )
        return []
    by_rank: dict[int, AddedToken] = {}
    texts, problems = set(), []
    for index, token in enumerate(stated):
        rank = token.get("rank") if isinstance(token, dict) else None
        text = token.get("token_str") if isinstance(token, dict) else None
        if type(rank) is not int or not isinstance(text, str) or not text:
            problems.append(f"entry {index} has no rank or no text")
        elif not is_text(text) or len(text) > MAX_BYTES:
            problems.append(f"entry {index} has no text of at most {MAX_BYTES} characters")
        elif rank in by_rank or text in texts or not 0 <= rank < len(stated):
            problems.append(f"entry {index} has the rank {rank} or the text {text!r:.40} again")
        else:
            by_rank[rank] = AddedToken(text, special=token.get("is_control") is not False)
            texts.add(text)
    for rank in range(len(stated), count):
        if (text := f"<SPECIAL_{rank}>") in texts:
            problems.append(f"has {text} below its own id")
        by_rank[rank] = AddedToken(text)
    faults.count("special_tokens", problems)
    return [token for _, token in sorted(by_rank.items())]


def _ranks(
    entries: object, config: Mapping[str, Any], special: int, faults: Faults
) -> dict[bytes, int]:
    """Return piece → rank of the pieces that the vocabulary's size leaves room for."""
    if not isinstance(entries, list):
        faults.add("vocab", "is not a list of pieces")
        return {}
    size = _count(config, "default_vocab_size", special + len(entries), faults)
    if not special + 256 <= size <= special + len(entries):
        faults.add(
            "config.default_vocab_size",
            f"is {size}, for {special} special tokens and {len(entries)} pieces, "
            "of which 256 are bytes",
        )
        return {}
    ranks: dict[bytes, int] = {}
    problems = []
    for index, entry in enumerate(entries[: size - special]):
        piece = _piece(entry)
        if piece is None or not 0 < len(piece) <= MAX_BYTES:
            problems.append(f"entry {index} has no base64 of 1 to {MAX_BYTES} bytes")
        elif entry.get("rank", index) != index:
            problems.append(f"entry {index} has the rank {entry['rank']!r:.20}")
        elif ranks.setdefault(piece, index) != index:
            problems.append(f"entry {index} has the bytes of entry {ranks[piece]}")
    missing = [value for value in range(256) if bytes((value,)) not in ranks]
    faults.count("vocab", problems)
    if not problems:
        faults.count("vocab", (f"lacks the byte {value:#04x}" for value in missing))
    return ranks


def _piece(entry: object) -> bytes | None:
    stated = entry.get("token_bytes") if isinstance(entry, dict) else None
    if not isinstance(stated, str):
        return None
    try:
        return base64.b64decode(stated, validate=True)
    except (binascii.Error, ValueError):  # ValueError: characters beyond ASCII
        return None


def _as_text(
    ranks: Mapping[bytes, int], special: set[str], first: int, file: Path
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return piece → id and the merges, both in the letters that stand for bytes."""
    letters = {value: letter for letter, value in byte_alphabet().items()}
    spelled = {piece: "".join(letters[value] for value in piece) for piece in ranks}
    merges, size = [], 0
    for left, right in _merges(ranks):
        pair = spelled[left], spelled[right]
        if special.isdisjoint((*pair, "".join(pair))):
            merges.append(pair)
            size += len(left) + len(right)
        # they are written out next, and a tokenizer.json may be this large
        if len(merges) > MAX_MERGES or size > MAX_FILE:
            limit = f"{MAX_MERGES} ways" if size <= MAX_FILE else f"{MAX_FILE} bytes of merges"
            raise CheckpointError(
                f"joins pieces in more than {limit}", file=file, field="vocab", remedy=_REMEDY
            )
    pieces = {spelled[piece]: first + rank for piece, rank in ranks.items()}
    return {text: index for text, index in pieces.items() if text not in special}, merges


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pairs that make each piece, by the piece's rank, then by those of the pair."""
    for piece in sorted(ranks, key=ranks.__getitem__):
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
