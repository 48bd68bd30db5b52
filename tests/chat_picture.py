"""`python -m tests.chat_picture`: take docs/use/chat.svg anew, from a chat in a terminal.

The chat is with `smollm2-hybrid` (`edge pull smollm2-hybrid`), by its own sampling settings.
Nothing in the picture is written by hand.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from tests.terminal import Terminal

PICTURE = Path(__file__).parents[1] / "docs" / "use" / "chat.svg"
COLUMNS = 100
# a line that is typed → the last words of what follows
ASKED = {
    "What is the opposite of hot?": " MB ]",
    "What is the capital of Japan?": " MB ]",
    "/undo": "recomputed",
    "Write two sentences about the sea.": " MB ]",
    "/show": "to take back",
}


def conversation(seed: str = "0") -> list[str]:
    """Return the lines of the terminal after a conversation, up to the last prompt."""
    size = (24, COLUMNS)
    terminal = Terminal(
        "smollm2-hybrid", "--seed", seed, size=size, term="xterm-256color", anew=True
    )
    for line, ending in ASKED.items():
        terminal.ask(line, ending)
    terminal.wait_for(">>>")
    lines = terminal.screen()
    terminal.type("/bye\r")
    assert terminal.leave() == 0
    while not lines[-1]:
        lines.pop()
    return lines


def picture(lines: list[str]) -> str:
    """Return the lines as a picture of a terminal's window, in SVG that loads nothing, no font."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    for line in lines:
        console.print(line, markup=False, highlight=False, no_wrap=True)
    drawn = console.export_svg(title="edge-chat", unique_id="t")
    return re.sub(r"@font-face \{[^}]*\}\s*|<!--[^>]*-->\s*|Fira Code, ", "", drawn)


if __name__ == "__main__":
    PICTURE.write_text(picture(conversation()), encoding="utf-8")
