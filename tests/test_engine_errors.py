"""What the engine refuses, leaving the state where it was."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from edge.errors import (
    BundleError,
    ContextFullError,
    EdgeError,
    EngineError,
    InputError,
    StateError,
)
from edge.export.graph import build_graph
from edge.export.network import Network
from edge.runtime.buffers import StateBuffers
from edge.runtime.engine import Engine
from edge.runtime.engines import ENGINES, check_engine
from edge.runtime.ort import OrtEngine
from tests.engine_models import CONFIGS, KINDS, ROUNDED, engine, folder, plain, tokens
from tests.facts import facts
from tests.rounded_states import round_states


def refuses(
    error: type[EdgeError], match: str, kind: str, ids: object, *,
    state: StateBuffers | None = None, **options: object,
) -> None:  # fmt: skip
    """Check that the run fails and the state stays where it was."""
    state = state or engine(kind).new_state(window=4)
    before, ledger = state.arrays(), state.ledger
    with pytest.raises(error, match=match):
        engine(kind).run(ids, state, **options)  # type: ignore[arg-type]
    assert state.ledger == ledger
    for name, array in state.arrays().items():
        assert np.array_equal(before[name], array)


@pytest.mark.parametrize("kind", ["mamba1", "hybrid"])
def test_tokens(kind: str) -> None:
    for wrong in (-1, 40, 2**31, 2**63 - 1, -(2**63)):
        refuses(InputError, "0 … 39", kind, np.array([[1, wrong]]))
    refuses(InputError, "0 … 39", kind, np.array([[2**64 - 1]], dtype=np.uint64))
    refuses(InputError, "0 … 39", kind, np.array([[40]], dtype=np.uint8))
    for shape in ((0,), (2,), (1, 1, 1), ()):
        refuses(InputError, "integers of shape", kind, np.zeros(shape, np.int64))
    for dtype in (np.float32, np.bool_, object):
        refuses(InputError, "integers of shape", kind, np.zeros((1, 1), dtype))
    refuses(InputError, "not an array|integers", kind, [[1], [2, 3]])
    refuses(InputError, "2 sequences", kind, np.zeros((2, 1), np.int64))
    refuses(InputError, "no tokens", kind, np.zeros((1, 0), np.int64))
    refuses(InputError, "window of 4", kind, tokens(5))
    refuses(InputError, "chunk of 64", kind, tokens(65), commit=True)


def test_small_integer_types_and_lists_are_fine() -> None:
    state = engine("mamba1").new_state()
    expected = engine("mamba1").run(tokens(3), state).copy()
    for ids in (tokens(3).astype(np.uint8), tokens(3).astype(np.int32), tokens(3).tolist(),
                np.asfortranarray(tokens(3))):  # fmt: skip
        state.clear()
        assert np.array_equal(engine("mamba1").run(ids, state), expected)


@pytest.mark.parametrize(
    "parents", [[0, 0, 1], [-1, 1, 0], [-1, 0, 3], [-2, 0, 1], [-1, 0], [], [-1, 0, 0.5],
                [-1, 0, True], [-1, 0, None]],
)  # fmt: skip
def test_parents(parents: list[int]) -> None:
    refuses(InputError, "parent", "mamba1", tokens(3), parents=parents)


def test_a_tree_is_never_committed_and_blocks_until_selected() -> None:
    refuses(InputError, "committed", "mamba1", tokens(2), parents=[-1, 0], commit=True)
    state = engine("mamba1").new_state()
    engine("mamba1").run(tokens(2), state, parents=[-1, -1])
    with pytest.raises(StateError, match="select"):
        engine("mamba1").run(tokens(1), state)
    for node in (-2, 2):
        with pytest.raises(StateError, match="no node"):
            state.select(node)
    state.select(1)
    with pytest.raises(StateError, match="no tree"):
        state.select(0)
    engine("mamba1").run(tokens(1), state)


def test_a_tree_of_several_sequences_with_attention() -> None:
    state = engine("hybrid").new_state(batch=2)
    refuses(InputError, "one sequence", "hybrid", tokens(2, batch=2), state=state, parents=[-1, -1])


@pytest.mark.parametrize("rows", [[], [-1], [3], [0, 1, 2, 0], ["0"], "first", [True], [1.0]])
def test_rows(rows: object) -> None:
    refuses(InputError, "rows", "mamba2", tokens(3), rows=rows)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_full_context(kind: str, batch: int) -> None:
    state = engine(kind).new_state(batch=batch, capacity=10, window=4)
    engine(kind).run(tokens(7, batch=batch), state, commit=True)
    for options in ({}, {"commit": True}):
        ids = tokens(4, batch=batch)
        refuses(ContextFullError, "7 of 10", kind, ids, state=state, **options)
    engine(kind).run(tokens(3, batch=batch), state)
    refuses(ContextFullError, "10 of 10", kind, tokens(1, batch=batch), state=state)
    state.rewind(2)
    engine(kind).run(tokens(2, batch=batch), state)


def test_no_end_without_attention() -> None:
    state = engine("mamba1").new_state(capacity=3)
    assert state.capacity is None
    engine("mamba1").run(tokens(64), state, commit=True)


def test_sizes_of_a_state() -> None:
    for sizes in ({"batch": 0}, {"batch": 1 << 20}, {"window": 0}, {"window": 10_000},
                  {"capacity": 0}, {"capacity": 97}, {"batch": True}, {"window": 1.5}):  # fmt: skip
        with pytest.raises(InputError, match=next(iter(sizes))):
            engine("hybrid").new_state(**sizes)  # type: ignore[arg-type]
    assert engine("hybrid").new_state().capacity == 96


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_engine(kind: str) -> None:
    other = OrtEngine(folder(kind) / "graphs/ort.onnx", CONFIGS[kind], threads=1)
    with pytest.raises(StateError, match="another engine"):
        engine(kind).run(tokens(1), other.new_state())
    # but a snapshot moves between engines of one model
    state = other.new_state()
    other.run(tokens(3), state, commit=True)
    mine = engine(kind).new_state()
    mine.restore(state.snapshot())
    assert np.array_equal(engine(kind).run(tokens(1), mine), other.run(tokens(1), state))
    wrong = engine("mamba2" if kind == "mamba1" else "mamba1").new_state()
    with pytest.raises(StateError, match="another model"):
        wrong.restore(state.snapshot())


def test_two_threads_on_one_state() -> None:
    """A second thread is refused at once; the first is not disturbed."""
    state = engine("mamba1").new_state()
    entered, done = threading.Event(), threading.Event()

    def hold() -> None:
        with state.hold:
            entered.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(30)
    verbs = (
        lambda: engine("mamba1").run(tokens(1), state),
        state.clear, state.snapshot, lambda: state.rewind(0), state.fork,
    )  # fmt: skip
    for verb in verbs:
        with pytest.raises(EngineError, match="another thread"):
            verb()
    done.set()
    thread.join()
    engine("mamba1").run(tokens(1), state)


def test_one_engine_many_threads() -> None:
    """States of one engine on many threads give what they give alone."""
    prompts = [tokens(20, seed=seed) for seed in range(4)]

    def answer(prompt: np.ndarray) -> np.ndarray:
        state = engine("hybrid").new_state()
        engine("hybrid").run(prompt[:, :10], state, commit=True)
        return np.stack(
            [engine("hybrid").run(prompt[:, at : at + 1], state).copy() for at in range(10, 20)]
        )

    alone = [answer(prompt) for prompt in prompts]
    together: list[np.ndarray | None] = [None] * len(prompts)

    def work(index: int) -> None:
        together[index] = answer(prompts[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        assert other is not None
        assert np.array_equal(one, other)


def test_after_a_fork() -> None:
    """The child gets a typed error, not a hang: it does not have the engine's threads."""
    state = engine("mamba1").new_state()
    child = os.fork()
    if not child:
        code = 1
        try:
            engine("mamba1").run(tokens(1), state)
        except EngineError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    engine("mamba1").run(tokens(1), state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_logits_that_are_not_finite(kind: str, batch: int, poison: float, tmp_path: Path) -> None:
    """A damaged row of the embedding: the run that reads it fails, and later ones work."""
    config = CONFIGS[kind].model_copy(update={"tie_embeddings": False})
    torch.manual_seed(0)
    tensors = {n: t.detach().numpy() for n, t in Network(config).canonical_tensors().items()}
    build_graph(config, tensors, tmp_path)
    weights = (tmp_path / "weights.bin").read_bytes()
    row = tensors["embedding.weight"][7]
    assert weights.count(row.tobytes()) == 1
    bad = np.concatenate([[np.float32(poison)], row[1:]])
    (tmp_path / "weights.bin").write_bytes(weights.replace(row.tobytes(), bad.tobytes()))
    broken = OrtEngine(tmp_path / "graphs/ort.onnx", config, threads=1)
    state = broken.new_state(batch=batch, window=4)
    good = np.where(tokens(6, batch=batch) == 7, 8, tokens(6, batch=batch))
    broken.run(good[:, :2], state)
    before, ledger = state.arrays(), state.ledger
    for options in ({"commit": True}, {}, {"rows": "all"}):
        with pytest.raises(EngineError, match="not finite"):
            broken.run(np.full((batch, 3), 7), state, **options)
    assert state.position == ledger.position
    assert state.ledger.live == ledger.live
    for key, array in state.arrays().items():
        assert np.array_equal(before[key], array)
    assert np.isfinite(broken.run(good[:, 2:4], state)).all()


def test_a_graph_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs/ort.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=facts("not a graph", "run")):
        OrtEngine(tmp_path / "graphs/ort.onnx", CONFIGS["mamba1"])
    with pytest.raises(EngineError, match="cannot be read"):
        OrtEngine(tmp_path / "graphs/missing.onnx", CONFIGS["mamba1"])
    shutil.copytree(folder("mamba1") / "graphs", tmp_path / "graphs", dirs_exist_ok=True)
    with pytest.raises(BundleError, match=r"weights\.bin"):
        OrtEngine(tmp_path / "graphs/ort.onnx", CONFIGS["mamba1"])
    for wrong in ("mamba2", "hybrid"):
        with pytest.raises(BundleError, match="graph"):
            OrtEngine(folder("mamba1") / "graphs/ort.onnx", CONFIGS[wrong])
    for options in ({"threads": 0}, {"chunk": 0}):
        with pytest.raises(InputError, match="positive"):
            OrtEngine(folder("mamba1") / "graphs/ort.onnx", CONFIGS["mamba1"], **options)


