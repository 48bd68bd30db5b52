"""Installed requirements: no extra may put one build of ONNX Runtime over another."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from edge.plugins.cpu import library
from tests.facts import says

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def packages(lines: list[str]) -> Iterator[str]:
    """Return the packages that these requirements install, following our own extras."""
    for line in lines:
        wanted = Requirement(line)
        if wanted.name == PROJECT["name"]:
            for extra in wanted.extras:
                yield from packages(EXTRAS[extra])
        else:
            yield canonicalize_name(wanted.name)


def builds(lines: list[str]) -> list[str]:
    return [name for name in packages(lines) if name.startswith(("onnxruntime", "ort-"))]


def test_only_who_asks_for_onnx_runtime_gets_one() -> None:
    assert builds(PROJECT["dependencies"]) == []
    found = {extra: builds(lines) for extra, lines in EXTRAS.items() if builds(lines)}
    assert found == {"ort": ["onnxruntime"], "ort-gpu": ["onnxruntime-gpu"]}


def test_the_constraints_of_each_jetpack_are_for_what_is_installed() -> None:
    known = {name for lines in EXTRAS.values() for name in packages(lines)}
    known |= set(packages(PROJECT["dependencies"]))
    for file in (ROOT / "jetson").glob("constraints-*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert {Requirement(line).name for line in lines} <= known, file.name


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment whose pip writes its requests to the file `asked`.

    Its Python sees the packages in the folder `site`, and none of this environment's.
    """
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "site").mkdir()
    python = venv / "bin/python"
    python.write_text(
        f"""#!/bin/sh
case "$1" in
  -m) echo "$*" >> {venv}/asked; case "$*" in *"$LACKS") exit 1; esac ;;
  *) PYTHONPATH={venv}/site exec {sys.executable} -S "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    return venv


def install(venv: Path, package: str) -> None:
    """Install as pip does: the files that name a package and its module."""
    folder = venv / "site" / f"{package.replace('-', '_')}-1.31.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.31.1\n")
    (folder / "top_level.txt").write_text("onnxruntime\n")


def made(venv: Path, target: str, *arguments: str, lacks: str = "nothing") -> str:
    """Return what `make` passes to pip with -r and -e; pip refuses what the index `lacks`."""
    printed(venv, target, *arguments, LACKS=lacks)
    asked = (venv / "asked").read_text().splitlines()
    return " ".join(line.rpartition(" ")[2] for line in asked)


def printed(venv: Path, target: str, *arguments: str, **variables: str) -> str:
    """Return what `make` prints."""
    if shutil.which("make") is None:
        pytest.skip("no make here")
    # the options of the outer make do not apply to this one
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", f"VENV={venv}", *arguments, f"{venv}/{target}"],
        cwd=ROOT, env=outside | variables, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize(
    ("there", "arguments", "chat"),
    [
        ((), (), "locks/ort.txt ."),
        (("onnxruntime",), (), "locks/ort.txt ."),
        (("onnxruntime-gpu",), (), "locks/runtime.txt ."),
        (("onnxruntime", "onnxruntime-gpu"), (), "locks/runtime.txt ."),
        ((), ("ORT=ort-gpu",), "locks/runtime.txt . .[ort-gpu]"),
        ((), ("ORT=",), "locks/runtime.txt ."),
        ((), ("LOCKED=",), ".[ort]"),
        (("onnxruntime-gpu",), ("LOCKED=",), "."),
    ],
)
@pytest.mark.parametrize("target", [".runtime", ".dev"])
def test_make_leaves_another_build_where_it_is(
    environment: Path, target: str, there: tuple[str, ...], arguments: tuple[str, ...], chat: str
) -> None:
    for package in there:
        install(environment, package)
    packages, *own = chat.split()
    # the tests' requirements come with the kernels, which only the package's own install compiles
    test = [*own, ".[dev]"] if "LOCKED=" in arguments else ["locks/test.txt", "locks/torch-cpu.txt"]
    wanted = [packages, *(own if target == ".runtime" else test)]
    assert made(environment, target, *arguments).split() == wanted


@pytest.mark.parametrize("arguments", [(), ("LOCKED=",)])
def test_make_says_what_became_of_the_kernels(
    environment: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """Where a compiler fails, the install goes on, and pip says nothing."""

    def said() -> str:
        (environment / ".runtime").unlink(missing_ok=True)
        variables = {"LACKS": "nothing", library.LIBRARY_VARIABLE: str(file)}
        return printed(environment, ".runtime", *arguments, **variables).splitlines()[-1]

    file = tmp_path / "native.so"
    assert says(said(), "kernels for CPUs", "not compiled", "ONNX Runtime", "edge doctor")
    file.touch()
    assert "cannot be loaded" in said() and "edge doctor" in said()
    os.utime(file, (0, 0))
    assert says(said(), "not compiled: ", file, "older")
    if (compiled := library.path()) is None:
        pytest.skip("needs the kernels for CPUs")
    shutil.copy(compiled, file)
    best = library.instruction_set()
    assert says(said(), "compiled the kernels for CPUs: ", file, best)


def test_what_tests_need_is_installed_by_hash_alone(environment: Path) -> None:
    """If no CPU build of torch is known, the index's build is used, also by hash."""
    wanted = "locks/ort.txt locks/test.txt locks/torch-cpu.txt locks/torch.txt locks/rtx.txt"
    assert made(environment, ".rtx", lacks="torch-cpu.txt") == wanted
    for line in (environment / "asked").read_text().splitlines():
        assert " --no-deps" in line and "--require-hashes" in line, line


@functools.cache
def locked(name: str) -> dict[str, set[str]]:
    """Return the versions of each package in a lock, in which every entry has its hashes."""
    found: dict[str, set[str]] = {}
    for entry in (ROOT / "locks" / f"{name}.txt").read_text().replace("\\\n", " ").splitlines():
        assert "--hash=sha256:" in entry, entry
        pinned = Requirement(entry.partition(" --hash")[0])
        if pinned.marker is None or pinned.marker.evaluate():
            found.setdefault(pinned.name, set()).add(str(pinned.specifier).removeprefix("=="))
    return found


def test_the_locks_have_all_that_is_installed_and_every_file_by_its_hash() -> None:
    """And no version that the project does not accept; `make lock` rewrites them."""
    runtime = [*PROJECT["dependencies"], "setuptools>=77"]
    everything = [*runtime, *(line for extra in ("dev", *EXTRAS) for line in EXTRAS[extra])]
    known = {canonicalize_name(wanted.name): wanted for wanted in map(Requirement, everything)}
    tests = set(packages(EXTRAS["dev"])) | set(packages(runtime))
    torch = locked("torch-cpu")["torch"] | locked("torch")["torch"]
    for file, names in {
        "runtime": set(packages(runtime)),
        "ort": {"onnxruntime", *packages(runtime)},
        "test": tests - {"torch"},
    }.items():
        lock = locked(file)
        for name in names:
            assert lock[name] and all(known[name].specifier.contains(v) for v in lock[name]), name
        # packages in two locks have the same version
        shared = lock.keys() & locked("ort").keys()
        assert {n: lock[n] for n in shared} == {n: locked("ort")[n] for n in shared}, file
    pins = dict(line.split("==") for line in _lines("constraints.txt"))
    assert pins.items() >= {
        (name, version) for name in pins for version in locked("test").get(name, ())
    }
    assert {version.partition("+")[0] for version in torch} == {pins["torch"]}


def _lines(file: str) -> list[str]:
    return [line for line in (ROOT / file).read_text().splitlines() if "==" in line]
