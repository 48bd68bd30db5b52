"""Malformed bundles (rows 1 to 13, 17 and 18 of the fault table): a typed error, or a sound model.

Every case uses what users call: `edge.load`, a session, one token.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from edge.errors import EdgeError
from edge.runtime.model import load
from tests.malformed import (
    Spoil,
    file_cases,
    link_cases,
    manifest_cases,
    text_cases,
)
from tests.session_models import bundle
from tests.test_faults_saving import in_memory

# of the second kind, fields and files that the first lacks
KINDS = ("chat", "base")
# groups, so that the cases spread over processes
GROUPS = {KINDS[0]: 16, KINDS[1]: 1}
# files whose content is free: any text can be a README
_FREE = {"README.md", "calibration.json"}


@cache
def every_case(kind: str) -> list[tuple[str, Spoil]]:
    return list(cases(kind))


def cases(kind: str) -> Iterator[tuple[str, Spoil]]:
    manifest = json.loads((bundle(kind) / "manifest.json").read_text())
    paths = [entry["path"] for entry in manifest["files"] if entry["path"] not in _FREE]
    if kind == KINDS[0]:
        yield from manifest_cases(manifest)
        yield from text_cases()
    else:
        seen = {name for name, _ in every_case(KINDS[0])}
        yield from (case for case in manifest_cases(manifest) if case[0] not in seen)
    yield from file_cases([path for path in paths if not path.endswith(".onnx")])
    yield from link_cases(paths)


def outcome(folder: Path, spoil: Spoil) -> str:
    """Return "refused" or "runs"; anything else is raised."""
    spoil(folder)
    try:
        with load(folder, threads=1) as model:
            model.session().generate("one two", max_tokens=1).finish()
    except EdgeError as problem:
        assert str(problem).strip(), "an error without a word"
        assert len(str(problem)) < 2000, "an error nobody can read"
        return "refused"
    return "runs"


@pytest.mark.parametrize(
    ("kind", "group"), [(kind, group) for kind in KINDS for group in range(GROUPS[kind])]
)
def test_malformed_bundles(kind: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    every = every_case(kind)
    assert len(every) >= (700 if kind == KINDS[0] else 50)
    with in_memory() as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        wrong, found = outcomes(kind, every[group :: GROUPS[kind]], folder)
    assert not wrong, "\n".join(wrong)
    # those that still run had an optional or free field changed
    assert found.count("refused") >= 0.6 * len(found)


def outcomes(
    kind: str, every: list[tuple[str, Spoil]], outside: Path
) -> tuple[list[str], list[str]]:
    """Return what is wrong, and the outcomes, of cases in a folder."""
    wrong, found = [], []
    for name, spoil in every:
        folder = outside / "bundle"
        shutil.copytree(bundle(kind), folder)
        try:
            found.append(outcome(folder, spoil))
        except Exception as problem:
            wrong.append(f"{name}: {type(problem).__name__}: {problem}"[:300])
        shutil.rmtree(folder)
        (outside / "outside").unlink(missing_ok=True)
    return wrong, found


def _spoilt_graph(folder: Path, seed: int) -> None:
    """Return a graph with some bytes changed, listed with its new hash."""
    import random

    from tests.malformed import resigned

    file = folder / "graphs" / "ort.onnx"
    data, rng = bytearray(file.read_bytes()), random.Random(seed)
    for _ in range(rng.randint(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    file.write_bytes(data)
    resigned(folder)


GRAPHS = """
import sys, shutil, tempfile
from pathlib import Path
from edge.errors import EdgeError
from edge.runtime.model import load
from tests.test_faults_bundles import _spoilt_graph
source, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for seed in range(first, last):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "bundle"
        shutil.copytree(source, folder)
        _spoilt_graph(folder, seed)
        print(seed, flush=True)
        try:
            load(folder, engine="ort", threads=1).session().generate("one", max_tokens=1).finish()
        except EdgeError:
            print("refused", flush=True)
"""


def test_altered_graphs_end_in_typed_errors(tmp_path: Path) -> None:
    """ONNX Runtime parses them in native code: in its own process, so that a crash is seen."""
    source, count = bundle("chat"), 60
    done = subprocess.run(
        [sys.executable, "-c", GRAPHS, str(source), "0", str(count)],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    seeds = [word for word in done.stdout.split() if word != "refused"]
    assert done.returncode == 0, f"seed {seeds[-1:]}: {done.stderr[-1500:]}"
    assert seeds == [str(seed) for seed in range(count)]
    assert "refused" in done.stdout, "no graph was read"


def test_a_swapped_tokenizer_is_noticed(tmp_path: Path) -> None:
    """The same kind of tokenizer from another bundle: only hashes can tell."""
    folder = tmp_path / "bundle"
    shutil.copytree(bundle("chat"), folder)
    other = next((bundle("hybrid") / "tokenizer").glob("*.model")).read_bytes()
    file = next((folder / "tokenizer").glob("*.model"))
    file.write_bytes(other[:-1] + bytes([other[-1] ^ 1]))
    with pytest.raises(EdgeError, match="tokenizer"):
        load(folder, threads=1)