@pytest.mark.parametrize("kind", ROUNDED)
def test_states_of_other_types_than_the_manifest_says(kind: str, tmp_path: Path) -> None:
    config, dtypes = CONFIGS[plain(kind)], ROUNDED[kind][1]
    path = folder(plain(kind)) / "graphs" / f"{kind}.onnx"
    engine(kind)  # which writes the graph
    for name, dtype in dtypes.items():
        wrong = {"int8": "float16", "float16": "int8"}[dtype]
        for said in ({k: v for k, v in dtypes.items() if k != name}, {**dtypes, name: wrong}):
            with pytest.raises(EngineError, match="the manifest") as caught:
                OrtEngine(path, config, threads=1, state_dtypes=said)
            assert (caught.value.field, caught.value.file) == (name, str(path))
    for said in ({"layers.9.ssm_state": "int8"}, {"layers.9.key_cache": "float16"}):
        with pytest.raises(BundleError, match="not states of the model") as refused:
            OrtEngine(path, config, threads=1, state_dtypes={**dtypes, **said})
        assert refused.value.field == "state_dtypes"
    many = {f"layers.{index}.conv_state": "float16" for index in range(100, 300)}
    with pytest.raises(BundleError, match=r": (layers\.\d+\.conv_state(, | and )){5}195 more$"):
        OrtEngine(path, config, threads=1, state_dtypes={**dtypes, **many})  # type: ignore[dict-item]


