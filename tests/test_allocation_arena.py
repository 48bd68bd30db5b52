"""ONNX Runtime's arena does not grow per token, according to its own log.

No call of its Python API returns an arena's statistics, but the arena logs every extension with its
total.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from edge.runtime.model import EMBEDDED

CHILD = """
import sys
import numpy as np
import onnxruntime
from edge.runtime import ort_session

quiet = ort_session.session_options

def talkative(threads, *, spin=False):
    options = quiet(threads, spin=spin)
    options.log_severity_level = 1
    return options

ort_session.session_options = talkative
import edge

onnxruntime.set_default_logger_severity(1)

def tokens(model, state, number):
    ids = np.arange(4)[None]
    for _ in range(number):
        model.engine.run(ids[:, :1], state)
        model.engine.run(ids, state, rows="all")
        state.rewind(4)

for name in sys.argv[1:]:
    print("BUNDLE", name, file=sys.stderr, flush=True)
    with edge.load(name, engine="ort", threads=2) as model:
        state = model.engine.new_state(window=4)
        tokens(model, state, 10)
        print("WARM", file=sys.stderr, flush=True)
        tokens(model, state, 100)
        print("DONE", file=sys.stderr, flush=True)
"""


def test_the_arena_is_extended_while_warming_up_and_never_again() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *EMBEDDED],
        cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    logs = child.stderr.split("BUNDLE ")[1:]
    assert [log.partition("\n")[0] for log in logs] == [*EMBEDDED]
    for name, log in zip(EMBEDDED, logs, strict=True):
        warming, _, rest = log.partition("WARM\n")
        running, done, _ = rest.partition("DONE\n")
        assert done
        totals = [int(total) for total in re.findall(r"Total allocated bytes: (\d+)", warming)]
        assert totals, f"{name}: the arena reported nothing, so silence proves nothing"
        assert "bfc_arena" not in running, name
