"""How the code is laid out: what a token and a turn pass through, what is said once and where."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import edge
from edge import mixers
from edge.plugins.cpu import library
from edge.runtime.model import Model
from tests.facts import says

HOUSE = Path(edge.__file__).resolve().parent.parent
PUBLIC = {"_replace"}  # of named tuples: documented, and underlined only to keep fields apart
ROOMS = ("edge", "export", "plugins", "runtime", "apps")


@pytest.fixture(scope="module")
def demo() -> Model:
    return edge.load("demo", engine="ort", threads=1)


@dataclass
class Contents:
    """What a Python file names and says.

    Attributes:
        classes: its public classes.
        own: private names that it gives.
        reached: private names of others that it uses, imports or patches.
        sayings: every six words of prose in a row of its texts, docstrings aside.
    """

    classes: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    reached: list[str] = field(default_factory=list)
    sayings: set[str] = field(default_factory=set)


@cache
def contents(room: str) -> dict[str, Contents]:
    files = [file for file in (HOUSE / room).rglob("*.py") if file.resolve() == file]
    return {str(file.relative_to(HOUSE)): contents_of(file) for file in files}


def contents_of(file: Path) -> Contents:
    found = Contents()
    documentation = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(ast.Constant() as text):
                documentation.add(id(text))
            case ast.Constant(str(text)) if id(node) not in documentation:
                found.sayings |= set(sixes(text))
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                if is_private(name):
                    found.own.add(name)
                elif isinstance(node, ast.ClassDef):
                    found.classes.add(name)
            case ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()):
                if is_private(name):
                    found.own.add(name)
            case ast.Attribute(ast.Name("self" | "cls")):
                pass
            case ast.Attribute(_, name) if is_private(name):
                found.reached.append(name)
            case ast.ImportFrom(names=names):
                found.reached += [one.name for one in names if is_private(one.name)]
            case ast.Call(ast.Attribute(_, "setattr" | "object"), arguments):
                named = [str(one.value) for one in arguments[:2] if isinstance(one, ast.Constant)]
                last = [name.rpartition(".")[2] for name in named]
                found.reached += [name for name in last if is_private(name)]
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def sixes(text: str) -> Iterator[str]:
    """Yield every six words in a row of prose."""
    words = text.split()
    for six in (words[at : at + 6] for at in range(len(words) - 5)):
        if all(re.fullmatch(r"[(']?[A-Za-z'-]+[,.;:?')]*", word) for word in six):
            yield " ".join(word.strip("(),.;:?'") for word in six)


def crossed(work: Callable[[], object]) -> set[str]:
    """Return the project's files in which a function ran meanwhile."""
    names: set[str] = set()

    def profiled(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    gc.collect()  # do not count finalizers of earlier tests
    sys.setprofile(profiled)
    try:
        work()
    finally:
        sys.setprofile(None)
    paths = {Path(name).resolve() for name in names}
    here = [path.relative_to(HOUSE) for path in paths if path.is_relative_to(HOUSE)]
    return {str(path) for path in here if path.parts[0] in ROOMS}


@pytest.mark.parametrize(("engine", "most"), [("ort", 8), ("cpu", 10)])
def test_a_steady_token_crosses_few_files(engine: str, most: int) -> None:
    """Sampled as `edge-chat` does, without a drafter (docs/inside/token.md)."""
    if engine == "cpu" and library.path() is None:
        pytest.skip("needs the kernels for CPUs")
    prompt = "Write a long list of animals, fruits and colours."
    session = edge.load("demo", engine=engine, threads=1).session()
    answer = session.chat(prompt, temperature=0.7, seed=3)
    for _ in range(3):
        next(answer)
    files = crossed(lambda: next(answer))
    assert "runtime/generate.py" in files and len(files) <= most, sorted(files)
    answer.close()


def test_a_turn_of_a_chat_crosses_few_files(demo: Model) -> None:
    session = demo.session()
    files = crossed(lambda: session.chat("Hello!", max_tokens=16, seed=2).finish())
    assert "runtime/session.py" in files and len(files) <= 25, sorted(files)


def test_speculation_is_imported_with_a_drafter_only() -> None:
    program = (
        "import sys, edge; model = edge.load('demo', threads=1)\n"
        "model.session().chat('Hello!', max_tokens=4).finish()\n"
        "import edge.apps.chat.output, edge.apps.chat.conversation\n"
        "print(*(name for name in sys.modules if 'speculate' in name))\n"
        "model.session(draft='ngram').chat('Hello!', max_tokens=4).finish()\n"
        "print(*(name for name in sys.modules if 'speculate' in name))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    without, drafting = done.stdout.split("\n")[:2]
    assert without == "" and "edge.runtime.speculate" in drafting, done.stderr


def test_no_two_public_classes_have_the_same_name() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for room in ROOMS:
        for file, names in contents(room).items():
            for name in names.classes:
                homes[name].add(file)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_nothing_asks_which_kind_a_layer_is() -> None:
    """A layer is asked for its properties, or a table is (docs/inside/add-a-mixer.md)."""
    names = "|".join(mixer.__name__ for mixer in mixers.every())
    kinds = "|".join(mixers.kind_of(mixer) for mixer in mixers.every())
    asks = re.compile(rf"isinstance\([^()]+\b({names})\b|\.kind (==|!=) \"({kinds})\"")
    asking = {
        str(file.parent.relative_to(HOUSE))
        for room in ROOMS
        for file in (HOUSE / room).rglob("*.py")
        if file.resolve() == file and asks.search(file.read_text(encoding="utf-8"))
    }
    assert asking == set()


def test_few_small_files_have_one_reader() -> None:
    """Such a file may be a chapter of its reader, or a page too many; files that are found by
    their place, ops and families, are neither.
    """
    graph = pytest.importorskip("grimp").build_graph("edge", exclude_type_checking_imports=True)
    small = {
        name: readers
        for name in graph.modules
        if (file := HOUSE / f"{name.replace('.', '/')}.py").exists()
        and not (HOUSE / "plugins" / file.parent.name / "statement.py").exists()
        and file.parent.name != "families"
        and len(file.read_text(encoding="utf-8").splitlines()) < 50
        and len(readers := graph.find_modules_that_directly_import(name)) == 1
    }
    assert len(small) <= 8, small


def uses(ours: set[str], used: Callable[[Contents], Iterable[str]]) -> list[str]:
    """Return what tests use of `ours`, with their files."""
    return [
        f"{file}: {name}"
        for file, names in contents("tests").items()
        for name in used(names)
        if name in ours
    ]


def test_tests_reach_for_few_private_names() -> None:
    """What is left injects a fault that nothing public injects, or is lm-eval's own protocol."""
    rooms = [names for room in (*ROOMS, "tests") for names in contents(room).values()]
    found = uses({name for names in rooms for name in names.own}, lambda names: names.reached)
    assert len(found) <= 11, found


def test_tests_repeat_no_sentences() -> None:
    """They look for facts in a message, not for its wording (tests/facts.py). What is left are
    prompts.
    """
    rooms = [names for room in ROOMS for names in contents(room).values()]
    found = uses({six for names in rooms for six in names.sayings}, lambda names: names.sayings)
    assert len(found) <= 3, found


def test_a_fact_is_whole_and_in_its_place() -> None:
    assert says("target: bytes 1 to 17\nof its 16", "target: ", 1, 17, 16)
    for facts in ((7,), (17, 1), ("byte",), ("its 16", "target")):
        assert not says("target: bytes 1 to 17\nof its 16", *facts)
