"""The programs of docs/examples, each run as a reader would run it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "examples"
# program → what it must print, in this order
SAYS = {
    "add_a_family.py": ["house-mamba: 2 layers", "against the fp32 network"],
    "chat.py": ["ended by stop", "tokens of the prompt were not run again", "tokens restored"],
    "export_and_run.py": ["fp32: 75,712 parameters", "w8: 75,712 parameters", "state: "],
    "robot_loop.py": ["ended by deadline", "ended by cancelled"],
    "robot_tools.py": ["chose ", "driving ", "next: report", "ended by cancelled", "next: rest"],
    "speculate.py": [
        "plain: ", "look-ups in the text itself: ", "chains of 3 from a small model: ",
        "a tree from a small model: ",
    ],
}  # fmt: skip


# these load torch and transformers, which takes seconds: they run where both are loaded
EXPORTING = {"add_a_family.py", "export_and_run.py"}


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(FOLDER / name)
    if name in EXPORTING:
        monkeypatch.setattr(sys, "argv", [file])
        runpy.run_path(file, run_name="__main__")
        said = capsys.readouterr().out
    else:
        environment = dict(os.environ, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
        done = subprocess.run(
            [sys.executable, file], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout
    rest = said
    for wanted in SAYS[name]:
        assert wanted in rest, f"{wanted!r} is missing from:\n{said}"
        rest = rest.partition(wanted)[2]
