"""The example of docs/inside/tensorrt-graph.md finds the same token as the engine `ort`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import edge

DOCUMENT = Path(edge.__file__).parent.parent / "docs" / "inside" / "tensorrt-graph.md"


def test_the_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n(.*?)```.*?prints `(.*?)`", DOCUMENT.read_text(), re.S)
    assert found is not None
    variables: dict[str, object] = {}
    exec(found[1], variables)
    printed = capsys.readouterr().out.strip()
    assert printed == found[2]
    tokens = variables["tokens"]
    assert isinstance(tokens, np.ndarray)
    with edge.load("demo", engine="ort", threads=1) as model:
        state = model.engine.new_state(window=len(tokens))
        best = int(np.argmax(model.engine.run(tokens.T, state)[0, -1]))
        assert printed == repr(model.tokenizer.decode([best]))
