"""Every ONNX function against the plain reference: outputs and states, chains and trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edge.export.quantize.weights import (
    dequantize_blocks,
    quantize_blocks,
    quantize_minimum,
)
from edge.plugins.attention import reference as attention
from edge.plugins.causal_conv1d import reference as causal_conv1d
from edge.plugins.gated_delta_rule.reference import gated_delta_rule
from edge.plugins.gated_norm import reference as gated_norm
from edge.plugins.group_norm import reference as group_norm
from edge.plugins.norm import reference as norm
from edge.plugins.onnx import FLAVOURS, Flavour
from edge.plugins.selective_scan import reference as selective_scan
from edge.plugins.selective_scan_heads import reference as selective_scan_heads
from edge.rope import powers
from tests.onnx_ops import (
    LENGTHS,
    ancestors,
    chain,
    logged,
    path_to,
    random_parents,
    run_op,
    taps,
)

Array = NDArray[Any]
both = pytest.mark.parametrize("flavour", FLAVOURS)
# the other flavour is for the device graph, which has its own versions of these ops
ort_alone = pytest.mark.parametrize("flavour", ["ort"])
batches = pytest.mark.parametrize("batch", [1, 3])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def torched(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(a) for a in arrays]


def batch_first(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(a.swapaxes(0, 1))) for a in arrays]


def close(found: Array, expected: torch.Tensor, tolerance: float = 3e-6) -> None:
    """Check that values are within `tolerance` of the largest expected one; NaN and wrong shapes
    fail.
    """
    assert found.shape == tuple(expected.shape)
    scale = max(1.0, float(expected.abs().max()))
    assert float(np.abs(found - expected.numpy()).max()) <= tolerance * scale


def trees(rng: np.random.Generator, steps: int) -> list[list[int]]:
    return [chain(steps)] if steps > 16 else [chain(steps), *(random_parents(steps, rng),) * 2]


# -- dense -----------------------------------------------------------------------------------------


@both
def test_norms(flavour: Flavour, rng: np.random.Generator) -> None:
    x, added = normal(rng, 5, 3, 48), normal(rng, 5, 3, 48, scale=3)
    w, b = normal(rng, 48), normal(rng, 48)
    rms = norm.rms_norm(*torched(x, w), 1e-5)
    close(run_op("RMSNorm", flavour, {"x": x, "weight": w}, eps=1e-5)["y"], rms)
    out = run_op("AddRMSNorm", flavour, {"x": x, "added": added, "weight": w}, eps=1e-5)
    close(out["y"], norm.rms_norm(*torched(x + added, w), 1e-5))
    close(out["sum"], torch.from_numpy(x + added))
    layer = norm.layer_norm(*torched(x, w, b), 1e-5)
    close(run_op("LayerNorm", flavour, {"x": x, "weight": w, "bias": b}, eps=1e-5)["y"], layer)
    feeds = {"x": x, "added": added, "weight": w, "bias": b}
    out = run_op("AddLayerNorm", flavour, feeds, eps=1e-5)
    close(out["y"], norm.layer_norm(*torched(x + added, w, b), 1e-5))
    close(out["sum"], torch.from_numpy(x + added))


@both
def test_eps_is_inside_the_root(flavour: Flavour) -> None:
    x, w = np.full((1, 1, 8), 1e-4, np.float32), np.ones(8, np.float32)
    out = run_op("RMSNorm", flavour, {"x": x, "weight": w}, eps=1e-2)["y"]
    np.testing.assert_allclose(out, 1e-4 / np.sqrt(1e-8 + 1e-2), rtol=1e-5)


@both
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm(flavour: Flavour, groups: int, rng: np.random.Generator) -> None:
    x, z, w = normal(rng, 5, 3, 48), normal(rng, 5, 3, 48), normal(rng, 48)
    name = "GatedRMSNorm_1" if groups == 1 else "GatedRMSNorm"
    out = run_op(name, flavour, {"x": x, "z": z, "weight": w}, eps=1e-5, groups=groups)["y"]
    close(out, gated_norm.gated_rms_norm(*torched(x, z, w), 1e-5, groups))


@both
def test_norm_of_groups(flavour: Flavour, rng: np.random.Generator) -> None:
    x, w = normal(rng, 5, 3, 48), normal(rng, 48)
    out = run_op("GroupRMSNorm", flavour, {"x": x, "weight": w}, eps=1e-5, groups=6)["y"]
    close(out, group_norm.group_rms_norm(*torched(x, w), 1e-5, 6))


@both
def test_norm_of_parts(flavour: Flavour, rng: np.random.Generator) -> None:
    x, w = normal(rng, 5, 3, 25), normal(rng, 25)
    out = run_op("PartsRMSNorm", flavour, {"x": x, "weight": w}, eps=1e-5, first=7)["y"]
    close(out, group_norm.parts_rms_norm(*torched(x, w), 1e-5, 7))


@both
def test_gate_keeps_its_sign_far_out(flavour: Flavour, rng: np.random.Generator) -> None:
    x, z = normal(rng, 4, 1, 64), normal(rng, 4, 1, 64, scale=60)
    open_ = run_op("SigmoidGate", flavour, {"x": x, "z": z})["y"]
    close(open_, gated_norm.sigmoid_gate(*torched(x, z)))
    out = run_op("SiluGate", flavour, {"x": x, "z": z})["y"]
    close(out, torch.from_numpy(x) * torch.nn.functional.silu(torch.from_numpy(z)))


@both
def test_a_gate_a_head(flavour: Flavour, rng: np.random.Generator) -> None:
    x, z = normal(rng, 4, 2, 60), normal(rng, 4, 2, 5, scale=4)
    out = run_op("HeadGate", flavour, {"x": x, "z": z}, heads=5)["y"]
    close(out, gated_norm.head_gate(*torched(x, z), 5))


@both
def test_multiply(flavour: Flavour, rng: np.random.Generator) -> None:
    x, z = normal(rng, 4, 2, 64), normal(rng, 4, 2, 64)
    close(run_op("Multiply", flavour, {"x": x, "z": z})["y"], torch.from_numpy(x * z))


@both
def test_squared_relu(flavour: Flavour, rng: np.random.Generator) -> None:
    x = normal(rng, 4, 1, 64, scale=4)
    expected = torch.relu(torch.from_numpy(x)) ** 2
    close(run_op("SquaredRelu", flavour, {"x": x})["y"], expected)


@both
def test_soft_cap(flavour: Flavour, rng: np.random.Generator) -> None:
    x = normal(rng, 4, 1, 64, scale=4)
    expected = 3 * torch.tanh(torch.from_numpy(x) / 3)
    close(run_op("SoftCap", flavour, {"x": x}, cap=3.0)["y"], expected)


@both
def test_expand_logits(flavour: Flavour, rng: np.random.Generator) -> None:
    x, index = normal(rng, 3, 2, 4), np.array([2, -1, 0, -1, 3, 1], np.int32)
    expected = x[..., index]
    expected[..., index < 0] = x.min(-1, keepdims=True)
    close(
        run_op("ExpandLogits", flavour, {"x": x, "index": index})["y"], torch.from_numpy(expected)
    )


@both
@pytest.mark.parametrize(("op", "approximate"), [("Gelu", "none"), ("GeluTanh", "tanh")])
def test_gelu(flavour: Flavour, op: str, approximate: str, rng: np.random.Generator) -> None:
    x = normal(rng, 4, 1, 64, scale=4)
    expected = torch.nn.functional.gelu(torch.from_numpy(x), approximate=approximate)
    close(run_op(op, flavour, {"x": x})["y"], expected)


@both
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_linear_and_embedding(flavour: Flavour, dtype: type, rng: np.random.Generator) -> None:
    w = normal(rng, 40, 24).astype(dtype)
    x = normal(rng, 3, 2, 24)
    wide = torch.from_numpy(w.astype(np.float32))
    y = run_op("Linear", flavour, {"x": x, "weight": w})["y"]
    close(y, torch.from_numpy(x) @ wide.T)
    tokens = rng.integers(0, 40, (5, 2))
    rows = run_op("Embed", flavour, {"tokens": tokens, "table": w})["y"]
    assert np.array_equal(rows, wide.numpy()[tokens])


@ort_alone
@pytest.mark.parametrize(("bits", "block"), [(8, 128), (8, 32), (4, 32)])
def test_quantized_linear_and_embedding(
    flavour: Flavour, bits: int, block: int, rng: np.random.Generator
) -> None:
    w, x = normal(rng, 40, 256), normal(rng, 5, 2, 256)
    packed, scales = quantize_blocks(w, bits, block)
    wide = dequantize_blocks(packed, scales, bits)
    attributes = {"K": 256, "N": 40, "bits": bits, "block_size": block}
    feeds = {"packed": packed, "scales": scales}
    y = run_op(f"LinearBits_{bits}", flavour, feeds | {"x": x}, **attributes)["y"]
    # com.microsoft.MatMulNBits rounds activations to int8, which the statement allows.
    tolerance = 3e-6 if flavour == "standard" else 1e-2
    close(y, torch.from_numpy(x) @ torch.from_numpy(wide).T, tolerance)
    tokens = rng.integers(0, 40, (7, 2))
    rows = run_op(f"EmbedBits_{bits}", flavour, feeds | {"tokens": tokens}, **attributes)["y"]
    assert np.array_equal(rows, wide[tokens])


@ort_alone
def test_product_of_blocks_with_a_minimum(flavour: Flavour, rng: np.random.Generator) -> None:
    w, x = normal(rng, 40, 256) + np.float32(0.5), normal(rng, 5, 2, 256) + np.float32(0.2)
    packed, scales, minimums = quantize_minimum(w, 32)
    wide = dequantize_blocks(packed, scales, 4, minimums)
    feeds = {"x": x, "packed": packed, "scales": scales, "minimums": minimums}
    sizes = {"K": 256, "N": 40, "bits": 4, "block_size": 32}
    y = run_op("LinearBitsMinimum", flavour, feeds, constant=True, **sizes)["y"]
    close(y, torch.from_numpy(x) @ torch.from_numpy(wide).T, 1e-2)


# -- convolution -----------------------------------------------------------------------------------


@both
@batches
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize(("width", "silu"), [(2, True), (4, True), (3, False)])
def test_convolution(
    flavour: Flavour, batch: int, steps: int, width: int, silu: bool, rng: np.random.Generator
) -> None:
    c = 12
    x, state = normal(rng, steps, batch, c), normal(rng, width - 1, batch, c)
    w, b = normal(rng, c, width), normal(rng, c)
    for parents in trees(rng, steps):
        kept = np.arange(steps) if steps < 16 else np.array([steps - 1, 0])
        rows = taps(parents, width)
        feeds = {
            "x": x, "conv_state": state, "taps": rows, "kept_taps": rows[kept, 1:],
            "weight": np.ascontiguousarray(w.T[:, None]), "bias": b,
        }  # fmt: skip
        out = run_op("CausalConv1d" if silu else "CausalConvPlain", flavour, feeds)
        conv = causal_conv1d.causal_conv1d if silu else causal_conv1d.causal_conv_plain
        for r, t in enumerate(kept):
            path = path_to(parents, int(t))
            y, after = conv(*batch_first(x[path], state), *torched(w, b))
            close(out["y"][t], y[:, -1])
            close(out["conv_states"][r].swapaxes(0, 1), after)


# -- scans -----------------------------------------------------------------------------------------


def scan_feeds(
    rng: np.random.Generator, steps: int, batch: int, groups: int = 1
) -> dict[str, Array]:
    """Return feeds; `groups` of C, half as many of B."""
    e, n = 24, 8
    return {
        "x": normal(rng, steps, batch, e),
        "dt": normal(rng, steps, batch, e, scale=3),
        "B": normal(rng, steps, batch, max(1, groups // 2) * n),
        "C": normal(rng, steps, batch, groups * n),
        "z": normal(rng, steps, batch, e),
        "A": -np.exp(normal(rng, n, e)),
        "D": normal(rng, e),
        "dt_bias": normal(rng, e),
        "ssm_state": normal(rng, batch, n, e),
    }


def scan_reference(f: dict[str, Array], path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, b, c, z = batch_first(*(f[k][path] for k in ("x", "dt", "B", "C", "z")))
    a_log, d, bias, h = torched(np.log(-f["A"].T), f["D"], f["dt_bias"], f["ssm_state"])
    return selective_scan.selective_scan(x, dt, a_log, b, c, d, bias, z, h)


@both
@batches
@pytest.mark.parametrize("steps", LENGTHS)
def test_selective_scan(flavour: Flavour, batch: int, steps: int, rng: np.random.Generator) -> None:
    groups = 1 if batch == 1 else 4
    name = "SelectiveScan" if groups == 1 else "SelectiveScanGroups"
    f = scan_feeds(rng, steps, batch, groups)
    for parents in trees(rng, steps):
        tree = parents != chain(steps)
        every = np.arange(steps)
        kept = every if steps < 16 else np.array([0, steps // 2, steps - 1])
        steer = {"parents": np.array(parents), "tree": np.array(tree)}
        all_kept = {"kept": kept, "last_only": np.array(False)}
        out = run_op(name, flavour, f | steer | all_kept)
        for r, t in enumerate(kept):
            y, after = scan_reference(f, path_to(parents, int(t)))
            close(out["y"][t], y[:, -1], 1e-5)
            close(out["ssm_states"][r], after, 1e-5)
        if not tree:
            y, after = scan_reference(f, parents and list(range(steps)))
            last = {"kept": every[-1:], "last_only": np.array(True)}
            short = run_op(name, flavour, f | steer | last)
            close(short["y"].swapaxes(0, 1), y, 1e-5)
            close(short["ssm_states"][0], after, 1e-5)
            close(out["y"].swapaxes(0, 1), y, 1e-5)


@both
def test_step_sizes_from_tiny_to_huge(flavour: Flavour, rng: np.random.Generator) -> None:
    f = scan_feeds(rng, 4, 1)
    f["dt"] = np.linspace(-40, 90, f["dt"].size, dtype=np.float32).reshape(f["dt"].shape)
    f["ssm_state"][:] = 0
    f["D"][:] = 0
    steer = {"parents": np.array(chain(4)), "tree": np.array(False), "kept": np.arange(4),
             "last_only": np.array(False)}  # fmt: skip
    out = run_op("SelectiveScan", flavour, f | steer)
    y, _ = scan_reference(f, [0, 1, 2, 3])
    # The first token's output is proportional to its Δ: 1e-17 must not become 0 or 1e-8.
    expected = y[:, 0].numpy()
    np.testing.assert_allclose(out["y"][0], expected, rtol=2e-4)
    assert np.isfinite(out["ssm_states"]).all()


def heads_feeds(rng: np.random.Generator, steps: int, batch: int, groups: int) -> dict[str, Array]:
    h, p, n = 4, 8, 16
    return {
        "x": normal(rng, steps, batch, h * p),
        "dt": normal(rng, steps, batch, h, scale=2),
        "B": normal(rng, steps, batch, groups * n),
        "C": normal(rng, steps, batch, groups * n),
        "A": -np.exp(normal(rng, h)),
        "D": normal(rng, h),
        "dt_bias": normal(rng, h),
        "ssm_state": normal(rng, batch, h, p, n),
    }


@both
@batches
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize(("groups", "limit"), [(1, (0.0, float("inf"))), (2, (0.05, 0.8))])
def test_selective_scan_heads(
    flavour: Flavour,
    batch: int,
    steps: int,
    groups: int,
    limit: tuple[float, float],
    rng: np.random.Generator,
) -> None:
    f = heads_feeds(rng, steps, batch, groups)
    a_log, d, bias, h = torched(np.log(-f["A"]), f["D"], f["dt_bias"], f["ssm_state"])
    for parents in trees(rng, steps):
        kept = np.arange(steps) if steps < 16 else np.array([steps // 2, steps - 1])
        out = run_op(
            "SelectiveScanHeads_1" if groups == 1 else "SelectiveScanHeads",
            flavour,
            f | {"kept": kept, "ancestors": ancestors(parents)},
            heads=4, head_dim=8, groups=groups, d_state=16, dt_min=limit[0], dt_max=limit[1],
        )  # fmt: skip
        for r, t in enumerate(kept):
            path = path_to(parents, int(t))
            x, dt, b, c = batch_first(*(f[k][path] for k in ("x", "dt", "B", "C")))
            y, after = selective_scan_heads.selective_scan_heads(
                x.unflatten(-1, (4, 8)), dt, a_log, b.unflatten(-1, (groups, 16)),
                c.unflatten(-1, (groups, 16)), d, bias, h, limit,
            )  # fmt: skip
            close(out["y"][t], y[:, -1].flatten(1), 2e-5)
            close(out["ssm_states"][r], after, 2e-5)


@both
@batches
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("count", "steps"), [(1, 1), (1, 4), (3, 1), (3, 4), (2, 65)])
def test_logged_tokens_come_before_the_run(
    flavour: Flavour, batch: int, groups: int, count: int, steps: int, rng: np.random.Generator
) -> None:
    """The same as one run over all tokens whose first outputs are not wanted."""
    f, whole = heads_feeds(rng, count + steps, batch, groups), count + steps
    name = "SelectiveScanHeads_1" if groups == 1 else "SelectiveScanHeads"
    sizes = {"heads": 4, "head_dim": 8, "groups": groups, "d_state": 16,
             "dt_min": 0.0, "dt_max": 9.0}  # fmt: skip
    for tree in trees(rng, steps):
        parents = [*chain(count), *(parent + count for parent in tree)]
        every = {"kept": np.arange(whole), "ancestors": ancestors(parents)}
        expected = run_op(name, flavour, f | every, **sizes)
        for kept in ([count - 1], [whole - 1], [count - 1, whole - 1]):
            some = every | {"kept": np.array(kept, np.int64)}
            out = run_op(name, flavour, logged(f, count) | some, **sizes)
            close(out["y"], torch.from_numpy(expected["y"][count:]), 2e-5)
            close(out["ssm_states"], torch.from_numpy(expected["ssm_states"][kept]), 2e-5)


@ort_alone
@batches
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize(("groups", "most"), [(4, 1.0), (2, 2.0), (1, 1.0)])
def test_gated_delta_rule(
    flavour: Flavour, batch: int, steps: int, groups: int, most: float, rng: np.random.Generator
) -> None:
    f = heads_feeds(rng, steps, batch, groups)
    f["dt"] = normal(rng, steps, batch, 8, scale=2)
    f["B"] /= np.linalg.norm(f["B"].reshape(-1, 16), axis=1).max()
    a_log, bias, h = torched(np.log(-f["A"]), f["dt_bias"], f["ssm_state"])
    del f["D"]
    every = np.arange(steps)
    for parents in trees(rng, steps):
        tree = parents != chain(steps)
        steer = {"parents": np.array(parents), "tree": np.array(tree)}
        for kept in (every, every[-1:]) if not tree else (every, every[::2]):
            steer["last_only"] = np.array(not tree and len(kept) == 1)
            out = run_op(
                "GatedDeltaRule", flavour, f | steer | {"kept": kept}, heads=4, head_dim=8,
                groups=groups, d_state=16, beta_max=most,
            )  # fmt: skip
            for r, t in enumerate(kept):
                path = path_to(parents, int(t))
                x, dt, b, c = batch_first(*(f[k][path] for k in ("x", "dt", "B", "C")))
                y, after = gated_delta_rule(
                    x.unflatten(-1, (4, 8)), dt, a_log, b.unflatten(-1, (groups, 16)),
                    c.unflatten(-1, (groups, 16)), bias, h, most,
                )  # fmt: skip
                close(out["y"][t], y[:, -1].flatten(1), 2e-5)
                close(out["ssm_states"][r], after, 2e-5)


# -- attention -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dim", [8, 16])
def test_rope(flavour: Flavour, dim: int, rng: np.random.Generator) -> None:
    heads, size, steps = 3, 16, 5
    x, positions = normal(rng, 2, steps, heads * size), np.array([4, 5, 5, 6, 900])
    inverse = 10000.0 ** (-np.arange(0, dim, 2) / dim)
    angle = positions[:, None] * inverse
    feeds = {
        "x": x,
        "cos": np.cos(angle).astype(np.float32),
        "sin": np.sin(angle).astype(np.float32),
    }
    y = run_op("Rope", flavour, feeds, heads=heads, head_dim=size, dim=dim)["y"]
    split = torch.from_numpy(x).unflatten(-1, (heads, size)).transpose(1, 2)
    expected = attention.rope(
        split, torch.from_numpy(positions), torch.from_numpy(powers(10000.0, dim))
    )
    close(y, expected.transpose(1, 2).flatten(2), 2e-4)


@ort_alone
@pytest.mark.parametrize("kept", [np.float32, np.float16])
@pytest.mark.parametrize(("batch", "past", "steps"), [
    (1, 0, 1), (1, 0, 5), (1, 9, 1), (1, 9, 5), (1, 3, 7), (1, 0, 64), (3, 0, 5), (3, 9, 1),
])  # fmt: skip
def test_attention_never_reads_unused_slots(
    flavour: Flavour, batch: int, past: int, steps: int, kept: type, rng: np.random.Generator
) -> None:
    heads, kv, size, capacity = 4, 2, 8, 80
    q = normal(rng, batch, steps, heads * size)
    k, v = normal(rng, batch, steps, kv * size), normal(rng, batch, steps, kv * size)
    caches = [np.full((batch, kv, capacity, size), np.nan, kept) for _ in range(2)]
    for cache in caches:
        cache[:, :, :past] = normal(rng, batch, kv, past, size)
    for parents in trees(rng, steps):
        allowed = np.concatenate([np.ones((steps, past), np.float32), ancestors(parents)], 1)
        total = past + steps
        feeds = {
            "q": q, "k": k, "v": v, "key_cache": caches[0], "value_cache": caches[1],
            "last": np.full(batch, total - 1, np.int32), "total": np.array(total, np.int32),
            "bias": ((allowed - 1) * 1e9)[None, None],
        }  # fmt: skip
        out = run_op("AttentionF16" if kept is np.float16 else "Attention", flavour, feeds,
                     heads=heads, kv_heads=kv, head_dim=size, scale=size**-0.5)  # fmt: skip
        split = [torch.from_numpy(m).unflatten(-1, (-1, size)).transpose(1, 2) for m in (q, k, v)]
        keys, values = (
            torch.cat([torch.from_numpy(c[:, :, :past]), new.to(torch.from_numpy(c).dtype)], 2)
            for c, new in zip(caches, split[1:], strict=True)
        )
        seen = torch.from_numpy(allowed > 0)
        expected = attention.attention(split[0], keys.float(), values.float(), seen)
        close(out["y"], expected.transpose(1, 2).flatten(2), 1e-5)
        assert np.array_equal(out["key_cache_out"][:, :, :total], keys.numpy())
        assert np.array_equal(out["value_cache_out"][:, :, :total], values.numpy())
        assert np.isnan(out["key_cache_out"][:, :, total:]).all()
