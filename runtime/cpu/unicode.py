"""The characters that `tokenizers` treats as letters, marks, numbers and space, for the C library.

    python -m edge.runtime.cpu.unicode     rewrites runtime/libedge/src/unicode.inc

They are queried from `tokenizers`: its patterns and its `Digits` use different Unicode versions.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from tokenizers import Regex, pre_tokenizers

from edge.runtime.cpu.schemas import FOLDER

LETTER, NUMBER, SPACE, DIGIT, COMPOSES, MARK = 1, 2, 4, 8, 16, 32
_SURROGATES = range(0xD800, 0xE000)


def classes() -> list[int]:
    """Return the classes of every code point, as bits."""
    characters = [chr(code) for code in range(0x110000) if code not in _SURROGATES]
    out = [0] * 0x110000
    kinds = ((r"\p{L}+", LETTER), (r"\p{N}+", NUMBER), (r"\s+", SPACE), (r"\p{M}+", MARK))
    for pattern, bit in kinds:
        splitter = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
        for piece, _ in splitter.pre_tokenize_str("".join(characters)):
            for character in piece:
                out[ord(character)] |= bit
    # a piece of one character other than \x01 is then a digit
    spaced = "".join("\x01" + character for character in characters)
    for piece, _ in pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(spaced):
        if len(piece) == 1 and piece != "\x01":
            out[ord(piece)] |= DIGIT
    for character in composing(characters):
        out[ord(character)] |= COMPOSES
    return out


def composing(characters: list[str]) -> Iterator[str]:
    """Yield the characters that NFC may change, alone or after another character."""
    combining = {chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))}
    for character in characters:
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            combining.add(chr(int(parts[1], 16)))
    for character in characters:
        changes = unicodedata.normalize("NFC", character) != character
        unknown = unicodedata.category(character) == "Cn"  # later Unicode versions may assign it
        if changes or unknown or unicodedata.combining(character) or character in combining:
            yield character


def content() -> str:
    """Return the code points where the classes change, each shifted left by six class bits."""
    code_classes = classes()
    starts = [
        code for code in range(0x110000) if not code or code_classes[code] != code_classes[code - 1]
    ]
    numbers = [f"0x{code << 6 | code_classes[code]:x}," for code in starts]
    lines, line = [], ""
    for number in numbers:
        if len(line) + len(number) > 98:
            lines.append(line)
            line = ""
        line += number
    return "\n".join([*lines, line]) + "\n"


if __name__ == "__main__":
    (FOLDER / "unicode.inc").write_text(content())
