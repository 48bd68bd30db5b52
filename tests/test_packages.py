"""What is installed with what: no extra may put one build of ONNX Runtime over another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def packages(lines: list[str]) -> Iterator[str]:
    """What these requirements install, extras of our own followed."""
    for line in lines:
        wanted = Requirement(line)
        if wanted.name == PROJECT["name"]:
            for extra in wanted.extras:
                yield from packages(EXTRAS[extra])
        else:
            yield wanted.name


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
    """A virtual environment whose pip tells what it is asked for, in the file `asked`.

    Its Python sees the packages in the folder `site`, and none of this environment's.
    """
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "site").mkdir()
    python = venv / "bin/python"
    python.write_text(
        f"""#!/bin/sh
case "$1" in
  -m) echo "$*" >> {venv}/asked ;;
  *) PYTHONPATH={venv}/site exec {sys.executable} -S "$@" ;;
esac
"""
    )
    python.chmod(0o755)
    return venv


def install(venv: Path, package: str) -> None:
    """As pip does: the files that name a package and its module."""
    folder = venv / "site" / f"{package.replace('-', '_')}-1.31.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.31.1\n")
    (folder / "top_level.txt").write_text("onnxruntime\n")


def made(venv: Path, target: str, *arguments: str) -> str:
    """What `make` hands to pip with -r and -e."""
    if shutil.which("make") is None:
        pytest.skip("no make here")
    # what the make that runs these tests was given is not for this one
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(
        ["make", f"VENV={venv}", *arguments, f"{venv}/{target}"],
        cwd=ROOT, env=outside, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    asked = (venv / "asked").read_text().splitlines()
    return " ".join(line.rpartition(" ")[2] for line in asked)


@pytest.mark.parametrize(
    ("there", "arguments", "chat", "test"),
    [
        ((), (), "locks/ort.txt .", ".[dev,ort]"),
        (("onnxruntime",), (), "locks/ort.txt .", ".[dev,ort]"),
        (("onnxruntime-gpu",), (), "locks/runtime.txt .", ".[dev]"),
        (("onnxruntime", "onnxruntime-gpu"), (), "locks/runtime.txt .", ".[dev]"),
        ((), ("ORT=ort-gpu",), "locks/runtime.txt . .[ort-gpu]", ".[dev,ort-gpu]"),
        ((), ("ORT=",), "locks/runtime.txt .", ".[dev]"),
    ],
)
@pytest.mark.parametrize("target", [".runtime", ".dev"])
def test_make_leaves_another_build_where_it_is(
    environment: Path, target: str, there: tuple[str, ...], arguments: tuple[str, ...], chat: str,
    test: str,
) -> None:  # fmt: skip
    for package in there:
        install(environment, package)
    assert made(environment, target, *arguments) == (chat if target == ".runtime" else test)


@pytest.mark.parametrize(("name", "extra"), [("runtime", []), ("ort", EXTRAS["ort"])])
def test_the_lock_has_all_that_is_installed_and_every_file_by_its_hash(
    name: str, extra: list[str]
) -> None:
    """And no version that the project does not take; `make lock` writes it anew."""
    entries = (ROOT / "locks" / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    locked: dict[str, set[str]] = {}
    for entry in entries:
        assert "--hash=sha256:" in entry, entry
        pinned = Requirement(entry.partition(" --hash")[0])
        locked.setdefault(pinned.name, set()).add(str(pinned.specifier).removeprefix("=="))
    for wanted in map(Requirement, [*PROJECT["dependencies"], *extra, "setuptools>=77"]):
        versions = locked[wanted.name]
        assert versions and all(wanted.specifier.contains(version) for version in versions)
