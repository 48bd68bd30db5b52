"""Check the runtime on the oldest supported Python and ONNX Runtime; a program that needs no torch.

    python tests/oldest_runtime.py            checks the embedded bundles
    python tests/oldest_runtime.py --logits   also prints their logits, to compare versions
    python tests/oldest_runtime.py --answers  prints their answers, to compare machines

`tests/test_oldest_runtime.py` runs it; `make jetpack6` runs it under Python 3.10, `make aarch64` on
an emulated aarch64.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import onnxruntime

import edge
from edge.plugins.cpu import library
from edge.runtime.model import EMBEDDED
from tests import golden

TEXT = "Hello! How was your day? I went to the park and it was lovely."


def logits(name: str, engine: str = "ort") -> np.ndarray:
    """Return the logits [T, V] of TEXT under one embedded bundle, in one run."""
    with edge.load(name, engine=engine, threads=1) as model:
        ids = model.tokenizer.encode(TEXT)[:24]
        state = model.engine.new_state(window=len(ids))
        return np.array(model.engine.run(np.array([ids]), state, rows="all")[0])


def answer(name: str) -> str:
    """Return the greedy answer to, or continuation of, a short greeting."""
    with edge.load(name, engine="ort", threads=1) as model:
        session = model.session(seed=1)
        say = session.generate if model.template is None else session.chat
        return "".join(say("Hello, how are you?", max_tokens=40, temperature=0))


def check(name: str, engine_name: str) -> None:
    """Check the golden sentence, and chunks, steps, rewind, snapshots, trees and files, each done
    two ways.
    """
    with edge.load(name, engine=engine_name, threads=1) as model:
        golden.check(name, model)
        ids = np.array([model.tokenizer.encode(TEXT)[:24]])
        engine, whole = model.engine, logits(name, engine_name)
        state = engine.new_state(window=8)

        engine.run(ids[:, :7], state, commit=True)
        steps = [engine.run(ids[:, t : t + 1], state)[0, 0].copy() for t in range(7, ids.shape[1])]
        near(np.stack(steps), whole[7:], f"{name}: steps")

        state.rewind(5)
        near(engine.run(ids[:, -5:], state, rows="all")[0], whole[-5:], f"{name}: after rewind")

        state.clear()
        engine.run(ids[:, :9], state, commit=True)
        kept = state.snapshot()
        engine.run(ids[:, :3], state)
        state.restore(kept)
        near(engine.run(ids[:, 9:10], state)[0], whole[9:10], f"{name}: after restore")

        state.restore(kept)
        tree = np.concatenate([ids[:, 9:10], ids[:, :1], ids[:, 10:11]], axis=1)
        found = engine.run(tree, state, parents=[-1, -1, 0], rows=[0, 2])[0]
        near(found, whole[9:11], f"{name}: tree")
        state.select(2)
        near(engine.run(ids[:, 11:12], state)[0], whole[11:12], f"{name}: after select")
        saved_and_loaded(model)


def saved_and_loaded(model: edge.Model) -> None:
    """Check that a session that was saved and loaded answers like one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        session = model.session(seed=1)
        "".join(session.generate(TEXT, max_tokens=8))
        session.save(Path(folder) / "talk.state")
        stayed = "".join(session.generate(" I", max_tokens=12, temperature=0.8))
        other = model.session(seed=2)
        if other.load(Path(folder) / "talk.state") == 0:
            raise AssertionError("loading spared nothing")
        left = "".join(other.generate(" I", max_tokens=12, temperature=0.8))
        if stayed != left:
            raise AssertionError(f"loaded session says {left!r}, not {stayed!r}")


def near(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    # `cpu` adds in another order for more than 16 rows, and a value that then rounds to the other
    # fp16 moves the logits of demo-fp16 by up to 6e-3, as from one instruction set to the next
    worst = float(np.abs(found - wanted).max())
    if not worst < 1e-2:
        raise AssertionError(f"{what}: logits differ by {worst}")


def main() -> None:
    if "--answers" in sys.argv:
        print(json.dumps({name: answer(name) for name in EMBEDDED}))
        return
    engines = ("ort", "cpu") if library.path() else ("ort",)
    for name, engine in itertools.product(EMBEDDED, engines):
        check(name, engine)
    heavy = {"torch", "triton", "transformers", "onnx"} & set(sys.modules)
    if heavy:
        raise AssertionError(f"the runtime imported {heavy}")
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"ok: Python {version}, {', '.join(engines)}, onnxruntime {onnxruntime.__version__}")
    if "--logits" in sys.argv:
        print(json.dumps({name: logits(name)[-1].tolist() for name in EMBEDDED}))


if __name__ == "__main__":
    main()
