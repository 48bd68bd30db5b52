"""Corrupted text, to measure how robust a model is to noise in its context.

MambaByte (arXiv 2401.13660, section 5.2 and appendix G, after ByT5's benchmark, arXiv 2105.13626):
a text is split into chunks of 100 words, every odd-indexed chunk is corrupted, and perplexity is
measured on the even-indexed chunks, which stay unchanged. The paper corrupts bytes; this module
drops, repeats or swaps characters, which is the same in ASCII and keeps every other text valid.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from edge.apps.evaluate.parts import Encoder, Part
from edge.apps.evaluate.texts import Block, Dialogue
from edge.errors import InputError

CHUNK_WORDS = 100
PROBABILITIES = (0.05, 0.3)
_WORD = re.compile(r"\s*\S+")


def drop(text: str, p: float, rng: random.Random) -> str:
    """Drop each character with probability p."""
    return "".join(c for c in text if rng.random() >= p)


def repeat(text: str, p: float, rng: random.Random) -> str:
    """Repeat each character with probability p: one, two or three more, with equal odds."""
    return "".join(c * (1 + rng.randint(1, 3)) if rng.random() < p else c for c in text)


def antspeak(text: str, p: float, rng: random.Random) -> str:
    """Capitalize every character and pad it with spaces: "abc def" is " A B C D E F "."""
    return "".join(f" {c}" for c in text.upper() if not c.isspace()) + " "


def uppercase(text: str, p: float, rng: random.Random) -> str:
    """Convert each character to uppercase with probability p."""
    return "".join(c.upper() if rng.random() < p else c for c in text)


def random_case(text: str, p: float, rng: random.Random) -> str:
    """Give every character a random case."""
    return "".join(c.upper() if rng.random() < 0.5 else c.lower() for c in text)


def swap(text: str, p: float, rng: random.Random) -> str:
    """Swap neighbouring characters with probability p. No character moves twice."""
    characters = list(text)
    i = 0
    while i + 1 < len(characters):
        if rng.random() < p:
            characters[i : i + 2] = characters[i + 1], characters[i]
            i += 1
        i += 1
    return "".join(characters)


Function = Callable[[str, float, random.Random], str]
KINDS: dict[str, Function] = {
    "drop": drop,
    "repeat": repeat,
    "antspeak": antspeak,
    "uppercase": uppercase,
    "random-case": random_case,
    "swap": swap,
}
# kinds that corrupt every character
WHOLE = ("antspeak", "random-case")


@dataclass(frozen=True)
class TextNoise:
    """One kind of noise, deterministic in its seed.

    `probability`: None for kinds that corrupt every character.
    """

    kind: str
    probability: float | None
    seed: int = 0

    def spoil(self, text: str, place: str) -> str:
        """Return corrupted text. `place` gives each chunk its own random numbers."""
        rng = random.Random(f"{self.seed}/{self.kind}/{self.probability}/{place}")
        return KINDS[self.kind](text, self.probability or 0.0, rng)


def chosen(kind: str, probability: float | None, seed: int) -> list[TextNoise]:
    """Return the noise for `--noise KIND`, by default at both of the paper's probabilities.

    Raises InputError for an unknown kind, and for a probability given to a kind without one.
    """
    if kind != "all" and kind not in KINDS:
        raise InputError(
            f"unknown noise {kind!r}", field="--noise", remedy=f"choose {', '.join(KINDS)} or all"
        )
    if probability is not None and kind in WHOLE:
        raise InputError(f"{kind} corrupts every character", field="--probability")
    noises = []
    for name in KINDS if kind == "all" else (kind,):
        probabilities = PROBABILITIES if probability is None else (probability,)
        noises += [TextNoise(name, p, seed) for p in ((None,) if name in WHOLE else probabilities)]
    return noises


def noisy_parts(
    noise: TextNoise | None, encoder: Encoder, blocks: Iterable[Block]
) -> Iterator[Part]:
    """Yield one part per chunk: even-indexed chunks are predicted, odd-indexed ones corrupted.

    `noise` None corrupts nothing. Each chunk is encoded separately. White space between two chunks
    belongs to the later one and is not corrupted. Raises InputError for conversations, and when no
    text follows an odd-indexed chunk.
    """
    document, affected = -1, False
    for chunk, index in _chunks(blocks):
        document += index == 0
        affected |= index == 2 and not chunk.isspace()
        if index % 2 == 0:
            yield encoder.text(chunk, first=index == 0)
            continue
        text = chunk.lstrip()
        if noise is not None:
            text = noise.spoil(text, f"{document}/{index}")
        space = chunk[: len(chunk) - len(chunk.lstrip())]
        yield encoder.text(space + text, first=False, wanted=False)
    if not affected:
        raise InputError(
            f"has no more than {2 * CHUNK_WORDS} words: nothing comes after a corrupted chunk",
            field="text",
            remedy="give a longer text",
        )


def _chunks(blocks: Iterable[Block]) -> Iterator[tuple[str, int]]:
    """Yield chunks of CHUNK_WORDS words with leading space, and their index in the document.

    The last chunk holds the remaining words and the trailing space.
    """
    buffer, index = "", 0
    for block in blocks:
        if isinstance(block, Dialogue):
            raise InputError(
                "is for plain text, not for conversations", field="--noise",
                remedy="give a text file",
            )  # fmt: skip
        if block.first:
            if buffer:
                yield buffer, index
            buffer, index = "", 0
        buffer += block.text
        start = 0
        for number, word in enumerate(_WORD.finditer(buffer), 1):
            # a word at the very end may continue in the next stretch
            if number % CHUNK_WORDS == 0 and word.end() < len(buffer):
                yield buffer[start : word.end()], index
                start, index = word.end(), index + 1
        buffer = buffer[start:]
    if buffer:
        yield buffer, index
