"""The dense int8 ops against the plain reference, on the reference's own inputs.

Rounded outputs may be one step apart, on at most 1 in 10,000 values; integer sums must be exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from edge.export.quantize.weights import quantize_blocks, quantize_minimum
from edge.plugins.catalogue import OPS
from edge.plugins.embedding import reference as embedding
from edge.plugins.gated_norm import reference as gated_norm
from edge.plugins.hadamard import reference as hadamard
from edge.plugins.hadamard.matrices import factors
from edge.plugins.linear import reference as linear
from edge.plugins.norm import reference as norm
from edge.plugins.onnx import FLAVOURS, Flavour, op_of
from edge.plugins.quantize import reference as quantize
from tests.onnx_ops import one_op_model, run_op

Array = NDArray[Any]
both = pytest.mark.parametrize("flavour", FLAVOURS)
# the other flavour is for the device graph, which has its own versions of these ops
ort_alone = pytest.mark.parametrize("flavour", ["ort"])
# (tokens, batch): one step, odd runs, more than a chunk
RUNS = ((1, 1), (1, 3), (7, 1), (7, 3), (65, 3))
WIDTHS = (1, 3, 33, 257)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def int8(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-128, 128, shape).astype(np.int8)


def positive(rng: np.random.Generator, count: int, about: float) -> Array:
    return (about * rng.uniform(0.5, 1.5, count)).astype(np.float32)


def torched(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(a) for a in arrays]


def run(
    op: str, flavour: Flavour, feeds: dict[str, Array], **attributes: float
) -> dict[str, Array]:
    """Return outputs by name, int8 where the statement says i8|u8, whatever the flavour uses."""
    statement = op_of(op)
    carried = {v.name for v in statement.inputs if "u8" in v.dtypes and "i8" in v.dtypes}
    if flavour == "ort":
        feeds = feeds | {n: (feeds[n].astype(np.int16) + 128).astype(np.uint8) for n in carried}
    out = run_op(OPS[op].function(attributes), flavour, feeds, constant=True, **attributes)
    for v in statement.outputs:
        if "u8" in v.dtypes and flavour == "ort":
            assert out[v.name].dtype == np.uint8
            out[v.name] = (out[v.name].astype(np.int16) - 128).astype(np.int8)
    return out


class Steps:
    """Counts rounded values that differ, over everything one test compares."""

    def __init__(self) -> None:
        self.values = self.apart = 0

    def add(self, found: Array, expected: torch.Tensor) -> None:
        assert found.dtype == np.int8 and found.shape == tuple(expected.shape)
        steps = np.abs(found.astype(int) - expected.numpy().astype(int))
        assert steps.max() <= 1
        self.values += steps.size
        self.apart += int(steps.sum())

    def check(self) -> None:
        assert self.values >= 10_000
        assert self.apart <= self.values / 10_000, f"{self.apart} of {self.values} differ"


def close(found: Array, expected: torch.Tensor, tolerance: float = 3e-6) -> None:
    """Check that values are within `tolerance` of the largest expected one; NaN and wrong shapes
    fail.
    """
    assert found.shape == tuple(expected.shape)
    largest = float(expected.abs().max())
    assert float(np.abs(found - expected.numpy()).max()) <= tolerance * largest


# -- rounding --------------------------------------------------------------------------------------

TIES = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -127.5]], np.float32)
EXTREMES = np.array([[127.4, 127.6, 1e30, -127.6, -128.4, -128.6, -1e30, 3e38]], np.float32)


def test_the_reference_rounds_half_to_even_and_saturates() -> None:
    one = torch.ones(1)
    ties, extremes = torched(TIES, EXTREMES)
    assert quantize.quantize(ties, one).tolist() == [[0, 2, 2, 0, -2, -2, 126, -128]]
    found = quantize.quantize(extremes, one)
    assert found.tolist() == [[127, 127, 127, -128, -128, -128, -128, 127]]


@both
@pytest.mark.parametrize("channels", [False, True])
def test_quantize(flavour: Flavour, channels: bool, rng: np.random.Generator) -> None:
    seen = Steps()
    for steps, batch in RUNS:
        for width in WIDTHS:
            x = normal(rng, steps, batch, width, scale=0.7)
            scale = positive(rng, width if channels else 1, 0.01)
            y = run("Quantize", flavour, {"x": x, "scale": scale})["y"]
            seen.add(y, quantize.quantize(*torched(x, scale)))
    seen.check()


@both
@pytest.mark.parametrize("channels", [1, 33])
def test_a_scale_may_come_with_the_run(
    flavour: Flavour, channels: int, rng: np.random.Generator
) -> None:
    x, scale = normal(rng, 7, 3, 33), positive(rng, channels, 0.01)
    y = run_op("Quantize", flavour, {"x": x, "scale": scale})["y"]
    expected = quantize.quantize(*torched(x, scale)).numpy().astype(int)
    assert np.array_equal(y.astype(int) - (128 if flavour == "ort" else 0), expected)


@both
@pytest.mark.parametrize("op", ["Quantize", "FakeQuantize"])
@pytest.mark.parametrize("channels", [1, 8])
def test_ties_and_extremes(flavour: Flavour, op: str, channels: int) -> None:
    """Division by powers of two does not round, so every value must be exact."""
    scale = np.full(channels, 0.25, np.float32)
    for x in (TIES, EXTREMES):
        found = run(op, flavour, {"x": x * np.float32(0.25), "scale": scale})["y"]
        expected = quantize.quantize(torch.from_numpy(x), torch.ones(1)).numpy()
        assert np.array_equal(found, expected if op == "Quantize" else expected * np.float32(0.25))


@both
def test_quantize_rows(flavour: Flavour, rng: np.random.Generator) -> None:
    seen = Steps()
    for steps, batch in RUNS:
        for width in WIDTHS:
            x = normal(rng, steps, batch, width) * 10.0 ** rng.integers(-8, 8, (steps, batch, 1))
            x = x.astype(np.float32)
            x[-1, -1] = 0
            out = run("QuantizeRows", flavour, {"x": x})
            y, scale = quantize.quantize_rows(torch.from_numpy(x))
            seen.add(out["y"], y)
            assert np.array_equal(out["scale"], scale.numpy())
            assert out["scale"][-1, -1, 0] == 1 and not out["y"][-1, -1].any()
            fake = run("FakeQuantizeRows", flavour, {"x": x})["y"]
            assert np.array_equal(fake, (y * scale).numpy())
            threshold = float(np.float32(abs(x).mean()))
            out = run("SplitQuantizeRows", flavour, {"x": x}, threshold=threshold)
            y, scale, apart = quantize.split_quantize_rows(torch.from_numpy(x), threshold)
            seen.add(out["y"], y)
            assert np.array_equal(out["scale"], scale.numpy())
            assert np.array_equal(out["outliers"], apart.numpy())
    seen.check()


@both
def test_a_row_whose_scale_would_be_denormal(flavour: Flavour) -> None:
    x = np.array([[1e-45, -1e-45, 0], [3e-43, -1e-43, 1e-45]], np.float32)
    out = run("QuantizeRows", flavour, {"x": x})
    y, scale = quantize.quantize_rows(torch.from_numpy(x))
    assert np.array_equal(out["scale"], scale.numpy()) and np.array_equal(out["y"], y.numpy())
    assert scale[0] == 1


@both
@pytest.mark.parametrize("channels", [False, True])
def test_back_to_floating(flavour: Flavour, channels: bool, rng: np.random.Generator) -> None:
    for steps, batch in RUNS:
        x, scale = int8(rng, steps, batch, 33), positive(rng, 33 if channels else 1, 0.02)
        y = run("Dequantize", flavour, {"x": x, "scale": scale})["y"]
        assert np.array_equal(y, quantize.dequantize(*torched(x, scale)).numpy())
        wide = normal(rng, steps, batch, 33)
        fake = run("FakeQuantize", flavour, {"x": wide, "scale": scale})["y"]
        assert np.array_equal(fake, quantize.fake_quantize(*torched(wide, scale)).numpy())


# -- products --------------------------------------------------------------------------------------

SHAPES = ((1, 1), (3, 5), (33, 20), (257, 64), (1536, 96))


@pytest.mark.parametrize(("columns", "rows"), [(7, 3), (1024, 2), (5000, 3)])
def test_reference_sums_are_exact(columns: int, rows: int, rng: np.random.Generator) -> None:
    """Beyond 2^24, where fp32 sums would lose units: the last row's weights are all -128."""
    x, w = int8(rng, 4, columns), int8(rng, rows, columns)
    x[0], w[-1] = -128, -128
    one = torch.ones(1)
    found = linear.linear_int8(torch.from_numpy(x), one, torch.from_numpy(w), one)
    exact = x.astype(np.int64) @ w.astype(np.int64).T
    assert np.array_equal(found.numpy(), exact.astype(np.float32))


