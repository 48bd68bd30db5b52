"""Everything that programs print goes through here, so that no text of strangers commands a
terminal: names and messages come from bundles, checkpoints, states and models.
"""

from __future__ import annotations

import sys
from typing import TextIO

DIM = ("\x1b[2m", "\x1b[0m")
# control characters but line feed and tab, and what turns the direction of text around (Unicode
# Standard Annex 9): embeddings, overrides and isolates
_COMMANDS = {
    code: None
    for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}


def harmless(text: str) -> str:
    """The text without what a terminal would obey."""
    return text.translate(_COMMANDS)


def say(
    *values: object,
    sep: str = " ",
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
    style: tuple[str, str] = ("", ""),
) -> None:
    """`print` for people: whatever the values hold is only text. `style` is put around it."""
    text = harmless(sep.join(map(str, values)))
    print(f"{style[0]}{text}{style[1]}", end=end, file=file or sys.stdout, flush=flush)


def tell_traceback() -> None:
    """The exception being handled, in full, on standard error."""
    import traceback

    say(traceback.format_exc(), end="", file=sys.stderr, flush=True)