def test_a_long_message_is_cut_between_words() -> None:
    names = [f"layers.{index}.conv_state" for index in range(200)]
    said = EngineError(f"unknown: {', '.join(names)}").message
    start, end = said.split(" … ")
    assert len(said) < 800 and {*start.replace("unknown: ", "").rstrip(",").split(", ")} < {*names}
    assert {*end.split(", ")} < {*names}
    assert len(EngineError("x" * 5000).message) == 753


def test_a_state_that_goes_out_in_another_type(tmp_path: Path) -> None:
    """The input agrees with the manifest, but the output would not fit the same memory."""
    model = onnx.load_from_string(
        round_states(
            (folder("mamba1") / "graphs/ort.onnx").read_bytes(), {"layers.0.ssm_state": "float16"}
        )
    )
    (out,) = (value for value in model.graph.output if value.name == "layers.0.ssm_states")
    out.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    (cast,) = (node for node in model.graph.node if node.output[0] == out.name)
    cast.attribute[0].i = onnx.TensorProto.FLOAT
    (tmp_path / "graphs").mkdir()
    shutil.copy(folder("mamba1") / "weights.bin", tmp_path)
    (tmp_path / "graphs/ort.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match=r"tensor\(float\), the manifest") as caught:
        OrtEngine(
            tmp_path / "graphs/ort.onnx", CONFIGS["mamba1"], threads=1,
            state_dtypes={"layers.0.ssm_state": "float16"},
        )  # fmt: skip
    assert caught.value.field == "layers.0.ssm_states"


def test_engines_by_name() -> None:
    for name in ENGINES:
        check_engine(name)
    with pytest.raises(EngineError, match="unknown engine") as caught:
        check_engine("npu")
    assert caught.value.remedy
    assert isinstance(engine("mamba1"), Engine)
