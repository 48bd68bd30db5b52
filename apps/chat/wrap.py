"""Lines that end between words, of text that comes piece by piece and is never taken back."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Callable

# Letters that a word must have room for to be written as it comes. A word that begins nearer to the
# margin waits until it is whole, or until it does not fit.
ROOM = 24
FENCES = ("```", "~~~")


class Wrap:
    """Breaks text between words, in lines of as many columns as there are at that moment.

    Code between fences stays as it is, so that it can be copied, and so does what fits nowhere.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        # what waits, and its columns
        self._word, self._width = "", 0
        self._inside = False  # of a word whose beginning is written
        self._line = ""  # how the line begins, and whether it is code
        self._code = False

    def feed(self, piece: str) -> str:
        """What to write now."""
        columns = self._columns()
        if columns < 1:
            return self.rest() + piece
        return "".join([self._take(letter, columns) for letter in piece])

    def rest(self) -> str:
        """What still waits."""
        word, self._word = self._word, ""
        self._column, self._width = self._column + self._width, 0
        return word

    def _take(self, letter: str, columns: int) -> str:
        if letter in " \n\t":
            return self.rest() + self._space(letter, columns)
        if len(self._line) < 8:
            self._line += letter
        width = _width(letter)
        # between wide letters a line may end anywhere, and there the terminal ends it
        if self._code or self._inside or width > 1:
            written = self.rest() + letter
            over = self._column + width > columns
            self._column = width if over else self._column + width
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

    def _space(self, letter: str, columns: int) -> str:
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
    """Columns of a letter: 0 of a mark that stands on the one before, 2 of a wide one."""
    if letter < "\x7f":
        return 1
    if unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def wrapped(text: str, columns: int) -> str:
    """A note in lines of so many columns; what continues a line is indented."""
    fill = textwrap.TextWrapper(
        max(columns, 12), subsequent_indent="  ", replace_whitespace=False,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    lines = text.split("\n")
    return "\n".join(fill.fill(line) if len(line) > columns else line for line in lines)
