"""Whatever the documents name exists: links, headings, paths, commands, flags, make targets."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pdoc
import pytest
import typer.main

import edge
from edge.apps import chat, cli
from edge.apps.info.board_table import table
from edge.runtime.parameters import SamplingParams
from tests.test_house import crossed

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT, capture_output=True, text=True, check=True,
).stdout.split()  # fmt: skip
# cards belong to the bundles' hashed files and name the sources of their data
DOCUMENTS = [name for name in TRACKED if not name.startswith("apps/bundles/")]
ROOMS = ("edge", "plugins", "export", "runtime", "apps", "tests", "jetson", "docs", ".ci")
SOURCES = [
    file
    for room in ("edge", "plugins", "export", "runtime", "apps")
    for file in (ROOT / room).rglob("*.py")
]
PATH = re.compile(rf"(?<![\w/.~$-])(?:{'|'.join(map(re.escape, ROOMS))})/[\w./*{{}},-]+")
BUILT = ("edge/plugins/tensorrt/lib",)  # exists after `make plugins`
CODE = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard",
     "*.py", "*.cpp", "*.h", "*.sh", "*.toml", "*.json", "*.inc"],
    cwd=ROOT, capture_output=True, text=True, check=True,
).stdout.split()  # fmt: skip
# what a function or a class is called: _with, with_, With or with()
NAME = re.compile(r"(?:\w+\.)*(_[a-z]\w*|[A-Z]+[a-z]\w*|[a-z]\w*_\w+|\w+(?=\())(?:\(.*\))?")
# an option of ONNX Runtime, an architecture, a name that is put together, one in an old commit
ELSEWHERE = {"set_denormal_as_zero", "sm_90a", "EdgeGelu", "outlier_trial"}
PROGRAM = re.compile(r"(?:^|[\s/|(])(edge-chat|edge|make|python -m edge)(?=[\s.]|$)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def code_of(text: str) -> Iterator[str]:
    """Return inline code, and the lines of fenced blocks with backslash continuations joined."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
    for language, block in fence.findall(text):
        if language in ("", "sh", "console"):
            yield from re.sub(r"\\\n", " ", block).splitlines()
    # a newline inside inline code is a space
    for found in re.findall(r"`([^`]+)`", fence.sub("", text)):
        yield " ".join(found.split())


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links(name: str) -> None:
    absent = []
    assert "<<<<<<<" not in text_of(name), "an unresolved merge"
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        path, _, heading = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (heading and heading not in anchors(file.read_text("utf-8"))):
            absent.append(target)
    assert not absent


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths(name: str) -> None:
    found = [path for line in code_of(text_of(name)) for path in PATH.findall(line)]
    each = [path for written in found for path in braces(written.rstrip("./,:"))]
    assert not [path for path in each if not there(path)]


def there(path: str) -> bool:
    """Return whether a path exists; NAME and KIND match anything."""
    return path in BUILT or any(ROOT.glob(re.sub("NAME|KIND", "*", path)))


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.startswith("docs/inside/")])
def test_names(name: str) -> None:
    """Functions and classes exist; one beside a file, in a cell of a table, exists in that file."""
    text = text_of(name)
    assert not names_in(code_of(text)) - words_of_code() - ELSEWHERE
    rows = (line for line in text.splitlines() if line.startswith("|"))
    for cell in (cell for row in rows for cell in row.split("|")):
        code = re.findall(r"`([^`]+)`", cell)
        if files := [file for each in code if each.endswith(".py") for file in called(each)]:
            beside = {word for file in files for word in words(file)}
            assert not names_in(code) - beside - ELSEWHERE, cell


def called(path: str) -> list[Path]:
    """Return the source files that a path or the name of a file means."""
    return [file for file in SOURCES if str(file.relative_to(ROOT)).endswith(path)]


def names_in(code: Iterable[str]) -> set[str]:
    return {found[1] for each in code if (found := NAME.fullmatch(each))}


def words(file: Path) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", file.read_text("utf-8")))


@cache
def words_of_code() -> set[str]:
    return {word for name in CODE if (ROOT / name).is_file() for word in words(ROOT / name)}


def braces(path: str) -> list[str]:
    """Expand a/{b,c} as a shell does."""
    found = re.search(r"\{([^}]*)\}", path)
    if found is None:
        return [path]
    return [path[: found.start()] + each + path[found.end() :] for each in found[1].split(",")]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_and_flags(name: str) -> None:
    every = [check(call) for line in code_of(text_of(name)) for call in calls(line)]
    assert not [problem for problem in every if problem]


def calls(line: str) -> Iterator[list[str]]:
    """Return the words of each call of one of our programs in a line of shell."""
    line = re.sub(r"\s#.*$|…", "", line)
    for part in re.split(r"\||&&|;|<|>|\bthen\b", line):
        found = PROGRAM.search(part)
        if found is None:
            continue
        try:
            yield shlex.split(part[found.start(1) :].strip().strip(")"))
        except ValueError:
            continue  # half of a quotation: prose