@both
@pytest.mark.parametrize("per_row", [False, True])
def test_linear_int8(flavour: Flavour, per_row: bool, rng: np.random.Generator) -> None:
    seen = Steps()
    for columns, rows in SHAPES:
        for steps, batch in RUNS:
            x, w = int8(rng, steps, batch, columns), int8(rng, rows, columns)
            x[0, 0] = -128
            scales = np.array([0.013], np.float32), positive(rng, rows if per_row else 1, 0.02)
            product = linear.linear_int8(*torched(x, scales[0], w, scales[1]))
            feeds = {"x": x, "x_scale": scales[0], "weight": w, "weight_scale": scales[1]}
            close(run("LinearInt8", flavour, feeds)["y"], product)

            y_scale = positive(rng, rows if per_row else 1, float(product.abs().max()) / 100)
            y = run("LinearInt8Quantize", flavour, feeds | {"y_scale": y_scale})["y"]
            seen.add(y, quantize.quantize(product, torch.from_numpy(y_scale)))

            x_scale = positive(rng, steps * batch, 0.01).reshape(steps, batch, 1)
            dynamic = run("LinearInt8Rows", flavour, feeds | {"x_scale": x_scale})["y"]
            close(dynamic, linear.linear_int8(*torched(x, x_scale, w, scales[1])))
    seen.check()


