"""Printing for all programs, without control characters that could command the terminal.

Names and messages may come from untrusted bundles, checkpoints, states and models.
"""

from __future__ import annotations

import sys
from typing import TextIO

DIM = ("\x1b[2m", "\x1b[0m")
# control characters except line feed and tab, and characters that change the direction of text
# (Unicode Standard Annex 9): embeddings, overrides and isolates
_CONTROLS = {
    code: None
    for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}


def harmless(text: str) -> str:
    """Return the text without characters that a terminal would obey."""
    return text.translate(_CONTROLS)


def say(
    *values: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
    style: tuple[str, str] = ("", ""),
) -> None:
    """Print values as harmless text, between the two strings of `style`."""
    text = harmless(sep.join(map(str, values)))
    print(f"{style[0]}{text}{style[1]}", end=end, file=file or sys.stdout, flush=flush)


def tell_traceback() -> None:
    """Print the traceback of the exception being handled to standard error."""
    import traceback

    say(traceback.format_exc(), end="", file=sys.stderr, flush=True)
