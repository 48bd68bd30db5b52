"""The network's parallel forms against the references: outputs, states and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge.config import Mamba1Config, ModelConfig
from edge.export import training_ops
from edge.export.mixers import mamba1
from edge.export.network import Network
from edge.export.training_ops import (
    causal_conv1d_training,
    gated_rms_norm_training,
    rms_norm_training,
    selective_scan_heads_chunked,
    selective_scan_training,
)
from edge.plugins.causal_conv1d.reference import causal_conv1d
from edge.plugins.gated_norm.reference import gated_rms_norm
from edge.plugins.norm.reference import rms_norm
from edge.plugins.selective_scan.reference import selective_scan
from edge.plugins.selective_scan_heads.reference import selective_scan_heads

INFINITY = float("inf")


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("steps", "chunk"), [(1, 32), (31, 32), (32, 32), (33, 32), (97, 64)])
@pytest.mark.parametrize("limit", [(0.0, INFINITY), (0.02, 0.5)])
def test_chunked_scan(steps: int, chunk: int, groups: int, limit: tuple[float, float]) -> None:
    torch.manual_seed(steps + groups)
    heads, width, state = 4, 6, 5
    inputs = (
        torch.randn(2, steps, heads, width),
        torch.randn(2, steps, heads),
        torch.rand(heads).mul(3),
        torch.randn(2, steps, groups, state),
        torch.randn(2, steps, groups, state),
        torch.randn(heads),
        torch.randn(heads),
        torch.randn(2, heads, width, state),
    )
    y, h = selective_scan_heads_chunked(*inputs, limit, chunk)
    expected_y, expected_h = selective_scan_heads(*inputs, limit)
    torch.testing.assert_close(y, expected_y, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(h, expected_h, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("b_groups", "c_groups"), [(1, 1), (2, 2), (1, 3), (2, 6)])
@pytest.mark.parametrize("steps", [1, 4, 5, 13])
def test_scan_and_its_gradients(
    steps: int, b_groups: int, c_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, channels, state = 2, 12, 5
    monkeypatch.setattr(training_ops, "SCAN_ELEMENTS", 4 * batch * channels * state)
    monkeypatch.setattr(training_ops, "SHORTEST_CHUNK", 1)
    torch.manual_seed(steps)
    rows = (batch, steps, channels)
    shapes = [
        rows, rows, (channels, state), (batch, steps, b_groups * state),
        (batch, steps, c_groups * state), (channels,), (channels,), rows, (batch, state, channels),
    ]  # fmt: skip
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found, expected = selective_scan_training(*inputs), selective_scan(*inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    losses = [y.sin().sum() + h.cos().sum() for y, h in (found, expected)]
    ours, theirs = (torch.autograd.grad(loss, inputs) for loss in losses)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-4)


def test_autocast_leaves_the_scan_in_fp32() -> None:
    torch.manual_seed(0)
    rows = (2, 9, 12)
    shapes = [rows, rows, (12, 5), (2, 9, 5), (2, 9, 5), (12,), (12,), rows, (2, 5, 12)]
    inputs = [torch.randn(shape) for shape in shapes]
    expected = selective_scan_training(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = selective_scan_training(*inputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_mamba_layer_trains_as_its_reference_would(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = Mamba1Config(d_inner=16, d_state=4, dt_rank=2)
    config = ModelConfig(family="mamba", vocab_size=16, d_model=8, layers=(mixer,))
    torch.manual_seed(0)
    network, ids = Network(config), torch.randint(16, (2, 40))
    weights = list(network.parameters())
    results = []
    for shortest in (8, 41):
        monkeypatch.setattr(mamba1, "CHUNK", shortest)
        hidden, state = network.hidden(ids)
        loss = hidden.sin().sum() + state.layers[0]["ssm_state"].sum()
        results.append((hidden, *torch.autograd.grad(loss, weights)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 37])
def test_convolution_and_its_gradients(steps: int, bias: bool) -> None:
    torch.manual_seed(steps)
    shapes = [(3, steps, 6), (3, 3, 6), (6, 4), *([(6,)] if bias else [])]
    inputs = [torch.randn(shape, dtype=torch.float32, requires_grad=True) for shape in shapes]
    x, state, weight, *rest = inputs
    found = causal_conv1d_training(x, state, weight, rest[0] if bias else None)
    expected = causal_conv1d(x, state, weight, rest[0] if bias else None)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    losses = [y.sin().sum() + s.cos().sum() for y, s in (found, expected)]
    ours, theirs = (torch.autograd.grad(loss, inputs) for loss in losses)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def assert_same_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(y.sin().sum(), inputs) for y in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_norm_and_its_gradients() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 5, 12, requires_grad=True), torch.randn(12, requires_grad=True)]
    expected = rms_norm(inputs[0], inputs[1], 1e-2)
    assert_same_gradients(rms_norm_training(inputs[0], inputs[1], 1e-2), expected, inputs)


@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm_and_its_gradients(groups: int) -> None:
    torch.manual_seed(groups)
    shapes = [(3, 5, 12), (3, 5, 12), (12,)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    y, z, weight = inputs
    expected = gated_rms_norm(y, z, weight, 1e-2, groups)
    assert_same_gradients(gated_rms_norm_training(y, z, weight, 1e-2, groups), expected, inputs)
