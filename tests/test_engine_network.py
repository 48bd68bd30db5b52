"""The engine against the torch network: logits and states, for every way of running tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.export.network import NetworkState
from edge.runtime.buffers import StateBuffers
from tests.engine_models import CONFIGS, INT8, KINDS, ROUNDED, engine, network, plain, tokens
from tests.rounded_states import int8_scale

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def reference(kind: str, ids: np.ndarray) -> tuple[np.ndarray, NetworkState]:
    """Return the logits [B, T, V] and final state of the torch network."""
    logits, state = network(kind)(torch.from_numpy(np.ascontiguousarray(ids)))
    return logits.numpy(), state


def assert_same_state(state: StateBuffers, expected: NetworkState) -> None:
    assert state.position == expected.position
    arrays = state.arrays()
    names = {f"layers.{i}.{key}" for i, layer in enumerate(expected.layers) for key in layer}
    assert arrays.keys() == names
    for index, layer in enumerate(expected.layers):
        for key, tensor in layer.items():
            array, want = arrays[f"layers.{index}.{key}"], tensor.numpy()
            np.testing.assert_allclose(array[..., : want.shape[-1]], want, **CLOSE)
            assert not array[..., want.shape[-1] :].any(), "padding of a head must stay zero"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_prefill_then_steps(kind: str, batch: int) -> None:
    ids = tokens(30, batch=batch)
    logits, final = reference(kind, ids)
    state = engine(kind).new_state(batch=batch)
    at = 0
    for count in (1, 17, 5):
        out = engine(kind).run(ids[:, at : at + count], state, commit=True)
        at += count
        assert out.shape == (batch, 1, 40)
        np.testing.assert_allclose(out[:, 0], logits[:, at - 1], **CLOSE)
        assert state.reach == 0
    assert_same_state(state, reference(kind, ids[:, :at])[1])
    for at in range(23, 30):
        out = engine(kind).run(ids[:, at : at + 1], state)
        np.testing.assert_allclose(out[:, 0], logits[:, at], **CLOSE)
    assert_same_state(state, final)


@pytest.mark.parametrize("kind", KINDS)
@given(
    batch=st.sampled_from([1, 3]),
    runs=st.lists(st.tuples(st.booleans(), st.integers(1, 8)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12)
def test_any_cut_gives_the_same(
    kind: str, batch: int, runs: list[tuple[bool, int]], seed: int
) -> None:
    ids = tokens(sum(count for _, count in runs), batch=batch, seed=seed)
    logits, final = reference(kind, ids)
    state = engine(kind).new_state(batch=batch)
    at = 0
    for commit, count in runs:
        out = engine(kind).run(ids[:, at : at + count], state, rows="all", commit=commit)
        np.testing.assert_allclose(out, logits[:, at : at + count], **CLOSE)
        at += count
    assert_same_state(state, final)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("commit", [False, True])
def test_rows_in_the_order_asked_for(kind: str, batch: int, commit: bool) -> None:
    ids = tokens(6, batch=batch)
    logits, _ = reference(kind, ids)
    for rows in ([0], [5, 2], (3, 3, 0), np.array([1, 4])):
        out = engine(kind).run(ids, engine(kind).new_state(batch=batch), rows=rows, commit=commit)
        np.testing.assert_allclose(out, logits[:, list(rows)], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_of_a_chunk_beyond_the_window(kind: str) -> None:
    ids = tokens(50)
    state = engine(kind).new_state(window=2)
    out = engine(kind).run(ids, state, rows="all", commit=True)
    np.testing.assert_allclose(out, reference(kind, ids)[0], **CLOSE)
    step = engine(kind).run(ids[:, :1], state)  # bindings made before the buffer grew are gone
    assert np.isfinite(step).all()


def trees(size: int) -> st.SearchStrategy[list[int]]:
    return st.tuples(*(st.integers(-1, node - 1) for node in range(size))).map(list)


@pytest.mark.parametrize("kind", KINDS)
@given(
    before=st.integers(0, 9),
    parents=st.integers(1, 8).flatmap(trees),
    batch=st.sampled_from([1, 3]),
    data=st.data(),
)
@settings(max_examples=20)
def test_each_path_of_a_tree_is_as_if_alone(
    kind: str, before: int, parents: list[int], batch: int, data: st.DataObject
) -> None:
    if CONFIGS[kind].has_attention:
        batch = 1
    prompt = tokens(before, batch=batch, seed=1)
    nodes = tokens(len(parents), batch=batch, seed=2)
    state = engine(kind).new_state(batch=batch)
    if before:
        engine(kind).run(prompt, state, commit=True)
    out = engine(kind).run(nodes, state, parents=parents, rows="all").copy()
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    for leaf in set(range(len(parents))) - set(parents):  # every node is on the path to a leaf
        path = paths[leaf]
        alone, _ = reference(kind, np.concatenate([prompt, nodes[:, path]], axis=1))
        np.testing.assert_allclose(out[:, path], alone[:, before:], **CLOSE)
    chosen = data.draw(st.integers(0, len(parents) - 1))
    state.select(chosen)
    kept = np.concatenate([prompt, nodes[:, paths[chosen]]], axis=1)
    assert_same_state(state, reference(kind, kept)[1])
    following = tokens(1, batch=batch, seed=3)
    out = engine(kind).run(following, state)
    expected, _ = reference(kind, np.concatenate([kept, following], axis=1))
    np.testing.assert_allclose(out[:, 0], expected[:, -1], **CLOSE)


@pytest.mark.parametrize("kind", INT8)
@given(
    runs=st.lists(st.tuples(st.booleans(), st.integers(1, 8)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12)
def test_any_cut_of_an_int8_model(kind: str, runs: list[tuple[bool, int]], seed: int) -> None:
    """Values are rounded token by token, so run boundaries do not matter, except for a value
    between two steps, which another order of summation may round the other way.
    """
    ids = tokens(sum(count for _, count in runs), seed=seed)
    whole, state = engine(kind).new_state(), engine(kind).new_state()
    expected = engine(kind).run(ids, whole, rows="all", commit=True).copy()
    at = 0
    for commit, count in runs:
        out = engine(kind).run(ids[:, at : at + count], state, rows="all", commit=commit)
        near = expected[:, at : at + count]
        assert np.abs(out - near).max() <= 0.03 * np.abs(expected).max()
        at += count
    for name, array in state.snapshot().recurrent.items():
        other = whole.snapshot().recurrent[name]
        assert array.dtype == other.dtype and array.any()
        step = 2 if array.dtype == np.int8 else 0.03 * np.abs(other).max()
        assert np.abs(array.astype(np.float64) - other).max() <= step


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("batch", [1, 2])
def test_states_that_are_not_fp32(kind: str, batch: int) -> None:
    """As if the fp32 model's state were rounded by hand between its runs."""
    state, plain_state = (engine(k).new_state(batch=batch) for k in (kind, plain(kind)))
    ids = tokens(12, batch=batch)
    for at in range(12):
        step = ids[:, at : at + 1]
        found = engine(kind).run(step, state)
        assert np.array_equal(found, engine(plain(kind)).run(step, plain_state))
        by_hand = plain_state.snapshot()
        numbers = {n: rounded(n, a, kind) for n, a in by_hand.recurrent.items()}
        plain_state.restore(replace(by_hand, recurrent={n: v for n, (_, v) in numbers.items()}))
        for name, array in state.snapshot().recurrent.items():
            kept, _ = numbers[name]
            assert array.dtype == kept.dtype
            assert np.array_equal(array, kept), name
            assert len(np.unique(array)) > 4, "too coarse to tell a mistake by"
    other = engine(plain(kind)).new_state(batch=batch)
    assert not np.array_equal(found[:, 0], engine(plain(kind)).run(ids, other, commit=True)[:, 0])


def rounded(name: str, array: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the stored form of an fp32 state, and that form converted back to fp32."""
    dtype = ROUNDED[kind][1].get(name)
    if dtype == "int8":
        scale = int8_scale(name)
        kept = np.clip(np.round(array / scale), -128, 127).astype(np.int8)
        return kept, kept.astype(np.float32) * scale
    kept = array.astype(dtype or np.float32)
    return kept, kept.astype(np.float32)
