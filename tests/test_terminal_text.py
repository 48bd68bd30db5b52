"""Names and messages from strangers are plain text on a terminal, whatever prints them."""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from edge.apps import exits
from edge.apps.chat.output import note
from edge.apps.cli import app, main
from edge.apps.measure.table import FigureTable, show
from edge.apps.terminal import console, harmless, say
from edge.errors import BundleError
from edge.runtime.model import resolve
from tests.malformed import resigned
from tests.programs import called
from tests.server_process import Server
from tests.terminal import SHORT, Terminal

PRINTING = (
    "print", "echo", "secho", "print_exc", "print_exception", "print_json", "Console",
    "HarmlessConsole",
)  # fmt: skip
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


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle in a folder whose name commands a terminal, and is markup to rich."""
    folder = tmp_path_factory.mktemp("models") / "".join(("[/b][red]", *HOSTILE)).replace("\0", "")
    shutil.copytree(resolve("demo-draft"), folder)
    (folder.parent / "text.txt").write_text("some words to read\n" * 20)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "DIR"],
        ["eval", "DIR", "DIR/../text.txt"],
        ["eval", "DIR", "DIR/../text.txt", "--against", "DIR"],
        ["profile", "DIR", "-p", "8", "-n", "2", "-r", "1", "--context", "8", "--threads", "1"],
        ["chat", "DIR", "-p", "hello", "--max-tokens", "2"],
        ["chat", "DIR", "-p", "hello", "--draft", "DIR", "--max-tokens", "2", "--verbose"],
        ["chat", "DIR/none", "-p", "hello"],
        ["doctor", "DIR/none"],
        ["export", "DIR", "-o", "DIR/../out"],
        ["list"],
        ["show", "DIR"],
        ["info", "DIR", "DIR"],
        ["info", "--DIR"],
        ["DIR"],
    ],
    ids=" ".join,
)
def test_the_name_of_a_folder_is_harmless(
    arguments: list[str], hostile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command that reads a bundle says where it lies, in lines, tables and errors."""
    monkeypatch.setenv("EDGE_MODELS", str(hostile_folder.parent))
    given = [each.replace("DIR", str(hostile_folder)) for each in arguments]
    _, out, err = called(main, *given)
    told = out + err
    assert told and not commands(told)


def test_tables_and_bars_are_harmless_and_hold_no_markup() -> None:
    parts = [
        FigureTable(("[red]" + text, "b" + text), [("[/b]" + text, "2")], title=text)
        for text in HOSTILE
    ]
    out = io.StringIO()
    show([*parts, *HOSTILE, "[/b]"], console(file=out, width=160, force_terminal=True))
    bare = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # rich's own bold and italic
    assert bare.count("[/b]") == len(HOSTILE) + 1 and bare.count("[red]") == len(HOSTILE)
    assert "title" in bare and not commands(bare)


def test_a_chat_in_a_hostile_folder_writes_only_its_own_sequences(hostile_folder: Path) -> None:
    ordinary = hostile_folder.parent / "ordinary"
    if not ordinary.exists():
        shutil.copytree(hostile_folder, ordinary)
    found = []
    for folder in (ordinary, hostile_folder):
        terminal = Terminal(str(folder), *SHORT)
        terminal.wait_for("/help for commands")
        terminal.bye()
        found.append(
            set(re.findall(r"[\x80-\x9f\u202a-\u202e\u2066-\u2069]|\x1b\].?", terminal.raw))
        )
    assert found[0] == found[1]


def test_a_server_in_a_hostile_folder_logs_harmless_text(hostile_folder: Path) -> None:
    with Server("--log", bundle=str(hostile_folder)) as server:
        server.request("GET", "/v1/models")
        server.request("GET", "/%1b]0;title%07")
        server.request("POST", "/v1/chat/completions", {"model": HOSTILE[1], "messages": []})
    assert '"path"' in server.stderr and not commands(server.stderr)


def test_nothing_else_prints() -> None:
    """A single place prints, and makes consoles; any other would have to clean its text, too."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "apps").rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        if name.startswith(("apps/demo/", "apps/bench/")):  # for edge's developers
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            last = called.rpartition(".")[2]
            if last in PRINTING or called.endswith(("stdout.write", "stderr.write")):
                found.setdefault(last, set()).add(name)
            # a bar without a console makes its own
            bare = last in ("Progress", "Live", "Status")
            if bare and not any(word.arg == "console" for word in node.keywords):
                found.setdefault(last, set()).add(name)
    # `show` prints on the console that apps/terminal.py makes
    assert found == {
        "print": {"apps/terminal.py", "apps/measure/table.py"},
        "HarmlessConsole": {"apps/terminal.py"},
    }
    assert sys.modules["edge.apps.terminal"]
