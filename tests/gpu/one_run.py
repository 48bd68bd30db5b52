"""One prompt, steps, a verified draft and a rewind of each bundle, for compute-sanitizer to watch.

compute-sanitizer --tool memcheck python -m tests.gpu.one_run demo
"""

from __future__ import annotations

import sys

import numpy as np

from edge.runtime.model import load

PROMPT, DRAFT = 40, 4


def main(bundle: str) -> None:
    """Do each kind of run once."""
    with load(bundle, engine="cuda") as model:
        engine = model.engine
        state = engine.new_state(window=8)
        ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (1, PROMPT))
        engine.run(ids, state, commit=True)
        for i in range(2):
            engine.run(ids[:, i : i + 1], state)
        engine.run(ids[:, :DRAFT], state, rows="all")
        state.rewind(DRAFT - 1)
        if engine.trees:
            engine.run(ids[:, :DRAFT], state, parents=[-1, 0, 0, 1], rows="all")
            state.select(2)
        logits = engine.run(ids[:, :1], state)
        assert np.isfinite(logits).all()
    print(f"{bundle}: a prompt of {PROMPT}, steps, a draft, a rewind and a tree")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