def test_products_are_exact_integers(rng: np.random.Generator) -> None:
    """Exact where each pair of products overflows 16 bits and fp32 sums exceed 2^24."""
    columns = 4096
    x, w = int8(rng, 5, 1, columns), int8(rng, 33, columns)
    x[0], w[0], x[1], w[1] = -128, -128, 127, 127
    one = np.ones(1, np.float32)
    feeds = {"x": x, "x_scale": one, "weight": w, "weight_scale": one}
    exact = x.astype(np.int64) @ w.astype(np.int64).T
    assert np.array_equal(run("LinearInt8", "ort", feeds)["y"], exact.astype(np.float32))


@ort_alone
@pytest.mark.parametrize("block", [32, 128])
def test_linear_int4(flavour: Flavour, block: int, rng: np.random.Generator) -> None:
    for rows in (1, 40):
        packed, scales = quantize_blocks(normal(rng, rows, 256), 4, block)
        for steps, batch in RUNS:
            x, x_scale = int8(rng, steps, batch, 256), np.array([0.013], np.float32)
            feeds = {"x": x, "x_scale": x_scale, "packed": packed, "scales": scales}
            y = run("LinearInt4", flavour, feeds, K=256, N=rows, bits=4, block_size=block)["y"]
            close(y, linear.linear_int4(*torched(x, x_scale, packed, scales)))


@ort_alone
@pytest.mark.parametrize("block", [32, 128])
def test_linear_int4_with_minimums(flavour: Flavour, block: int, rng: np.random.Generator) -> None:
    packed, scales, minimums = quantize_minimum(normal(rng, 40, 256) + np.float32(0.5), block)
    sizes = {"K": 256, "N": 40, "bits": 4, "block_size": block}
    y_scale = np.array([0.9], np.float32)
    for steps, batch in RUNS:
        x, x_scale = int8(rng, steps, batch, 256), np.array([0.013], np.float32)
        feeds = {"x": x, "x_scale": x_scale, "packed": packed, "scales": scales}
        feeds |= {"minimums": minimums}
        wanted = linear.linear_int4_minimum(*torched(*feeds.values()))
        close(run("LinearInt4Minimum", flavour, feeds, **sizes)["y"], wanted)
        q = run("LinearInt4MinimumQuantize", flavour, feeds | {"y_scale": y_scale}, **sizes)["y"]
        rounded = quantize.quantize(wanted, torch.from_numpy(y_scale)).numpy()
        assert q.dtype == np.int8 and 20 < np.abs(rounded).max() <= 128
        assert (q != rounded).mean() <= 1e-3 and np.abs(q.astype(int) - rounded).max() <= 1


