"""The embedded models, a few tokens each, interpreted: the words that ONNX Runtime finds."""

from __future__ import annotations

import numpy as np
import pytest

from edge.bundle import open_bundle
from edge.runtime.layout import Identity
from edge.runtime.model import resolve
from edge.runtime.ort import OrtEngine
from edge.text import load_tokenizer
from tests.cuda.models import cuda_engine, poison

PROMPT = "Which city is the capital of France?"
# one value that tips over to the next of 256 steps is enough to move all later ones
CLOSE = {"demo": 0.06}


@pytest.mark.parametrize("name", ["demo", "demo-fp16", "demo-bytes"])
def test_greedy_tokens(name: str) -> None:
    with open_bundle(resolve(name)) as bundle:
        manifest, ids = bundle.manifest, load_tokenizer(bundle).encode(PROMPT)
        ort = OrtEngine.from_bundle(bundle, threads=1)
        cuda = cuda_engine(
            bundle.path / manifest.graphs["ort"], manifest.model, manifest.state_dtypes,
            chunk=4, identity=Identity.of_bundle(bundle),
        )  # fmt: skip
    sizes = {"window": 1, "capacity": 64}
    theirs, ours = ort.new_state(**sizes), cuda.new_state(**sizes)
    # the state after the prompt comes from the other engine: reading it here would take minutes
    ort.run(np.array([ids[:-1]]), theirs, commit=True)
    ours.restore(theirs.snapshot())
    token = ids[-1]
    for _ in range(2):
        expected = ort.run(np.array([[token]]), theirs)[0, 0]
        poison(cuda, ours)
        found = cuda.run(np.array([[token]]), ours)[0, 0]
        error = float(np.abs(found - expected).max())
        assert error <= CLOSE.get(name, 1e-2) * float(np.abs(expected).max())
        token = int(expected.argmax())
        gap = float(expected[token] - expected[found.argmax()])
        assert gap <= 2 * error, "another word, and no tie"
