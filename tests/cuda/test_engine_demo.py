"""The golden sentence of the embedded models, interpreted: one step, and the rest in one run."""

from __future__ import annotations

import numpy as np
import pytest

from edge.bundle import open_bundle
from edge.runtime.layout import Identity
from edge.runtime.model import EMBEDDED, resolve
from edge.runtime.ort import OrtEngine
from tests import golden
from tests.cuda.models import cuda_engine, poison

# tokens of each run; interpreting a run takes seconds, whatever its length
RUNS = (1, 30)


@pytest.mark.parametrize("name", EMBEDDED)
def test_golden_sentence(name: str) -> None:
    with open_bundle(resolve(name)) as bundle:
        manifest = bundle.manifest
        ort = OrtEngine.from_bundle(bundle, threads=1)
        cuda = cuda_engine(
            bundle.path / manifest.graphs["ort"], manifest.model, manifest.state_dtypes,
            chunk=32, identity=Identity.of_bundle(bundle),
        )  # fmt: skip
    sentence = golden.SENTENCES[name]
    sizes = {"window": 1, "capacity": 64}
    theirs, ours = ort.new_state(**sizes), cuda.new_state(**sizes)
    # the state after the prompt comes from the other engine, since the interpreter is slow
    sentence.check(ort.run(np.array([sentence.prompt_ids]), theirs, commit=True)[0])
    ours.restore(theirs.snapshot())
    done = 0
    for count in RUNS:
        poison(cuda, ours)
        ids = np.array([sentence.ids[done : done + count]])
        done += count
        found = cuda.run(ids, ours, rows="all", commit=True)[0]
        sentence.check(found, done - count + 1)
    assert done + 1 == len(sentence.ids)