@ort_alone
@pytest.mark.parametrize("per_channel", [False, True])
def test_linear_int4_quantize(
    flavour: Flavour, per_channel: bool, rng: np.random.Generator
) -> None:
    packed, scales = quantize_blocks(normal(rng, 40, 256), 4, 128)
    y_scale = rng.uniform(0.1, 0.3, 40 if per_channel else 1).astype(np.float32)
    for steps, batch in RUNS:
        x, x_scale = int8(rng, steps, batch, 256), np.array([0.013], np.float32)
        feeds = {"x": x, "x_scale": x_scale, "packed": packed, "scales": scales}
        feeds |= {"y_scale": y_scale}
        y = run("LinearInt4Quantize", flavour, feeds, K=256, N=40, bits=4, block_size=128)["y"]
        wanted = linear.linear_int4_quantize(*torched(*feeds.values())).numpy()
        assert y.dtype == np.int8 and 20 < np.abs(wanted).max() <= 128
        differing = y != wanted
        assert differing.mean() <= 1e-3 and np.abs(y.astype(int) - wanted).max() <= 1


# -- norms, rotation, embedding --------------------------------------------------------------------


@both
@pytest.mark.parametrize("channels", [False, True])
def test_norms_that_round(flavour: Flavour, channels: bool, rng: np.random.Generator) -> None:
    seen = Steps()
    for steps, batch in RUNS:
        for width in (3, 48, 257):
            x, added = normal(rng, steps, batch, width), normal(rng, steps, batch, width, scale=3)
            w, scale = normal(rng, width), positive(rng, width if channels else 1, 0.01)
            feeds = {"x": x, "weight": w, "scale": scale}
            y = run("RMSNormQuantize", flavour, feeds, eps=1e-5)["y"]
            seen.add(y, norm.rms_norm_quantize(*torched(x, w, scale), 1e-5))
            out = run("AddRMSNormQuantize", flavour, feeds | {"added": added}, eps=1e-5)
            assert np.array_equal(out["sum"], x + added)
            seen.add(out["y"], norm.rms_norm_quantize(*torched(x + added, w, scale), 1e-5))
    seen.check()


@both
def test_eps_is_inside_the_root(flavour: Flavour) -> None:
    x, w = np.full((1, 1, 8), 1e-4, np.float32), np.ones(8, np.float32)
    feeds = {"x": x, "weight": w, "scale": np.array([1e-5], np.float32)}
    assert run("RMSNormQuantize", flavour, feeds, eps=1e-2)["y"].tolist() == [[[100] * 8]]


@both
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("channels", [False, True])
def test_gated_norm_of_an_int8_gate(
    flavour: Flavour, groups: int, channels: bool, rng: np.random.Generator
) -> None:
    for steps, batch in RUNS:
        x, z, w = normal(rng, steps, batch, 48), int8(rng, steps, batch, 48), normal(rng, 48)
        z_scale = positive(rng, 48 if channels else 1, 0.1)
        feeds = {"x": x, "z": z, "z_scale": z_scale, "weight": w}
        y = run("GatedRMSNormInt8", flavour, feeds, eps=1e-5, groups=groups)["y"]
        close(y, gated_norm.gated_rms_norm_int8(*torched(x, z, z_scale, w), 1e-5, groups))


@both
@pytest.mark.parametrize("n", [1, 8, 12, 20, 36, 80, 1536, 1792])
def test_rotation(flavour: Flavour, n: int, rng: np.random.Generator) -> None:
    slow, fast = factors(n)
    seen = Steps()
    for steps, batch in ((1, 1), (1, 3), (65, 3), (600, 17)) if n < 100 else ((1, 1), (65, 3)):
        x = normal(rng, steps, batch, n)
        x[0, 0, 0] = 500
        feeds = {"x": x, "slow": slow, "fast": fast}
        rotated = hadamard.hadamard(*torched(x, slow.copy(), fast.copy()))
        close(run("Hadamard", flavour, feeds)["y"], rotated)
        for count in (1, n):
            scale = positive(rng, count, 0.03)
            y = run("HadamardQuantize", flavour, feeds | {"scale": scale})["y"]
            seen.add(y, quantize.quantize(rotated, torch.from_numpy(scale)))
    seen.check()


