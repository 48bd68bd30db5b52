"""libedge, the C library: the same bits as Python's `cpu` engine, whose kernels it runs."""

from __future__ import annotations

import ctypes as c
import json
import os
import random
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge
from edge.bundle import open_bundle
from edge.plugins.cpu import library
from edge.runtime.constrain.mask import LAYOUT
from edge.runtime.cpu import schemas
from edge.runtime.cpu.engine import CpuEngine
from edge.runtime.engine import Engine
from edge.runtime.model import EMBEDDED, Model, resolve
from edge.runtime.state import State
from edge.text.template import Message
from tests import compiling, golden, libedge, libedge_bundles
from tests.facts import says
from tests.libedge import ALL_ROWS, COMMIT, CBundle, CModel, CSession, Handle, SessionOptions

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "runtime/libedge"
STRICT = {
    suffix: (*compiler, "-pedantic", "-Wall", "-Wextra", "-Werror")
    for suffix, compiler in {
        ".c": ("cc", "-std=c99"), ".cpp": ("c++", "-std=c++17"), ".o": ("c++",),
    }.items()
}  # fmt: skip
compiled = pytest.mark.skipif(
    library.path() is None,
    reason="needs the kernels for CPUs (run make test where there is a C++ compiler)",
)
# every mixer; states that are not fp32
TINY = {
    "mamba1": ("mamba1", "fp32", None),
    "mamba2": ("mamba2 groups", "fp16", None),
    "all": ("all", "fp32", None),
    "parallel": ("parallel", "fp32", None, "fp16"),
    "normed": ("normed", "fp32", None),
    "short": ("short", "fp32", None),
    "head-gate": ("head gate", "fp32", None),
    "deltanet": ("deltanet", "w8", None),
    "experts": ("experts", "fp32", None),
    "int8": ("mamba1", "w8a8", "int8"),
    "window": ("attention odd", "fp32", None),
}


@cache
def python(kind: str) -> Model:
    return edge.load(folder(kind), engine="cpu", threads=1)


@cache
def engine(kind: str) -> Engine:
    """Return Python's engine, without a tokenizer."""
    if kind not in TINY:
        return python(kind).engine
    with open_bundle(folder(kind)) as opened:
        return CpuEngine.from_bundle(opened, threads=1)


@cache
def native(kind: str) -> CModel:
    return CModel(folder(kind))


def folder(kind: str) -> Path:
    if kind in TINY:
        return libedge_bundles.bundle(*TINY[kind])
    return resolve(kind)


class Pair:
    """A state of Python's engine and a session of C's, which get the same calls."""

    def __init__(self, kind: str, window: int = 4) -> None:
        self.engine = engine(kind)
        self.state: State = self.engine.new_state(window=window)
        self.session: CSession = native(kind).session(window=window)
        self._rng = np.random.default_rng(len(kind))
        self._vocab = native(kind).vocab

    def run(self, count: int, flags: int = 0, parents: list[int] | None = None) -> None:
        ids = self._rng.integers(0, self._vocab, count)
        expected = self.engine.run(
            ids[None], self.state, parents=parents,
            rows="all" if flags & ALL_ROWS else "last", commit=bool(flags & COMMIT),
        )  # fmt: skip
        found = self.session.run(ids.tolist(), flags, parents)
        np.testing.assert_array_equal(found, expected[0])

    def rewind(self, count: int) -> None:
        self.state.rewind(count)
        self.session.rewind(count)

    def same(self, path: Path) -> None:
        """Compare the state that C saves and Python reads."""
        assert (self.session.position, self.session.reach) == (
            self.state.position,
            self.state.reach,
        )
        self.session.save(path)
        other = self.engine.new_state(window=1)
        other.load(path)
        found = other.arrays()
        for name, array in self.state.arrays().items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@compiled
