"""docs/inside/threat-model.md names an existing test for every row of the fault table."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_row_has_tests_that_exist() -> None:
    text = (ROOT / "docs/inside/threat-model.md").read_text("utf-8")
    rows: list[int] = []
    for line in text.splitlines():
        if not re.match(r"\| \d+(–\d+)?(, \d+(–\d+)?)* \|", line):
            continue
        for first, last in re.findall(r"(\d+)(?:–(\d+))?", line.split("|")[1]):
            rows += range(int(first), int(last or first) + 1)
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", line)
        assert named or "none are loaded" in line, line
        for file, test in named:
            assert f"def {test}" in (ROOT / file).read_text("utf-8"), f"{file} has no {test}"
    assert sorted(rows) == list(range(1, 61))