@both
@pytest.mark.parametrize("per_row", [False, True])
def test_embedding(flavour: Flavour, per_row: bool, rng: np.random.Generator) -> None:
    table, scale = int8(rng, 40, 24), positive(rng, 40 if per_row else 1, 0.02)
    for steps, batch in RUNS:
        tokens = rng.integers(0, 40, (steps, batch))
        y = run("EmbedInt8", flavour, {"tokens": tokens, "table": table, "scale": scale})["y"]
        assert np.array_equal(y, embedding.embed_int8(*torched(tokens, table, scale)).numpy())
        assert np.array_equal(y, (table * (scale[:, None] if per_row else scale))[tokens])


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [256, 1536])
def test_a_run_gives_the_bits_of_its_tokens_one_by_one(n: int, rng: np.random.Generator) -> None:
    """This makes greedy speculation equal plain greedy decoding. LinearInt4 in ONNX Runtime does
    not: its sums are fp32, in a different order for one row than for many.
    """
    slow, fast = factors(n)
    x, many, one = normal(rng, 65, 1, n), positive(rng, n, 0.02), positive(rng, 1, 0.02)
    product = {
        "x": int8(rng, 65, 1, n), "x_scale": one, "weight": int8(rng, 96, n),
        "weight_scale": many[:96],
    }  # fmt: skip
    norm = {"x": x, "added": normal(rng, 65, 1, n), "weight": normal(rng, n), "scale": many}
    gated = norm | {"z": int8(rng, 65, 1, n), "z_scale": many}
    for name, feeds, attributes in (
        ("Quantize", {"x": x, "scale": many}, {}),
        ("QuantizeRows", {"x": x}, {}),
        ("SplitQuantizeRows", {"x": x}, {"threshold": 1.5}),
        ("LinearInt8", product, {}),
        ("LinearInt8Quantize", product | {"y_scale": many[:96] * 100}, {}),
        ("LinearInt8Rows", product | {"x_scale": positive(rng, 65, 0.1).reshape(65, 1, 1)}, {}),
        ("RMSNormQuantize", norm, {"eps": 1e-5}),
        ("AddRMSNormQuantize", norm, {"eps": 1e-5}),
        ("GatedRMSNormInt8", gated, {"eps": 1e-5, "groups": 1}),
        ("GatedRMSNormInt8", gated, {"eps": 1e-5, "groups": 4}),
        ("HadamardQuantize", {"x": x, "slow": slow, "fast": fast, "scale": one}, {}),
    ):
        whole = run(name, "ort", feeds, **attributes)
        for start, stop in ((0, 1), (1, 2), (2, 4), (4, 9), (64, 65)):
            part = {k: a[start:stop] if a.shape[0] == 65 else a for k, a in feeds.items()}
            for k, y in run(name, "ort", part, **attributes).items():
                assert np.array_equal(y, whole[k][start:stop]), f"{name}: {k}[{start}:{stop}]"


# -- ONNX's own evaluator --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 24])
def test_standard_bodies_mean_the_same_to_onnx(count: int, rng: np.random.Generator) -> None:
    """A scale of one value is [1] everywhere, where ONNX has a scalar."""
    x, scale = normal(rng, 3, 2, 24), positive(rng, count, 0.02)
    product = {
        "x": int8(rng, 3, 2, 16), "x_scale": positive(rng, 1, 0.02), "weight": int8(rng, 24, 16),
        "weight_scale": scale,
    }  # fmt: skip
    norm = {"x": x, "weight": normal(rng, 24), "scale": scale}
    for name, feeds, attributes in (
        ("Quantize", {"x": x, "scale": scale}, {}),
        ("QuantizeRows", {"x": x}, {}),
        ("SplitQuantizeRows", {"x": x}, {"threshold": 1.5}),
        ("Dequantize", {"x": int8(rng, 3, 2, 24), "scale": scale}, {}),
        ("FakeQuantize", {"x": x, "scale": scale}, {}),
        ("LinearInt8", product, {}),
        ("LinearInt8Quantize", product | {"y_scale": scale * 50}, {}),
        ("RMSNormQuantize", norm, {"eps": 1e-5}),
        ("GatedRMSNormInt8", {"x": x, "z": int8(rng, 3, 2, 24), "z_scale": scale,
                              "weight": normal(rng, 24)}, {"eps": 1e-5, "groups": 2}),
    ):  # fmt: skip
        ordered = {v.name: feeds[v.name] for v in op_of(name).inputs}
        types = [a.dtype for a in ordered.values()]
        model = one_op_model(name, "standard", attributes.items(), types)
        judged = ReferenceEvaluator(model).run(None, ordered)
        found = run(name, "standard", ordered, **attributes)
        for expected, y in zip(judged, found.values(), strict=True):
            assert y.dtype == expected.dtype
            one_step = 1 if y.dtype == np.int8 else 1e-5 * np.abs(expected).max()
            error = np.abs(y.astype(np.float64) - expected.astype(np.float64))
            assert error.max() <= one_step and np.median(error) <= 1e-6 * one_step + 1e-6
