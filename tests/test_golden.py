"""The golden sentence through `ort`, and through `tensorrt` with ONNX Runtime in TensorRT's place.

`tests/test_cpu_engine.py` has the engine `cpu`, `tests/cuda/test_engine_demo.py` the CUDA engine,
`tests/oldest_runtime.py` the oldest ONNX Runtime and, emulated, aarch64; `tests/gpu/run.sh` a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import edge
from edge.bundle import open_bundle
from edge.runtime.model import EMBEDDED, resolve
from edge.runtime.tensorrt.profiles import sizes
from edge.text import Message
from tests import golden
from tests.tensorrt import ort_tensorrt
from tests.tensorrt.test_opening import device, store

__all__ = ["device"]


def test_every_embedded_bundle_has_a_sentence() -> None:
    assert set(golden.SENTENCES) == set(EMBEDDED)
    assert all(len(sentence.ids) == 32 for sentence in golden.SENTENCES.values())


@pytest.mark.parametrize("name", EMBEDDED)
def test_onnx_runtime(name: str) -> None:
    sentence = golden.SENTENCES[name]
    with edge.load(name, engine="ort", threads=1) as model:
        assert model.template is not None
        asked = [Message("user", sentence.prompt)]
        assert list(model.template.encode(asked)) == sentence.prompt_ids
        golden.check(name, model)


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_tensorrt_stand_in(name: str, device: ort_tensorrt.Stream) -> None:
    config = open_bundle(resolve(name)).manifest.model
    store(Path(resolve(name)), device, sizes(config, chunk=64, window=8, batch=1, capacity=64))
    with edge.load(name, engine="tensorrt") as model:
        golden.check(name, model)


def test_another_token_is_told() -> None:
    sentence = golden.SENTENCES["demo"]
    with edge.load("demo", threads=1) as model, pytest.raises(AssertionError, match="token 0 is"):
        state = model.engine.new_state(window=1)
        sentence.check(model.engine.run([[7]], state)[0])
