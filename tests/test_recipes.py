"""Recipes: the table of each for a model, and combinations that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    Mamba1Config,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
)
from edge.errors import ExportError
from edge.export.graph import build_graph
from edge.export.quantize.observers import Statistics
from edge.export.quantize.plan import (
    F16,
    F32,
    INT8,
    INT8_ROWS,
    Dynamic,
    ModelPlan,
    Rounding,
    Static,
    Storage,
)
from edge.export.recipes import Choices, mixture, names, plan_model, recipe
from edge.export.recipes.mixture import default_percentile
from edge.tensors import parameters, tensor_shapes
from tests.facts import facts

MAMBA1 = Mamba1Config(d_inner=128, d_state=8, dt_rank=4)
MAMBA2 = Mamba2Config(d_inner=128, d_ssm=128, d_state=16, head_dim=16, n_groups=2)
HYBRID = ModelConfig(
    family="test",
    vocab_size=96,
    d_model=64,
    layers=(
        MAMBA1,
        MAMBA2,
        AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16),
        MlpConfig(d_intermediate=128),
    ),
)


def only(*layers: Any, **fields: Any) -> ModelConfig:
    return HYBRID.model_copy(update={"layers": layers, **fields})


class Flat:
    """Calibration of values that reach `size` in every channel, or the sizes in `channels`."""

    def __init__(self, config: ModelConfig, size: float = 1.27, **channels: Any) -> None:
        self.widths = _widths(config)
        self.size, self.channels = size, channels

    def statistics(self, value: str, rotated: bool = False) -> Statistics:
        name = value.rpartition(".")[2]
        seen = Statistics(value)
        width = self.widths[value]
        seen.channel_absmax = np.full(width, self.size, np.float32)
        if name in self.channels:
            seen.channel_absmax = np.asarray(self.channels[name], np.float32)
        seen.counts[0x3F80] = 1000  # a thousand ones
        return seen


def _widths(config: ModelConfig) -> dict[str, Any]:
    widths: dict[str, Any] = {"final": config.d_model}
    for i, layer in enumerate(config.layers):
        local: dict[str, Any] = {"normed": config.d_model}
        if isinstance(layer, Mamba1Config):
            inner, n = layer.d_inner, layer.d_state
            local |= {"xz": 2 * inner, "conv": inner, "dbc": layer.dt_rank + 2 * n, "dt": inner}
            local |= {"scan": inner, "ssm_states": n}
        elif isinstance(layer, Mamba2Config):
            wide, shares = layer.d_ssm, layer.n_groups * layer.d_state
            local |= {"z": wide, "xBC": layer.conv_channels, "dt": layer.n_heads, "x": wide}
            local |= {"B": shares, "C": shares, "gated": wide, "joined": layer.d_inner}
            local |= {"ssm_states": (layer.n_heads, layer.d_state)}
        elif isinstance(layer, AttentionConfig):
            local |= {"attended_time": layer.n_heads * layer.head_dim}
        else:
            local |= {"gated": layer.d_intermediate}
        widths |= {f"layers.{i}.{name}": width for name, width in local.items()}
    return widths


def ones(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    return {name: np.ones(shape, np.float32) for name, shape in tensor_shapes(config).items()}


def plan(config: ModelConfig, quant: str, flat: Flat | None = None, **choices: Any) -> ModelPlan:
    return plan_model(
        config,
        mixture(config, quant, Choices(**choices)),
        calibration=flat or Flat(config),
        fetch=ones(config).__getitem__,
    )


def static(rounding: Rounding | None) -> list[float]:
    assert rounding is not None and rounding.scale is not None
    return [round(float(scale), 6) for scale in rounding.scale]


def test_quambas_tables_say_what_the_paper_says() -> None:
    table = recipe("w8a8").layers["mamba1"]
    assert {name for name, how in table.items() if how == INT8} == {
        "in_proj", "x_proj", "dt_proj", "out_proj", "conv1d", "A_log", "D", "dt_bias",
    }  # fmt: skip
    assert table["conv"] == Static(clip="percentile") and table["scan"] == Static(rotate=True)
    octav = recipe("w8a8-o").layers["mamba1"]
    assert {octav[n] for n in ("conv", "normed", "xz", "dbc", "dt")} == {Static(clip="octav")}
    assert octav["scan"] == Static(clip="octav", rotate=True)
    assert {recipe("w8a8").layers["mamba1"][n] for n in ("normed", "xz", "dbc", "dt")} == {Static()}
    assert recipe("w8a8").ends == {"embedding": INT8_ROWS, "final": Dynamic(), "head": INT8_ROWS}


def test_rivals_differ_from_quamba_where_they_should() -> None:
    def treated(name: str) -> set[object]:
        tables = (table for kind, table in recipe(name).layers.items() if kind != "experts")
        return {how for table in tables for how in table.values()} - {INT8}

    hows = {
        name: treated(name)
        for name in ("w8a8-static", "w8a8-dynamic", "w8a8-smoothquant", "w8a8-hadamard")
    }
    assert hows["w8a8-static"] == {Static()}
    assert hows["w8a8-dynamic"] == {Dynamic()}
    assert hows["w8a8-smoothquant"] == {Static(), Static(smooth=0.5)}
    assert hows["w8a8-hadamard"] == {Static(), Static(rotate=True)}
    experts = [recipe(name).layers["experts"] for name in (*hows, "w8a8")]
    assert {how for table in experts for how in table.values()} == {Dynamic(), INT8_ROWS}
    assert all(recipe(name).calibrated == (name[:4] in ("w8a8", "w4a8") and name != "w8a8-dynamic")
               for name in names())  # fmt: skip


def test_mamba1_in_w8a8_is_fused_with_one_scale_a_tensor() -> None:
    made = plan(only(MAMBA1), "w8a8").layers[0]
    assert made.scan is not None and made.scan.fused and made.scan.state == "fp32"
    assert made.scan.sites["conv_in"] is made.scan.sites["z"]
    assert made.products["x_proj"].input is made.scan.sites["x"]
    assert made.products["dt_proj"].input is made.scan.sites["B"] is made.scan.sites["C"]
    assert made.scan.constants == {"conv1d", "A_log", "D", "dt_bias"}
    assert static(made.scan.sites["z"]) == [0.01]
    assert static(made.scan.sites["x"])[0] < 0.0099  # clipped to the thousand ones
    out = made.products["out_proj"]
    assert out.weight == INT8 and out.input is not None and out.input.rotate


def test_mamba2_has_a_scale_for_each_of_x_b_and_c() -> None:
    xbc = np.repeat([1.27, 2.54, 3.81], [128, 32, 32])
    flat = Flat(only(MAMBA2), xBC=xbc, B=np.full(32, 0.127))
    scan = plan(only(MAMBA2), "w8a8", flat).layers[0].scan
    assert scan is not None and scan.fused
    assert sorted(set(static(scan.sites["conv_in"]))) == [0.01, 0.02, 0.03]
    assert static(scan.sites["B"]) == [0.001] and static(scan.sites["C"]) == [0.01]


def test_groups_are_vectors_of_scales() -> None:
    x = np.repeat([0.127, 1.27], 64)
    b = np.repeat([0.254, 1.27], 16)
    flat = Flat(only(MAMBA2), x=x, B=b)
    for quant, choices in (("w4a8", {}), ("w8a8", {"groups": True})):
        scan = plan(only(MAMBA2), quant, flat, **choices).layers[0].scan
        assert scan is not None and scan.fused
        assert static(scan.sites["x"]) == [0.001] * 64 + [0.01] * 64
        assert static(scan.sites["B"]) == [0.002] * 16 + [0.01] * 16


def test_channels_with_outliers_stay_floating_in_attention_and_mlp() -> None:
    normed = np.full(64, 1.27)
    normed[[3, 9]] = 4.0, 60.0  # one reaches 6, both three times the median
    made = plan(HYBRID, "w8a8", Flat(HYBRID, normed=normed))
    qkv = made.layers[2].products["qkv_proj"]
    assert qkv.outliers == (3, 9) and qkv.weight == INT8_ROWS and static(qkv.input) == [0.01]
    assert made.layers[0].products["in_proj"].outliers == ()
    assert static(made.layers[0].products["in_proj"].input) == [round(60 / 127, 6)]
    assert made.record["layers.2.normed"]["floating_columns"] == 2
    many = plan(HYBRID, "w8a8", Flat(HYBRID, normed=np.arange(64) + 6.0))
    assert many.layers[3].products["gate_up_proj"].outliers == (60, 61, 62, 63)


def test_smoothing_shares_the_range_between_input_and_weight() -> None:
    normed = np.full(64, 1.0)
    normed[5] = 100.0
    product = plan(only(MAMBA1), "w8a8-smoothquant", Flat(only(MAMBA1), normed=normed)).layers[0]
    scale = np.array(static(product.products["in_proj"].input))
    # weights are ones: divisors are the roots of the ranges, and x / divisor reaches 10
    assert scale[5] == pytest.approx(100 / 127, rel=1e-4)
    assert scale[0] == pytest.approx(10 / 127, rel=1e-4)


def test_dynamic_and_rotated_scans_run_on_rounded_floats() -> None:
    for quant in ("w8a8-dynamic", "w8a8-hadamard"):
        for config in (only(MAMBA1), only(MAMBA2)):
            scan = plan(config, quant).layers[0].scan
            assert scan is not None and not scan.fused and len(scan.sites) == 6
    rows = plan(only(MAMBA1), "w8a8-dynamic")
    assert rows.head.input == Rounding(None) and rows.record == {}
    assert rows.layers[0].products["in_proj"].input == Rounding(None)


def test_odd_layers_are_not_fused() -> None:
    biased = MAMBA2.model_copy(update={"proj_bias": True})
    partly = MAMBA2.model_copy(update={"d_inner": 160})
    for layer, reason in ((biased, "biases"), (partly, "MLP")):
        scan = plan(only(layer), "w8a8").layers[0].scan
        assert scan is not None and not scan.fused
        with pytest.raises(ExportError, match=rf"layers\.0 cannot .* in int8: .*{reason}"):
            plan(only(layer), "w8a8", ssm_state="int8")


def test_the_state_of_gated_deltanet_is_fp32() -> None:
    layer = GatedDeltaNetConfig(n_heads=4, head_dim=16, n_groups=2, d_state=8)
    for kind in ("fp16", "int8"):
        with pytest.raises(ExportError, match=facts(f"{kind}: ", "Gated DeltaNet", "fp32")):
            plan(only(layer), "w8", Flat(HYBRID), ssm_state=kind)


def test_a_width_without_a_hadamard_matrix_is_rotated_in_blocks_and_recorded() -> None:
    odd = only(MAMBA1.model_copy(update={"d_inner": 72}))
    assert plan(odd, "w8a8").record["layers.0.scan"]["rotation_blocks"] == 9
    assert "rotation_blocks" not in plan(only(MAMBA1), "w8a8").record["layers.0.scan"]


def test_blocks_of_four_bits_fit_the_matrix() -> None:
    small = HYBRID.model_copy(update={"d_model": 96})
    layers = plan(small, "w4a16").layers
    assert layers[0].products["in_proj"].weight == Storage(4, 32, minimum=True)
    assert layers[0].products["out_proj"].weight == Storage(4, 128, minimum=True)
    assert layers[0].products["x_proj"].weight == Storage(8, 128)
    assert layers[0].products["dt_proj"].weight == F16
    odd = plan(HYBRID.model_copy(update={"d_model": 40}), "w4a8").layers
    assert odd[0].products["in_proj"].weight == INT8
    assert plan(HYBRID.model_copy(update={"d_model": 40}), "w4a16").head.weight == F32


def test_the_percentile_follows_the_models_size() -> None:
    def mamba(width: int, layers: int) -> ModelConfig:
        layer = Mamba1Config(d_inner=2 * width, dt_rank=width // 16)
        return ModelConfig(
            family="mamba", vocab_size=50280, d_model=width, layers=(layer,) * layers
        )

    sizes = {(768, 24): 99.999, (1024, 48): 99.999, (2048, 48): 99.99, (2560, 64): 99.9}
    for shape, p in sizes.items():
        assert default_percentile(mamba(*shape)) == p
    assert mixture(HYBRID, "w8a8", Choices(percentile=99.0)).percentile == 99.0


def test_an_int8_state_has_a_scale_a_state_and_head() -> None:
    made = plan(HYBRID, "w8a8", ssm_state="int8")
    shapes = [layer.scan.state_scale.shape for layer in made.layers
              if layer.scan is not None and layer.scan.state_scale is not None]  # fmt: skip
    assert shapes == [(8, 1), (8, 1, 16)]


def test_recipes_mix_by_kind_of_layer() -> None:
    layers = {"attention": "fp16", "mlp": "w4a16", "mamba1": "w8a8-dynamic"}
    mixed = mixture(HYBRID, "w8a8", Choices(layers=layers))
    made = plan(HYBRID, "w8a8", layers=layers)
    assert mixed.name == made.recipe == "w8a8,mamba1=w8a8-dynamic,attention=fp16,mlp=w4a16"
    assert made.layers[2].products["qkv_proj"].weight == F16
    assert made.layers[3].products["down_proj"].weight == Storage(4, 128, minimum=True)
    assert made.layers[1].scan is not None and made.layers[1].scan.fused
    assert mixed.choices() == {"percentile": 99.999, "layers": layers, "kv_cache": "fp16"}


@pytest.mark.parametrize(("quant", "choices", "message"), [
    ("w9", {}, "no quantization recipe is called 'w9'"),
    ("w8a8", {"layers": {"mlp": "w9"}}, "no quantization recipe is called 'w9'"),
    ("w8a8", {"layers": {"moe": "fp16"}}, "unknown kind"),
    ("w8a8", {"layers": {"mamba2": "fp16"}}, "no layer is of kind 'mamba2'"),
    ("w8a8", {"groups": True}, "groups need static scales"),
    ("w8a8-static", {"percentile": 99.9}, "clips nothing by a percentile"),
    ("w8a8", {"percentile": 0.0}, "is not a percentile"),
    ("fp16", {"head": "int8"}, "no int8 activations"),
    ("w8a8", {"head": "int8", "embedding": "fp16"}, "is tied to the embedding"),
    ("w8", {"ssm_state": "int8"}, "in int8: .*scan floating"),
    ("w8a8-hadamard", {"ssm_state": "fp16"}, "rotates values of the scan"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(quant: str, choices: dict[str, Any], message: str) -> None:
    config = only(MAMBA1, HYBRID.layers[2], HYBRID.layers[3])
    with pytest.raises(ExportError, match=message):
        plan(config, quant, **choices)


def test_a_state_needs_its_kind_of_layer() -> None:
    with pytest.raises(ExportError, match="has no Mamba layer"):
        plan(only(*HYBRID.layers[2:]), "w8a8", ssm_state="int8")
    with pytest.raises(ExportError, match="has no attention"):
        plan(only(MAMBA1), "w8", kv_cache="fp16")


def test_keys_and_values_are_fp16_where_something_is_rounded() -> None:
    for quant, chosen, kept in (
        ("fp32", None, "fp32"), ("fp32", "fp16", "fp16"), ("w8", None, "fp16"),
        ("w8", "fp32", "fp32"),
    ):  # fmt: skip
        made = plan(only(HYBRID.layers[2]), quant, kv_cache=chosen)
        assert [layer.cache for layer in made.layers] == [kept]


@pytest.mark.parametrize("size", [0.0, float("nan")])
def test_scales_that_say_nothing_are_refused(size: float) -> None:
    with pytest.raises(ExportError, match=r"layers\.0\.xz: has a scale of (0|nan)"):
        plan(only(MAMBA1), "w8a8", Flat(only(MAMBA1), xz=np.full(256, size)))


def test_choices_that_do_not_fit_are_refused_together() -> None:
    choices = Choices(layers={"moe": "fp16"}, percentile=0.0, head="fp16", groups=True)
    with pytest.raises(ExportError) as caught:
        mixture(HYBRID, "w8", choices)
    text = str(caught.value)
    assert caught.value.field == "layers" and "unknown kind" in text
    assert all(f"; {field}: " in text for field in ("groups", "head", "percentile"))


def test_the_ends_can_stay_wide() -> None:
    tied = plan(HYBRID, "w8a8", embedding="fp16")
    assert tied.embedding == tied.head.weight == F16 and tied.head.input is None
    untied = HYBRID.model_copy(update={"tie_embeddings": False})
    made = plan(untied, "w8a8", head="fp16")
    assert made.embedding == INT8_ROWS and made.head.weight == F16


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_w8a8_takes_little_more_than_a_quarter_of_fp32(kind: str, tmp_path: Any) -> None:
    """At the 130M shape; the weights repeat a few random numbers, which no size depends on."""
    layer: Any = Mamba1Config(d_inner=1536, dt_rank=48)
    if kind == "mamba2":
        layer = Mamba2Config(d_inner=1536, d_ssm=1536)
    config = ModelConfig(family=kind, vocab_size=50280, d_model=768, layers=(layer,) * 24)
    assert parameters(config) > 100e6
    few = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    shapes = tensor_shapes(config)

    class Repeating:
        def __getitem__(self, name: str) -> NDArray[np.float32]:
            return np.resize(few, shapes[name])

    made = plan_model(config, mixture(config, "w8a8"), calibration=Flat(config))
    built = build_graph(config, Repeating(), tmp_path, made)
    size = built.weight_bytes + built.graph.stat().st_size
    built.weights.unlink()
    assert size <= 0.28 * 4 * parameters(config)