@pytest.mark.parametrize("name", EMBEDDED)
def test_golden_sentence(name: str) -> None:
    expected = golden.SENTENCES[name]
    said, _ = (
        native(name)
        .session()
        .generate(expected.prompt_ids, max_tokens=len(expected.ids), ignore_eos=1)
    )
    assert said == expected.ids


@compiled
@pytest.mark.parametrize("kind", [*TINY, *EMBEDDED])
def test_runs_and_states_are_those_of_python(kind: str, tmp_path: Path) -> None:
    pair = Pair(kind)
    pair.run(13, COMMIT)
    for _ in range(6):  # the oldest are applied for good
        pair.run(1)
    pair.same(tmp_path / "steps")
    pair.run(4, ALL_ROWS)
    pair.rewind(3)
    pair.run(2)
    pair.same(tmp_path / "rewound")
    for node, parents in ((2, [-1, -1, 1]), (1, [-1, 0, 0]), (-1, [-1])):
        pair.run(len(parents), ALL_ROWS, parents)
        pair.state.select(node)
        pair.session.do("select", node)
        pair.run(1)
    pair.run(3, COMMIT)
    pair.same(tmp_path / "trees")


@compiled
def test_a_tree_of_many_tokens() -> None:
    pair = Pair("all", window=24)
    pair.run(5, COMMIT)
    pair.run(20, ALL_ROWS, [-1, *(node // 2 for node in range(19))])
    pair.state.select(17)
    pair.session.do("select", 17)
    pair.run(3, ALL_ROWS)


@compiled
@pytest.mark.parametrize("kind", ["all", "parallel", "short", "window"])
def test_caches_that_slide_have_the_bits_of_pythons(kind: str, tmp_path: Path) -> None:
    """Far past the window, with every operation; a session of few tokens keeps all of them."""
    pair, rng = Pair(kind), random.Random(kind)
    assert pair.state.layout.slots is not None and pair.state.layout.slots < 80
    small = native(kind).session(window=2, capacity=79)
    verbs = ["commit", "commit", "steps", "run", "tree", "back", "fork", "restore", "file"]
    for step in range(80):
        verb = rng.choice(verbs)
        if verb == "commit":
            pair.run(rng.randint(1, 48), COMMIT)
        elif verb == "steps":
            for _ in range(6):
                pair.run(1)
        elif verb == "run":
            pair.run(rng.randint(1, 4), ALL_ROWS)
        elif verb == "tree":
            pair.run(4, ALL_ROWS, [-1, *(rng.randint(-1, node - 1) for node in range(1, 4))])
            node = rng.randint(-1, 3)
            pair.state.select(node)
            pair.session.do("select", node)
        elif verb == "back":
            assert pair.session.reach == pair.state.reach
            pair.rewind(rng.randint(0, pair.state.reach))
        elif verb == "fork":
            pair.state, pair.session = pair.state.fork(), pair.session.fork()
        elif verb == "restore":
            copied, kept = Handle(), pair.state.snapshot()
            pair.session.do("snapshot", c.byref(copied))
            pair.run(3)
            pair.session.do("restore", copied)
            pair.state.restore(kept)
            libedge.asked("edge_snapshot_free", None, copied)
        else:
            path = tmp_path / str(step)
            pair.same(path)
            if pair.session.position <= 79:
                small.load(path)
                small.save(path)
            pair.session.load(path)
            pair.state.load(path)
    assert pair.session.position > 2 * 79
    pair.same(tmp_path / "end")


@compiled
@pytest.mark.parametrize("kind", ["mamba1", "demo-draft", "demo", "window"])
def test_memory_plan(kind: str) -> None:
    expected = engine(kind).memory_plan(window=3, capacity=500)
    found = CBundle(folder(kind)).memory(SessionOptions(window=3, capacity=500))
    assert found.weights == expected["weights"] and found.state == expected["state_ring"]
    assert found.kv_cache == expected["kv_cache"] and found.snapshot == expected["snapshot"]
    assert 0 < found.workspace <= expected["workspace"]  # it has no picks


def test_schemas_are_those_of_the_models() -> None:
    """python -m edge.runtime.cpu.schemas rewrites them."""
    for name, content in schemas.files().items():
        assert (SOURCE / "src" / name).read_text() == content, name


def test_every_pattern_has_a_reader() -> None:
    text = (SOURCE / "src/schema.cpp").read_text()
    for content in schemas.files().values():
        joined = content.replace('R"json(', "").replace(')json"\n', "")
        for pattern in re.findall(r'"pattern":("(?:[^"\\]|\\.)*")', joined):
            assert pattern in text, pattern


# -- programs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed() -> Path:
    """Run `make install` of runtime/libedge into a folder, with the present library."""
    for tool in ("make", "cc", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}: apt-get install build-essential")

    def install(where: Path) -> None:
        prefix, build = f"PREFIX={where}", f"BUILD={where}/build"
        ran("make", "-C", SOURCE, "install", f"LIBRARY={library.path()}", prefix, build)

    return compiling.once("libedge", install)


def ran(*command: object, **options: Any) -> str:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=120, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(source: Path, where: Path, *flags: str) -> Path:
    """Compile a program with every warning an error."""
    return compiling.compiled(
        source.stem, *STRICT[source.suffix], str(source), *flags,
        f"-I{where}/include", f"-L{where}/lib", f"-Wl,-rpath,{where}/lib", "-ledge", "-pthread",
    )  # fmt: skip


def with_forms(source: Path, header: Path) -> Path:
    """Compile an example that keeps answers to forms to an object, which needs no library."""
    return compiling.compiled(
        f"{source.stem}.o", *STRICT[source.suffix], "-c", str(source), "-DROBOT_FORMS",
        f"-I{SOURCE}/include", f"-I{header}",
    )  # fmt: skip


@compiled
def test_the_c_example_says_the_golden_sentence(installed: Path) -> None:
    program = built(ROOT / "docs/examples/c/chat_tokens.c", installed)
    sentence = golden.SENTENCES["demo-draft"]
    said = ran(program, folder("demo-draft"), *sentence.prompt_ids).split()
    assert [int(token) for token in said][: len(sentence.ids)] == sentence.ids[: len(said)]
    said_bytes = golden.SENTENCES["demo-bytes"]
    text = ran(program, folder("demo-bytes"), input=bytes(said_bytes.prompt_ids).decode())
    assert text.encode().startswith(bytes(said_bytes.ids))
    for words, code, said in (
        (["/nowhere", "1"], 1, ("/nowhere: ", "not a folder")),
        ([folder("demo-draft"), "99999"], 1, ("prompt: ", "token id", "out of range")),
        ([folder("demo-draft"), "Hello"], 2, ("Hello: ", "not a token id")),
    ):
        failed = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
        assert failed.returncode == code and says(failed.stderr.splitlines()[-1], *said)


@compiled
def test_the_example_of_choices(installed: Path) -> None:
    program = built(ROOT / "docs/examples/c/choose.c", installed)
    prompt, actions = "<|user|>Which way?<|end|><|assistant|>", ["left", "right", "stop"]
    done = subprocess.run(
        [program, folder("demo"), prompt, *actions], capture_output=True, text=True
    )
    session = python("demo").session()
    ids = session.model.template.encode([Message("user", "Which way?")])
    expected = session.generate(ids, choices=actions, temperature=0).finish().text
    assert done.stdout == expected + "\n" and actions[done.returncode] == expected
    failed = subprocess.run([program, folder("demo"), prompt, "", "x"], capture_output=True)
    assert failed.returncode == 125 and b"texts.0: is empty" in failed.stderr


PROPERTIES = {
    "go": {"enum": ["left", "right", "léger"]},
    "why": {"type": "string", "maxLength": 12},
    "metres": {"type": "integer", "minimum": 0, "maximum": 99},
}
GO: dict[str, Any] = {
    "type": "object", "properties": PROPERTIES, "required": list(PROPERTIES),
    "additionalProperties": False,
}  # fmt: skip


HEADERS = ROOT / "tests/headers"  # of llguidance's functions too


def llguidance() -> tuple[Path, list[str]]:
    """Return the folder of llguidance's header, and what links its C library: that of the checkout
    EDGE_LLGUIDANCE, or the one in the Python package, with its functions declared in HEADERS.
    """
    package = pytest.importorskip("llguidance")
    header = HEADERS
    if checkout := os.environ.get("EDGE_LLGUIDANCE"):
        header = Path(checkout) / "parser"
        static = Path(checkout) / "target/release/libllguidance.a"
        if static.exists():
            return header, [str(static), "-lpthread", "-ldl", "-lm"]
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        pytest.skip("needs a Python with a shared library, or a static llguidance")
    shared, libraries = Path(package.__file__).parent, sysconfig.get_config_var("LIBDIR")
    python = f"-lpython{sysconfig.get_config_var('LDVERSION')}"
    flags = [str(shared / "_lib.abi3.so"), f"-L{libraries}", python, f"-Wl,-rpath,{libraries}"]
    return header, flags


@pytest.mark.parametrize("example", ["json.c", "robot_speech.cpp"])
def test_the_examples_of_forms_compile(example: str) -> None:
    """Without llguidance's library too, which not every Python can link."""
    assert with_forms(ROOT / "docs/examples/c" / example, HEADERS).exists()


@compiled
@pytest.mark.parametrize("name", ["demo", "demo-draft", "demo-bytes"])
def test_the_example_of_json(name: str, installed: Path) -> None:
    """llguidance's C library gives the answers that its Python package gives."""
    header, flags = llguidance()
    program = built(with_forms(ROOT / "docs/examples/c/json.c", header), installed, *flags)
    text = "<|user|>Go left for two metres.<|end|><|assistant|>"
    given = json.dumps(GO | {"x-guidance": LAYOUT})
    session = python(name).session()
    ids = session.model.tokenizer.encode(text, special=True)
    expected = session.generate(ids, json_schema=GO, temperature=0, max_tokens=256).finish()
    said = subprocess.run([program, folder(name), text, given], capture_output=True, text=True)
    assert (said.stdout, said.returncode) == (expected.text + "\n", 0), said.stderr
    assert set(json.loads(said.stdout)) == set(GO["required"])
    wrong = subprocess.run([program, folder(name), text, "{"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("schema: ")


@compiled
def test_the_cpp_example(installed: Path, tmp_path: Path) -> None:
    program = built(ROOT / "docs/examples/c/robot_loop.cpp", installed)
    prompt = golden.SENTENCES["demo-draft"].prompt_ids
    said = ran(program, folder("demo-draft"), tmp_path / "state", *prompt).splitlines()
    assert re.match(r"[1-9]\d* tokens within", said[0]) and said[1] == "0 tokens after a stop"
    session = python("demo-draft").session()
    assert said[2] == f"continues after {session.load(tmp_path / 'state')} tokens"


@compiled
@pytest.mark.parametrize("choices", [(), ("left", "left turn", "right")])
def test_the_core_of_the_ros_node(installed: Path, choices: tuple[str, ...]) -> None:
    """It answers like a chat in Python, turn after turn, whether an answer ends itself or not."""
    program = built(ROOT / "docs/examples/c/robot_speech.cpp", installed)
    questions = ["Hello, who are you?", "Say <|end|> twice.", "And now?"]
    text = "\n".join(questions) + "\n"
    said = ran(program, folder("demo-draft"), "60", "0", *choices, input=text)
    session = python("demo-draft").session()
    given = {"choices": choices} if choices else {}
    assert said == "".join(
        session.chat(question, temperature=0, max_tokens=256, **given).finish().text + "\n"
        for question in questions
    )


@compiled
@pytest.mark.parametrize(
    ("option", "form"), [("--json-schema", GO), ("--regex", "(go|turn) [a-z]+[.]")]
)
def test_the_core_of_the_ros_node_keeps_to_forms(option: str, form: Any, installed: Path) -> None:
    """With llguidance it answers as Python does; without, it says what is missing."""
    source, given = ROOT / "docs/examples/c/robot_speech.cpp", [option, form]
    if isinstance(form, dict):
        given = [option, json.dumps(form)]
    words = [folder("demo-draft"), "60", "0", *given]
    without = subprocess.run(
        [built(source, installed), *map(str, words)], input="Hi\n", capture_output=True, text=True
    )
    assert without.returncode == 1 and "build with -DROBOT_FORMS" in without.stderr
    header, flags = llguidance()
    program = built(with_forms(source, header), installed, *flags)
    questions = ["Which way?", "And now?"]
    said = ran(program, *words, input="\n".join(questions) + "\n")
    session = python("demo-draft").session()
    how: dict[str, Any] = {option[2:].replace("-", "_"): form}
    assert said == "".join(
        session.chat(question, temperature=0, max_tokens=256, **how).finish().text + "\n"
        for question in questions
    )
    wrong = subprocess.run(
        [program, *map(str, words[:3]), option, "{("], input="Hi\n", capture_output=True, text=True
    )
    assert wrong.returncode == 1 and wrong.stderr.startswith(option[2:].replace("-", "_") + ": ")


@compiled
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("name", ["demo", "demo-bytes"])
def test_nothing_is_allocated_per_token(name: str, threads: int, installed: Path) -> None:
    """And too large inputs are refused. Which thread runs what is chance, so try a few times."""
    program = built(ROOT / "tests/libedge_memory.c", installed)
    for _ in range(1 if threads == 1 else 4):
        allocations, _, status = ran(program, folder(name), threads).split()
        assert (allocations, status) == ("0", str(libedge.MEMORY))


@compiled
def test_memory_above_the_plan_is_at_most_ten_megabytes(installed: Path) -> None:
    """The whole process, with the code of its libraries: 6.7 MB of `demo`."""
    program = built(ROOT / "tests/libedge_memory.c", installed)
    _, kilobytes, _ = ran(program, folder("demo")).split()
    assert 0 < int(kilobytes) * 1024 < 10_000_000


@compiled
def test_packages_find_it(installed: Path, tmp_path: Path) -> None:
    if shutil.which("pkg-config") is not None:
        where = {**os.environ, "PKG_CONFIG_PATH": f"{installed}/lib/pkgconfig"}
        flags = ran("pkg-config", "--cflags", "--libs", "edge", env=where)
        assert flags.split() == [f"-I{installed}/include", f"-L{installed}/lib", "-ledge"]
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake: apt-get install cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(it C)\nfind_package(edge 0.1 REQUIRED)\n"
        f"add_executable(it {ROOT}/docs/examples/c/chat_tokens.c)\n"
        "target_link_libraries(it edge::edge)\n"
    )
    ran("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={installed}")
    ran("cmake", "--build", tmp_path / "build")
    assert ran(tmp_path / "build/it", folder("demo-draft"), "1").strip()


def test_the_header_says_what_there_is() -> None:
    """Exactly the library's exported functions, each declared once."""
    header = (SOURCE / "include/edge.h").read_text()
    stated = re.findall(r"^EDGE_API [^(]*?(edge_\w+)\(", header, re.M)
    sources = "\n".join(file.read_text() for file in SOURCE.glob("src/api*.cpp"))
    written = re.findall(r"^[a-z][^(\n]*?\b(edge_\w+)\(", sources, re.M)
    assert sorted(stated) == sorted(set(written)) and len(set(stated)) == len(stated) > 30
