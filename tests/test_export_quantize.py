"""Rounding to blocks, and the weights that each recipe rounds."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from edge.config import Mamba1Config, ModelConfig
from edge.errors import ExportError
from edge.export.quantize.plan import F16, F32, Storage, fitting
from edge.export.quantize.weights import (
    dequantize_blocks,
    dequantize_int8,
    on_a_grid,
    on_an_8_bit_grid,
    quantize_blocks,
    quantize_int8,
    quantize_minimum,
    round_int8,
)
from edge.export.recipes import Recipe, names, plan_model, recipe, register


@pytest.mark.parametrize(("bits", "block"), [(8, 128), (8, 32), (4, 32)])
def test_values_on_the_grid_come_back_exactly(bits: int, block: int) -> None:
    rng = np.random.default_rng(0)
    high = 127 if bits == 8 else 7
    grid = rng.integers(-high, high + 1, (6, 256)).astype(np.float32)
    grid[:, ::block] = high if bits == 8 else -8
    weight = grid * np.float32(0.25)
    packed, scales = quantize_blocks(weight, bits, block)
    assert packed.shape == (6, 256 // block, block * bits // 8) and packed.dtype == np.uint8
    assert np.array_equal(dequantize_blocks(packed, scales, bits), weight)


def test_eight_bits_err_by_half_a_step() -> None:
    weight = np.random.default_rng(1).standard_normal((32, 512)).astype(np.float32)
    packed, scales = quantize_blocks(weight, 8, 128)
    error = np.abs(dequantize_blocks(packed, scales, 8) - weight).reshape(32, 4, 128)
    assert (error <= 0.5001 * scales[..., None]).all()


def test_four_bits_beat_plain_rounding() -> None:
    weight = np.random.default_rng(2).standard_normal((64, 512)).astype(np.float32)
    blocks = weight.reshape(64, -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / 7
    plain = np.rint(blocks / scale) * scale - blocks
    packed, scales = quantize_blocks(weight, 4, 32)
    ours = dequantize_blocks(packed, scales, 4) - weight
    assert np.square(ours).mean() < 0.85 * np.square(plain).mean()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_blocks_of_a_gguf_file_stay_as_they_are(kind: str) -> None:
    random = np.random.default_rng(4)
    wide = random.standard_normal((300, 192)).astype(np.float32) + np.float32(0.3)
    kept = getattr(gguf.GGMLQuantizationType, kind)
    weight = gguf.quants.dequantize(gguf.quants.quantize(wide, kept), kept)
    packed, scales, minimums = quantize_minimum(weight, 32)
    assert scales.dtype == minimums.dtype == np.float16 and packed.shape == (300, 6, 16)
    assert on_a_grid(weight) and not on_a_grid(wide)
    back = dequantize_blocks(packed, scales, 4, minimums)
    # Q4_1 keeps the file's numbers; Q4_0 has no minimum, and fp16 rounds the one it gets
    atol = 0 if kind == "Q4_1" else 5e-3 * float(scales.mean())
    np.testing.assert_allclose(back, weight, rtol=0 if atol else 1e-6, atol=atol)


def test_blocks_of_a_q8_0_file_stay_as_they_are() -> None:
    wide = np.random.default_rng(4).standard_normal((300, 192)).astype(np.float32)
    wide[7, 32:64] = 0
    kept = gguf.GGMLQuantizationType.Q8_0
    weight = gguf.quants.dequantize(gguf.quants.quantize(wide, kept), kept)
    assert on_an_8_bit_grid(weight) and not on_an_8_bit_grid(wide)
    back = dequantize_blocks(*quantize_blocks(weight, 8, 32), 8)
    np.testing.assert_array_equal(back, weight)
    again = dequantize_blocks(*quantize_blocks(weight, 8, 64), 8)
    assert np.abs(again - weight).max() > 1e-3, "larger blocks round a second time"


def test_a_minimum_halves_the_error_of_weights_of_one_side() -> None:
    weight = np.random.default_rng(5).standard_normal((64, 512)).astype(np.float32)
    for moved, most in ((weight, 0.85), (weight + 1, 0.5)):
        plain = np.square(dequantize_blocks(*quantize_blocks(moved, 4, 32), 4) - moved).mean()
        packed, scales, minimums = quantize_minimum(moved, 32)
        ours = dequantize_blocks(packed, scales, 4, minimums) - moved
        assert np.square(ours).mean() < most * plain
    # columns with ten times the weight lose less, whatever the others lose
    counts = np.where(np.arange(512) % 4, 1, 10).astype(np.float32)
    packed, scales, minimums = quantize_minimum(moved, 32, counts)
    uneven = dequantize_blocks(packed, scales, 4, minimums) - moved
    assert np.square(uneven[:, ::4]).mean() < 0.9 * np.square(ours[:, ::4]).mean()


def test_scales_that_fp16_cannot_hold_stay_fp32() -> None:
    random = np.random.default_rng(6)
    weight = random.standard_normal((8, 64)).astype(np.float32)
    for size in (1e-6, 1e6):
        packed, scales, minimums = quantize_minimum(weight * np.float32(size), 32)
        assert scales.dtype == minimums.dtype == np.float32
        back = dequantize_blocks(packed, scales, 4, minimums) / np.float32(size)
        assert np.abs(back - weight).max() < 0.2
    weight[3] = 0
    weight[4] = 1e-41
    back = dequantize_blocks(*(found := quantize_minimum(weight, 32))[:2], 4, found[2])
    assert not back[3].any() and np.abs(back[4]).max() <= 1e-7


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_tiny_values_stay_finite(bits: int) -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[1] = 1e-41
    packed, scales = quantize_blocks(weight, bits, 32)
    back = dequantize_blocks(packed, scales, bits)
    assert not back[0].any() and np.abs(back).max() <= 2e-41


def test_the_slab_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(3).standard_normal((50, 64)).astype(np.float32)
    whole = quantize_blocks(weight, 4, 32)
    monkeypatch.setattr("edge.export.quantize.weights.SLAB_ELEMENTS", 64 * 7)
    slabs = quantize_blocks(weight, 4, 32)
    assert all(np.array_equal(a, b) for a, b in zip(whole, slabs, strict=True))


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(ExportError, match="do not divide"):
        quantize_blocks(np.zeros((2, 48), np.float32), 8, 32)
    with pytest.raises(ExportError, match="NaN or infinite"):
        quantize_blocks(np.full((2, 32), np.inf, np.float32), 8, 32)
    with pytest.raises(ExportError, match="do not divide"):
        quantize_minimum(np.zeros((2, 48), np.float32), 32)
    with pytest.raises(ExportError, match="NaN or infinite"):
        quantize_minimum(np.full((2, 32), np.nan, np.float32), 32)


def test_recipes_spare_what_is_sensitive() -> None:
    mamba = ModelConfig(
        family="test",
        vocab_size=50280,
        d_model=768,
        layers=(Mamba1Config(d_inner=1536, dt_rank=48),),
    )
    w8, w4, fp16 = (plan_model(mamba, recipe(name)) for name in ("w8", "w4", "fp16"))
    assert w8.embedding == w8.head.weight == w4.embedding == w4.head.weight == Storage(8, 128)
    kept = {name: product.weight for name, product in w8.layers[0].products.items()}
    assert kept == {"in_proj": Storage(8, 128), "x_proj": Storage(8, 128), "dt_proj": F32,
                    "out_proj": Storage(8, 128)}  # fmt: skip
    kept = {name: product.weight for name, product in w4.layers[0].products.items()}
    four = Storage(4, 32, minimum=True)
    assert kept == {"in_proj": four, "x_proj": Storage(8, 128), "dt_proj": F16, "out_proj": four}
    assert fitting(Storage(4, 128, minimum=True), 96) == four
    assert fp16.layers[0].products["dt_proj"].weight == F32
    assert fitting(Storage(8, 128), 96) == Storage(8, 32) and fitting(Storage(8, 128), 40) == F32


def test_recipes_are_named_and_unique() -> None:
    assert list(names())[:4] == ["fp32", "fp16", "w8", "w4"]
    with pytest.raises(ExportError, match="choose one of: fp32, fp16, w8, w4"):
        recipe("int3")
    with pytest.raises(ValueError, match="already registered"):
        register(Recipe("w8", 8, 128, {}, {}))


def test_int8_is_symmetric_and_rounds_half_to_even() -> None:
    weight = np.array([[254.0, -254.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    quants, scale = quantize_int8(weight)
    assert scale.tolist() == [2.0]
    assert quants.tolist() == [[127, -127, 0, 2], [0, 0, 0, 0]]
    quants, scale = quantize_int8(weight, rows=True)
    assert scale.tolist() == [2.0, 1.0]
    assert np.array_equal(dequantize_int8(quants, scale, rows=True)[1], weight[1])
    assert round_int8(np.array([1e9, -1e9], np.float32), np.float32(1)).tolist() == [127, -128]
    with pytest.raises(ExportError, match="NaN or infinite"):
        quantize_int8(np.array([[1.0, np.nan]], np.float32))
