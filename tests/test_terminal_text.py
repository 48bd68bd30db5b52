"""Names and messages from strangers are plain text on a terminal, whatever prints them."""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from edge.apps import exits
from edge.apps.chat.output import note
from edge.apps.cli import app
from edge.apps.terminal import harmless, say
from edge.errors import BundleError
from edge.runtime.model import resolve
from tests.malformed import resigned

ROOT = Path(__file__).parent.parent
# cursor and colours, window titles, the clipboard, C1, bidi, and what ends or hides a line
HOSTILE = (
    "\x1b[2J\x1b[31mred", "\x1b]0;title\x07", "\x1b]52;c;cm0gLXJmIH4=\x07", "\x9b31m", "\x90q\x9c",
    "\u202egnp.exe", "\u2066\u2069\u202a\u202d", "over\rwritten", "\x08\x7f\x00\x0b\x0c\x85",
)  # fmt: skip


def commands(text: str) -> list[str]:
    """Return the control sequences that a terminal would obey."""
    return [
        c for c in text
        if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160
        or "\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069"
    ]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    out = io.StringIO()
    say("a", text, file=out)
    assert commands(text) and not commands(out.getvalue())
    assert harmless("é 東京\t🦾\n\u200fשלום") == "é 東京\t🦾\n\u200fשלום"


@pytest.mark.parametrize("text", HOSTILE)
def test_errors_and_notes_are_harmless(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise BundleError(text, file=text, field=text, remedy=text)

    def fail() -> None:
        raise RuntimeError(text)

    assert exits.exit_code_of(refuse) == 1 and exits.exit_code_of(fail) == 1
    note(text)
    told = capsys.readouterr().err
    assert "error: " in told and "RuntimeError" in told and not commands(told)


def test_what_a_bundle_says_of_itself_is_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(resolve("demo-draft"), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    hostile = "".join(HOSTILE)

    def spoiled(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {name: spoiled(one, name) for name, one in value.items()}
        free = key in ("licence", "source")
        return hostile if isinstance(value, str) and free else value

    manifest["provenance"] = spoiled(manifest["provenance"])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    resigned(folder)
    for arguments in (
        ["info", str(folder)],
        ["info", str(folder), "--json"],
        ["info", hostile.replace("\0", "")],
    ):
        exits.exit_code_of(lambda arguments=arguments: app(arguments, standalone_mode=False))
    told = "".join(capsys.readouterr())
    assert "title" in told and not commands(told)


def test_nothing_else_prints() -> None:
    """A single place prints; any other would have to clean its text, too."""
    found = set()
    for file in sorted((ROOT / "apps").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if name.startswith(("apps/demo/", "apps/bench/")):  # for edge's developers
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("print", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc"):
                found.add(name)
    assert found == {"apps/terminal.py"}
    assert sys.modules["edge.apps.terminal"]
