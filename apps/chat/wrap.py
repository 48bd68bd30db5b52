"""Word wrap for streamed text, of which nothing written can be changed."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Callable

# Columns that must be left for a word to be written as it arrives. A word that begins closer to the
# margin waits until it is complete, or until it does not fit.
ROOM = 24
FENCES = ("```", "~~~")


class Wrap:
    """Word wrapper that asks for the current number of columns.

    Fenced code is not wrapped, so that it can be copied; neither are words longer than a line.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        # text that waits, and its columns
        self._word, self._width = "", 0
        self._inside = False  # inside a word whose beginning is written
        self._line = ""  # the beginning of the line, and whether it is code
        self._code = False

    def feed(self, piece: str) -> str:
        """Take a piece of text; return the text to write now."""
        columns = self._columns()
        if columns < 1:
            return self.rest() + piece
        return "".join([self._feed_letter(letter, columns) for letter in piece])

    def rest(self) -> str:
        """Return the text that still waits."""
        word, self._word = self._word, ""
        self._column, self._width = self._column + self._width, 0
        return word

    def _feed_letter(self, letter: str, columns: int) -> str:
        if letter in " \n\t":
            return self.rest() + self._feed_space(letter, columns)
        if len(self._line) < 8:
            self._line += letter
        width = _width(letter)
        # a line may end between any two wide letters, where the terminal ends it
        if self._code or self._inside or width > 1:
            written = self.rest() + letter
            overflows = self._column + width > columns
            self._column = width if overflows else self._column + width
            self._inside = width < 2
            return written
        if not self._word and self._column + ROOM <= columns:
            self._inside, self._column = True, self._column + width
            return letter
        self._word, self._width = self._word + letter, self._width + width
        if self._column + self._width <= columns:
            return ""
        new_line = "\n" if self._column else ""
        self._inside, self._column = True, 0
        return new_line + self.rest()

    def _feed_space(self, letter: str, columns: int) -> str:
        self._inside = False
        if letter == "\n":
            if self._line.lstrip().startswith(FENCES):
                self._code = not self._code
            self._column, self._line = 0, ""
            return letter
        if len(self._line) < 8:
            self._line += letter
        if self._column >= columns and not self._code:
            return ""  # the next word begins a line
        self._column += 8 - self._column % 8 if letter == "\t" else 1
        return letter


def _width(letter: str) -> int:
    """Return the columns of a letter: 0 for a combining mark, 2 for a wide letter."""
    if letter < "\x7f":
        return 1
    if unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def wrapped(text: str, columns: int) -> str:
    """Wrap a note at `columns`, with continuation lines indented."""
    fill = textwrap.TextWrapper(
        max(columns, 12), subsequent_indent="  ", replace_whitespace=False,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    lines = text.split("\n")
    return "\n".join(fill.fill(line) if len(line) > columns else line for line in lines)
