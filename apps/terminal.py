"""Printing for all programs, without control characters that could command the terminal.

Names and messages may come from untrusted bundles, checkpoints, states and models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

DIM = ("\x1b[2m", "\x1b[0m")
# control characters except line feed and tab, and characters that reorder the text around them
# (Unicode Standard Annex 9): embeddings, overrides and isolates. The marks U+061C, U+200E and
# U+200F stay: names and answers in Arabic and Hebrew need them, and they only act as a letter does.
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


def console(**options: Any) -> Console:
    """Return a console of rich for tables and progress bars, which prints harmless text.

    `options`: those of `rich.console.Console`. rich itself removes some control characters, but
    not ESC.
    """
    from rich.console import Console
    from rich.segment import Segment

    class HarmlessConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else harmless(text), style, control)

    return HarmlessConsole(**options)
