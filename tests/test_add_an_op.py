"""docs/inside/add-an-op.md holds: its files, in a copy of the house, make an op that passes its
tests on every engine's kernels.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edge.plugins.cpu import library

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/inside/add-an-op.md").read_text("utf-8")
BLOCK = re.compile(r"^```\w+\n(?:#|//) (\S+)\n(.*?)^```", re.M | re.S)
INCLUDE = '#include "../../clamp/cpu.h"'
# what every kernel uses; the other kernels would take a minute to compile
SHARED = ('"simd.h"', '"rows.h"', '"state.h"')


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what ops need, with the page's files in it."""
    house = tmp_path_factory.mktemp("house")
    for room in ("edge", "plugins", "tests"):
        shutil.copytree(
            ROOT / room, house / room, symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.so", "published", "lib"),
        )  # fmt: skip
    for name in ("runtime", "export", "apps", "pyproject.toml"):
        (house / name).symlink_to(ROOT / name)
    (house / "plugins/clamp").mkdir()
    (house / "plugins/clamp/__init__.py").touch()
    files = BLOCK.findall(PAGE)
    assert len(files) == PAGE.count("```") // 2 == 7
    for name, text in files:
        (house / name).write_text(text)
    return house


def run(house: Path, *command: str, **environment: str) -> str:
    """Run a module of the copy; return what it says. Fails unless it succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=house, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(house)} | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_list_of_the_plugins_is_written(house: Path) -> None:
    assert "python -m edge.plugins.tensorrt.creators" in PAGE
    run(house, "edge.plugins.tensorrt.creators")
    assert "EDGE_OP(Clamp)\n" in (house / "plugins/tensorrt/src/ops.inc").read_text()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_op_passes_its_tests(house: Path) -> None:
    assert INCLUDE in PAGE
    isa = house / "plugins/cpu/src/isa.h"
    lines = isa.read_text().splitlines()
    kept = [each for each in lines if not each.startswith("#include") or each.endswith(SHARED)]
    kept.insert(kept.index('#include "state.h"') + 1, INCLUDE)
    isa.write_text("\n".join(kept) + "\n")
    kernels = house / "kernels.so"
    subprocess.run(
        ["g++", "-std=c++17", "-O0", "-fno-math-errno", "-fPIC", "-Wno-psabi", "-shared",
         "-pthread", *map(str, isa.parent.glob("*.cpp")), "-o", str(kernels)],
        check=True,
    )  # fmt: skip
    said = run(
        house, "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/kernels/test_clamp.py", "-rA",
        **{library.LIBRARY_VARIABLE: str(kernels)},
    )  # fmt: skip
    assert said.count("PASSED") == 2 * (1 + len(library.instruction_sets())), said


def test_every_kernel_for_cpus_is_compiled() -> None:
    included = set(re.findall(r'"\.\./\.\./(.*)"', (ROOT / "plugins/cpu/src/isa.h").read_text()))
    headers = {str(file.relative_to(ROOT / "plugins")) for file in ROOT.glob("plugins/*/cpu*.h")}
    assert included == headers
