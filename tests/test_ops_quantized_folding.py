"""How ONNX Runtime optimizes the int8 convolution and scans when it loads a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped, unused-ignore]
import pytest

from edge.export.graph.run import session_options
from edge.plugins.catalogue import OPS
from edge.plugins.onnx import FLAVOURS, Flavour
from tests.int8_recurrent import (
    CASES,
    UNSIGNED,
    Array,
    Compared,
    any_feeds,
    conv_feeds,
    run,
    steering,
)
from tests.onnx_ops import all_nodes, chain, inputs_of, one_op_model, taps

both = pytest.mark.parametrize("flavour", FLAVOURS)
# the other flavour is for the device graph, which has its own versions of these ops
ort_alone = pytest.mark.parametrize("flavour", ["ort"])
scans = pytest.mark.parametrize(("op", "groups"), CASES)
states = pytest.mark.parametrize("state_bits", [32, 16, 8])
scales = pytest.mark.parametrize("a_channel", [False, True])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def optimized(
    op: str, flavour: Flavour, feeds: dict[str, Array], folder: Path, **attributes: float
) -> onnx.GraphProto:
    """Return the graph that ONNX Runtime runs, with weights and scales as initializers."""
    inputs = inputs_of(OPS[op], feeds)
    weights = {v.name: inputs[v.name] for v in OPS[op].inputs if v.role == "weight"}
    types = [array.dtype for array in inputs.values()]
    name = OPS[op].function(attributes)
    model = one_op_model(name, flavour, attributes.items(), types, weights)
    options = session_options()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx").graph


@ort_alone
@scans
@states
@scales
def test_what_is_constant_is_computed_when_the_model_is_loaded(
    flavour: Flavour,
    op: str,
    groups: int,
    state_bits: int,
    a_channel: bool,
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    f, attributes = any_feeds(op, rng, 2, 1, groups, state_bits, a_channel)
    if flavour == "ort":
        f |= {n: f[n].view(np.uint8) for n in f.keys() & set(UNSIGNED[op])}
    f |= steering(chain(2), np.array([1]), True)
    graph = optimized(op, flavour, f, tmp_path, **attributes)
    read = {name for node in all_nodes(graph.node) for name in node.input}
    assert not read & {"A_log", "D", "dt_bias", "A_log_scale", "D_scale", "dt_bias_scale"}
    # Only the choice between the ways of the tokens is left.
    assert [node.op_type for node in graph.node].count("If") == 1
    constants = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer]
    rates = -np.exp(f["A_log"] * f["A_log_scale"])
    same_size = (c.ravel() for c in constants if c.size == rates.size)
    assert any(np.allclose(c, rates.ravel(), rtol=1e-6) for c in same_size)


@both
@scales
def test_the_convolution_rounds_once(
    flavour: Flavour, a_channel: bool, rng: np.random.Generator, tmp_path: Path
) -> None:
    f, rows = conv_feeds(rng, 2, 1, 4, a_channel), taps(chain(2), 4)
    f |= {"taps": rows, "kept_taps": rows[:, 1:]}
    graph = optimized("CausalConv1dInt8", flavour, f, tmp_path)
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("QuantizeLinear") == 1 and "QuickGelu" in kinds and "If" not in kinds
    if flavour == "ort":
        assert ("Div" in kinds) == a_channel
    read = {name for node in graph.node for name in node.input}
    assert not read & {"weight", "bias", "weight_scale", "bias_scale", "x_scale"}


@ort_alone
@scans
@states
@scales
def test_constants_give_what_inputs_give(
    flavour: Flavour,
    op: str,
    groups: int,
    state_bits: int,
    a_channel: bool,
    rng: np.random.Generator,
) -> None:
    f, attributes = any_feeds(op, rng, 3, 2, groups, state_bits, a_channel)
    f |= steering(chain(3), np.array([2]), True)
    found, expected = (run(op, flavour, f, fixed, **attributes) for fixed in (True, False))
    compared = Compared()
    compared.floats(found["y"], expected["y"], 1e-5)
    compared.state(found["ssm_states"], expected["ssm_states"])
    compared.check()


@both
@scales
def test_a_constant_filter_gives_what_an_input_gives(
    flavour: Flavour, a_channel: bool, rng: np.random.Generator
) -> None:
    f, rows = conv_feeds(rng, 3, 2, 4, a_channel), taps(chain(3), 4)
    f |= {"taps": rows, "kept_taps": rows[:, 1:]}
    found, expected = (run("CausalConv1dInt8", flavour, f, fixed) for fixed in (True, False))
    compared = Compared()
    compared.int8(found["y"], expected["y"])
    compared.check()
