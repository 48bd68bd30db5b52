"""The wheel: one file for Python 3.10 and later, whose package chats where there is no checkout."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import edge
from edge.plugins.cpu import library
from tests.golden import SENTENCES

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "plugins/cpu/wheel.sh"
NATIVE = "edge/plugins/cpu/_native.abi3.so"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = sorted({HERE, "3.10", "3.11", "3.12", "3.13"})


def ran(*command: object, cwd: Path = ROOT, **variables: str) -> str:
    # neither the checkout nor the options of an outer make reach a program
    hidden = ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", library.LIBRARY_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment | variables,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this machine as `make wheels` does, around the library that is there, for
    compiling takes a minute.
    """
    pytest.importorskip("setuptools", "77", reason="needs setuptools 77: run `make wheels`")
    machine, compiled = platform.machine(), ROOT / NATIVE
    if machine not in ("x86_64", "aarch64") or not sys.platform.startswith("linux"):
        pytest.skip("wheels are built on Linux, for x86_64 and aarch64")
    if not compiled.exists() or shutil.which("readelf") is None:
        pytest.skip("needs the kernels for CPUs and readelf: apt-get install build-essential")
    folder = tmp_path_factory.mktemp("wheels")
    native = folder / machine / "native" / NATIVE
    native.parent.mkdir(parents=True)
    shutil.copy(compiled, native)  # newer than its sources
    return Path(ran(SCRIPT, machine, folder, PYTHON=sys.executable).split()[-1])


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    version, *tags, system = wheel.stem.removeprefix("mamba_edge-").split("-")
    assert (version, tags) == (edge.__version__, ["cp310", "abi3"])
    # the library of the checkout takes the system's libstdc++, so it is for machines like this one
    assert system == f"linux_{platform.machine()}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read(NATIVE) == (ROOT / NATIVE).read_bytes()
    assert [name for name in names if name.endswith(".so")] == [NATIVE]
    rooms = {name.partition("/")[0] for name in names}
    assert rooms == {"edge", f"mamba_edge-{version}.dist-info"}


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    other = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    for tool in ("bash", "dirname", "mkdir", "realpath", "uname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or pytest.skip(f"no {tool} here"))
    done = subprocess.run(
        [SCRIPT, other, tmp_path / "wheels"], env={"PATH": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert f"no {other}-linux-gnu-g++; on Debian: apt install g++-" in done.stderr


def interpreter(version: str) -> str:
    """Return a Python of this version, or skip the test."""
    if version == HERE:
        return sys.executable
    found = shutil.which(f"python{version}")
    # pyenv has a command for every version, and it fails for those that are not chosen
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no python{version} on PATH")
    return found


def environment(version: str, wheel: Path, folder: Path) -> Path:
    """Return a new environment with the wheel and all it requires."""
    ran(interpreter(version), "-m", "venv", "--without-pip", folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet")
    pip = (*pip, "--no-compile", "--no-deps")
    if version == HERE:  # no index is asked: what is installed here serves there
        site = folder / f"lib/python{HERE}/site-packages"
        (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    else:
        lock = ROOT / "locks/runtime.txt"
        done = subprocess.run([*pip, "--retries", "0", "--require-hashes", "-r", lock], timeout=300)
        if done.returncode:
            pytest.skip(f"the index does not have all of locks/runtime.txt for Python {version}")
    ran(*pip, "--no-index", wheel)
    return folder


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_chats(version: str, wheel: Path, tmp_path: Path) -> None:
    programs = environment(version, wheel, tmp_path / "env") / "bin"
    program = (
        "import sys; from edge.plugins.cpu import library; "
        "print(*sys.version_info[:2], library.path(), sep='\\n')"
    )
    *found, path = ran(programs / "python", "-I", "-c", program, cwd=tmp_path).splitlines()
    assert ".".join(found) == version and Path(path).is_relative_to(tmp_path / "env"), path
    sentence = SENTENCES["demo"]
    options = ("--engine", "cpu", "--temperature", "0", "-p", sentence.prompt)
    assert ran(programs / "edge-chat", "demo", *options, cwd=tmp_path).strip() == sentence.answer
