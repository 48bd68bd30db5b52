"""The published config.json of popular models: read as the right model, or refused.

The files have the content that public sources give. The number of parameters on model cards checks
that every size is read as intended.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.errors import CheckpointError
from edge.export.checkpoint import FAMILIES, find_layout
from edge.export.checkpoint.fields import Fields, read_json
from edge.export.checkpoint.layout import Layout
from edge.tensors import parameters

FOLDER = Path(__file__).parent / "published"
# family, layers, parameters, context
READ: dict[str, tuple[str, int, int, int | None]] = {
    "bamba-9b-v1": ("bamba", 64, 9_780_235_392, 262144),
    # the norm that both mixers of a block read is counted twice here
    "falcon-h1-0.5b-base": ("falcon_h1", 108, 521_411_104 + 36 * 1024, 16384),
    "falcon-h1-tiny-90m-instruct": ("falcon_h1", 72, 91_131_072 + 24 * 512, 262144),
    # and the norms of dt, B and C are stored
    "falcon-mamba-7b": ("falcon_mamba", 64, 7_272_665_088 + 64 * (256 + 32), None),
    # the fields that public code reads; the multipliers of the second and third are left out
    "granite-4.0-h-350m": ("granitemoehybrid", 64, 340_332_224, 32768),
    "granite-4.0-h-1b": ("granitemoehybrid", 80, 1_461_538_368, 131072),
    "granite-4.0-h-tiny": ("granitemoehybrid", 120, 6_939_037_248 + 40 * 1536, 131072),
    # here too, where experts and their shared MLP read it
    "granite-4.0-h-small": ("granitemoehybrid", 120, 32_207_337_984 + 40 * 4096, 131072),
    # whose windows are 512 tokens
    "gemma-2b": ("gemma", 36, 2_506_172_416, 8192),
    "gemma-2-2b": ("gemma2", 52, 2_614_341_888, 8192),
    "gemma-2-9b-it": ("gemma2", 84, 9_241_705_984, 8192),
    "gemma-3-1b-it": ("gemma3_text", 52, 999_885_952, 32768),
    "gemma-3-270m": ("gemma3_text", 36, 268_098_176, 32768),
    "granite-3.1-3b-a800m-instruct": ("granitemoe", 64, 3_298_793_472, 131072),
    "granite-3.3-8b-instruct": ("granite", 80, 8_170_864_640, 131072),
    "jamba-v0.1": ("jamba", 64, 51_570_323_328, 262144),
    # other sources do not count the router's biases
    "lfm2-8b-a1b": ("lfm2_moe", 48, 8_339_929_856 + 22 * 32, 128000),
    "lfm2-350m": ("lfm2", 32, 354_483_968, 128000),
    # with the defaults of transformers' class
    "lfm3-1.7b": ("lfm3", 48, 1_728_801_536, 128000),
    "llama-2-7b": ("llama", 64, 6_738_415_616, 4096),
    "llama-3.1-8b": ("llama", 64, 8_030_261_248, 131072),
    "llama-3.2-1b": ("llama", 32, 1_235_814_400, 131072),
    "mamba-130m": ("mamba", 24, 129_135_360, None),
    "mamba-130m-hf": ("mamba", 24, 129_135_360, None),
    "mamba-2.8b-slimpj": ("mamba", 64, 2_768_345_600, None),
    "mamba-codestral-7b": ("mamba2", 64, 7_285_403_648, None),
    "mamba2-130m": ("mamba2", 24, 128_989_632, None),
    "mamba2attn-2.7b": ("mamba2", 64, 2_697_590_880, None),
    "mambabyte-code": ("mambabyte", 53, 353_628_160, None),
    "mistral-7b-v0.1": ("mistral", 64, 7_241_732_096, 32768),
    "mixtral-8x7b-v0.1": ("mixtral", 64, 46_702_792_704, 32768),
    # here too: the norm before experts is also counted twice
    "nemotron-3-nano-30b-a3b": ("nemotron_h", 75, 31_577_937_344 + 23 * 2816, 262144),
    "nemotron-nano-9b-v2": ("nemotron_h", 56, 8_888_227_328, 131072),
    "olmo-2-1b": ("olmo2", 32, 1_484_916_736, 4096),
    "olmo-3-7b": ("olmo3", 64, 7_298_011_136, 65536),
    # 4096 positions were trained before LongRoPE; the other has a sliding window
    "phi-3-mini-4k-instruct": ("phi3", 64, 3_821_079_552, 4096),
    "phi-4-mini-instruct": ("phi3", 64, 3_836_021_760, 4096),
    "pythia-160m": ("gpt_neox", 24, 162_322_944, 2048),
    "qwen1.5-moe-a2.7b": ("qwen2_moe", 72, 14_315_784_192 + 24 * 2048, 8192),
    "qwen2.5-0.5b-instruct": ("qwen2", 48, 494_032_768, 32768),
    "qwen3-0.6b": ("qwen3", 56, 596_049_920, 40960),
    "qwen3-30b-a3b": ("qwen3_moe", 96, 30_532_122_624, 40960),
    "qwen3-next-80b-a3b-instruct": ("qwen3_next", 144, 79_674_391_296 + 48 * 2048, 262144),
    "qwen3.5-0.8b": ("qwen3_5", 48, 752_393_024, 262144),
    # expert sizes are the defaults of transformers' class
    "qwen3.5-35b-a3b": ("qwen3_5_moe", 120, 34_660_610_688 + 40 * 2048, 262144),
    "qwen3.5-4b": ("qwen3_5", 64, 4_205_751_296, 262144),
    "smollm2-135m-instruct": ("llama", 60, 134_515_008, 8192),
    "smollm3-3b": ("smollm3", 72, 3_075_098_624, 65536),
    # 13 uses of one block, each with the following matrix multiplied in; two heads beside zeros
    "zamba-7b-v1": (
        "zamba", 102,
        7_232_490_496 + 12 * 358_263_680 - 13 * 3712**2 + 76 * (528 * 3712 + 7424 * 232), 4096,
    ),
    # six uses of one block have a sixth each of its adapters, and six copies of the rest
    "zamba2-1.2b": ("zamba2", 50, 1_702_158_976, 4096),
}  # fmt: skip
# field, and part of the message
REFUSED: dict[str, tuple[str, str]] = {
    "qwen2.5-0.5b-instruct-gptq-int4": ("quantization_config", "are already quantized"),
    "zamba2-7b": ("use_shared_block_lora", "Zyphra's fork of transformers"),
}


def layout_of(name: str) -> tuple[str, Layout, list[str]]:
    file = FOLDER / f"{name}.json"
    fields = Fields(file, read_json(file))
    family, layout = find_layout(fields)
    return family, layout, fields.unknown


def test_every_file_and_every_family_is_tried() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == READ.keys() | REFUSED.keys()
    tried = {family for family, *_ in READ.values()}
    # mamba_in_llama is two files; for the others no published file was available
    untried = {"arcee", "granitemoeshared", "mamba_in_llama", "mistral_mamba", "olmo_hybrid"}
    assert {family.name for family in FAMILIES} - tried <= untried


@pytest.mark.parametrize("name", READ)
def test_a_model_is_read(name: str) -> None:
    family, layout, unknown = layout_of(name)
    config = layout.config
    assert (family, len(config.layers), parameters(config), config.max_context) == READ[name]
    assert not unknown


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        layout_of(name)
    field, message = REFUSED[name]
    assert caught.value.field == field and message in caught.value.message
    assert caught.value.remedy


def test_what_steers_the_models_is_read() -> None:
    """Fields that do not affect the number of parameters."""
    _, mamba, _ = layout_of("falcon-mamba-7b")
    assert mamba.config.layers[0].model_dump()["inner_eps"] == 1e-6
    _, smollm3, _ = layout_of("smollm3-3b")
    turned = [layer.rotation is not None for layer in smollm3.config.layers[::2]]
    assert turned == [True, True, True, False] * 9
    _, nemotron, _ = layout_of("nemotron-nano-9b-v2")
    kinds = [layer.kind for layer in nemotron.config.layers]
    assert [kinds.count(kind) for kind in ("mamba2", "attention", "mlp")] == [27, 4, 25]
    _, falcon, _ = layout_of("falcon-h1-0.5b-base")
    assert falcon.pieces["layers.0.in_proj.weight"].factors[0] == (0, 3352, 1.25)
    _, olmo, _ = layout_of("olmo-3-7b")
    scaled = [layer.rotation.scaling is not None for layer in olmo.config.layers[::2]]
    assert scaled == [False, False, False, True] * 8
    _, gemma, _ = layout_of("gemma-3-1b-it")
    bases = [layer.rotation.theta for layer in gemma.config.layers[::2]]
    assert bases == ([1e4] * 5 + [1e6]) * 4 + [1e4] * 2
    _, granite, _ = layout_of("granite-3.3-8b-instruct")
    assert granite.pieces["layers.0.q_proj.weight"].factors == ((0, 4096, 0.0078125 * 128**0.5),)
    assert granite.pieces["norm_f.weight"].factors == ((0, 4096, 1 / 16 / 12),)
