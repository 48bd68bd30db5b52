"""How programs are named to those who type them."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from edge.apps.programs import typed


def test_a_program_that_the_shell_does_not_find_has_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(folder))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert typed("edge") == "edge"  # not there either
    (folder / "edge").touch(mode=0o755)
    assert typed("edge") == os.path.join("venv", "bin", "edge")
    monkeypatch.setenv("PATH", str(folder))
    assert typed("edge") == "edge"