def check(words: list[str]) -> str | None:
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", text_of("Makefile"), re.M)
        bad = [w for w in words[1:2] if re.fullmatch(r"[a-z][a-z0-9-]*", w) and w not in targets]
        return f"make {bad[0]}" if bad else None
    if words[:2] == ["python", "-m"]:
        spec = importlib.util.find_spec(words[2])
        if spec is None:
            return f"no module {words[2]}"
        app = app_of(words[2] + ("" if spec.submodule_search_locations is None else ".__main__"))
        if app is None:
            return None
        words = words[2:]
    else:
        app = chat.app if words[0] == "edge-chat" else cli.app
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    if words[0] == "edge":
        if not rest or not re.fullmatch(r"[a-z]+", rest[0]):
            return None
        found = command.get_command(None, rest[0])
        if found is None:
            return f"no command edge {rest[0]}"
        command, rest = found, rest[1:]
        if (inside := getattr(command, "commands", {})) and rest:
            if rest[0] not in inside:
                return f"no command {' '.join(words[:3])}"
            command, rest = inside[rest[0]], rest[1:]
    known = {opt for each in command.params for opt in (*each.opts, *each.secondary_opts)}
    bad = [
        w for w in rest if re.match(r"--?[a-z]", w) and w.split("=")[0] not in {*known, "--help"}
    ]
    return f"{words[0]} {words[1]} {' '.join(bad)}" if bad else None


def app_of(module: str) -> typer.Typer | None:
    """Return the typer program of a module of ours, or None if it has none."""
    if not module.startswith("edge.apps"):
        return None
    found = importlib.import_module(module)
    if (app := getattr(found, "app", None)) is None and hasattr(found, "main"):
        app = typer.Typer()
        app.command()(found.main)
    return app


def test_the_readme_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 120


def test_the_table_of_a_board_is_what_the_published_configs_come_to() -> None:
    assert table(ROOT / "tests/published") in text_of("docs/use/models.md")


def test_the_api_reference_has_what_users_ask_for(tmp_path: Path) -> None:
    named = re.search(r"^API := ((?:.*\\\n)*.*)", text_of("Makefile"), re.M)
    assert named is not None
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*named[1].replace("\\", " ").split(), output_directory=tmp_path)
    page = (tmp_path / "edge.html").read_text("utf-8")
    verbs = ["Session.cancel", "Session.snapshot", "Session.restore", "Model.session", "load"]
    for name in (*verbs, *(f"SamplingParams.{each.name}" for each in fields(SamplingParams))):
        assert f'id="{name}"' in page, name
    result = (tmp_path / "edge/runtime/result.html").read_text("utf-8")
    assert 'id="GenerationResult.finish_reason"' in result


def test_a_token_crosses_the_files_that_its_page_names() -> None:
    table = text_of("docs/inside/token.md").partition("## A token")[2].partition("## After")[0]
    named = {path for line in code_of(table) for path in PATH.findall(line)}
    with edge.load("demo", engine="ort", threads=1) as model:
        pieces = model.session(seed=1).chat("Hello, how are you?", max_tokens=32)
        for _ in range(5):
            next(pieces)
        assert crossed(lambda: next(pieces)) == named
        pieces.close()


def test_errors_in_troubleshooting_are_those_of_the_code() -> None:
    """Each heading is a message, with … for the variable parts."""
    said = {text for file in SOURCES for text in strings(ast.parse(file.read_text("utf-8")))}
    headings = re.findall(r"^### `(.*)`$", text_of("docs/use/troubleshooting.md"), re.M)
    assert len(headings) > 20
    for heading in headings:
        parts = [part.strip() for part in heading.split("…") if part.strip(" ,:")]
        assert any(all(part in text for part in parts) for text in said), heading


def strings(tree: ast.AST) -> Iterator[str]:
    """Return every string of a program, with … for the values of an f-string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values
            )


def test_the_checks_see_what_is_wrong() -> None:
    assert check(["edge", "profile", "demo", "--draftt", "ngram"])
    assert check(["edge", "profil", "demo"]) and check(["make", "tests"])
    assert check(["edge", "profile", "demo", "--draft", "ngram"]) is None
    module = ["python", "-m", "edge.apps.demo.train"]
    assert check([*module, "bytes", "--dataa", "x"])
    assert check([*module, "bytes", "--data", "x"]) is None
    assert check(["python", "-m", "edge.apps.bench.drafts", "--round", "3"])
    assert list(calls("x | .venv/bin/edge-chat demo -p hi  # and so on")) == [
        ["edge-chat", "demo", "-p", "hi"]
    ]
    assert braces("a/{b,c}.py") == ["a/b.py", "a/c.py"]


def test_kept_measurements_say_where_they_are_from() -> None:
    """A page shows each, and a file that does not say when and how it was made proves nothing."""
    folder = ROOT / "docs/inside/measurements"
    pages = "".join(page.read_text() for page in folder.glob("*.md"))
    kept = sorted(folder.glob("*.json"))
    assert kept
    for file in kept:
        facts = json.loads(file.read_text())
        assert facts["date"].startswith(file.name[:10]) and facts["trustworthy"], file.name
        assert all(facts[name] for name in ("commit", "command", "machine", "versions")), file.name
        assert not facts["commit"].endswith("-dirty") and f"({file.name})" in pages, file.name
