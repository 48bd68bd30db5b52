"""Child processes import nothing from the working folder, which may be a stranger's bundle."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import edge
from edge import child

ROOT = Path(edge.__file__).absolute().parent.parent
FOREIGN = ("numpy", "onnxruntime", "pydantic", "pydantic_core", "typer", "ml_dtypes")
# modules that Python and this package import early and late
STANDARD = (
    "os", "runpy", "json", "typing", "edge", "sitecustomize", "usercustomize", "pkgutil", "signal",
    "importlib", "threading", "encodings", "subprocess", "dataclasses", "site",
)  # fmt: skip


def plant(folder: Path, names: tuple[str, ...]) -> None:
    """Plant a module, or a package, of every name, which reports that it ran."""
    folder.mkdir()
    code = f"open({str(folder.parent / 'ran')!r}, 'a').write(__name__ + ' ')\n"
    for index, name in enumerate(names):
        file = folder / (f"{name}/__init__.py" if index % 2 else f"{name}.py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)


def start(folder: Path, command: list[str], path: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = path
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("path", ["", os.pathsep + str(ROOT), str(ROOT) + os.pathsep, "."])
def test_no_module_is_found_in_the_working_folder(tmp_path: Path, path: str) -> None:
    """Nor if `PYTHONPATH` names it, except for what Python itself loads from there."""
    folder = tmp_path / "bundle"
    plant(folder, FOREIGN if path else FOREIGN + STANDARD)
    command = child.command("edge.apps.doctor.checks", "onnxruntime", "demo-draft")
    done = start(folder, command, path)
    assert '"name": "onnxruntime"' in done.stdout, done.stderr
    assert not (tmp_path / "ran").exists()


def test_programs_that_start_children(tmp_path: Path) -> None:
    """`edge doctor .` and `edge build .` in the folder of a bundle."""
    folder = tmp_path / "bundle"
    plant(folder, FOREIGN + STANDARD)
    program = (
        f"import sys; sys.path[0] = {str(ROOT)!r}; from edge.apps.doctor.checks import examine; "
        "from edge.apps.build import _run_in_child; "
        "print(examine('onnxruntime', '.').status, _run_in_child(['.'], '.'))"
    )
    done = start(folder, [sys.executable, "-c", program], "")
    assert done.stdout.splitlines()[-1:] == ["broken 1"], done.stderr
    assert "manifest.json" in done.stderr and not (tmp_path / "ran").exists()


def test_nothing_else_starts_python() -> None:
    """The other two: pip, whose working folder is ours, and a board's, in a checkout."""
    found = set()
    for room in ("edge", "apps", "export", "plugins", "runtime", "jetson"):
        for folder, _, names in os.walk((ROOT / room).resolve()):
            for file in (Path(folder, name) for name in names if name.endswith(".py")):
                text = file.read_text("utf-8")
                if "executable" in text and any(
                    isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
                    for node in ast.walk(ast.parse(text))
                ):
                    found.add(str(file.relative_to(ROOT)))
    assert found == {"edge/child.py", "apps/models/index.py", "jetson/verify/steps.py"}
