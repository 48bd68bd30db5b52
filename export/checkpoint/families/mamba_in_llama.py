"""The Mamba in the Llama: a Llama (or kin) some of whose attention layers are Mamba-2.

Source: jxiw/MambaInLlama 60d64dc, mamba2/hybrid_mamba_layer.py and hybrid_wrapper.py. A folder has
the Transformer's own config.json, and mamba_config.json beside it. Heads that shared a key and a
value share B and x, which are stored once. The gated norm's epsilon is 1e-5 in that code and the
model's own here; published models have 1e-5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge.config import AttentionConfig, Mamba2Config, ModelConfig
from edge.export.checkpoint import families
from edge.export.checkpoint.family import UNSUPPORTED, Family
from edge.export.checkpoint.fields import Fields, read_json
from edge.export.checkpoint.layout import Layout, TensorPlace
from edge.mixers.base import MixerConfig

NAME = "mamba_in_llama"
CONFIG = "mamba_config.json"
D_CONV = 4
_REMEDY = "do config.json and mamba_config.json come from the same model?"


def claims(fields: Fields) -> bool:
    return (fields.file.parent / CONFIG).is_file()


def read(fields: Fields) -> Layout:
    """Config and tensor places; raises CheckpointError for a bad field of either file."""
    base = next((f for f in families.every() if f.name != NAME and f.claims(fields)), None)
    if base is None:
        named = str(fields.values.get("model_type"))[:80]
        fields.stop("model_type", f"{named!r} is no Transformer that is read here", UNSUPPORTED)
    whole = base.read(fields)
    fields.check()
    file = fields.file.parent / CONFIG
    own = Fields(file, read_json(file))
    return replace_attention(whole, _replaced(own, whole.config))


def _replaced(own: Fields, config: ModelConfig) -> list[int]:
    """The blocks without attention, once the file is known to describe these."""
    blocks = len(config.layers) // 2
    attention = own.indices("attn_layers", blocks)
    heads = config.layers[0]
    if not isinstance(heads, AttentionConfig):
        own.stop("attn_layers", f"the layers of {config.family} are no attention", UNSUPPORTED)
    ssm = own.section("ssm_cfg")
    if "ngroups" not in ssm:
        ssm.stop("ngroups", "is missing: its layers are Mamba-1, which is not read", UNSUPPORTED)
    inner = heads.n_heads * heads.head_dim
    sizes = {
        "d_model": config.d_model, "n_layer": blocks, "d_inner": inner,
        "d_xb": heads.n_kv_heads * heads.head_dim,
    }  # fmt: skip
    for name, size in sizes.items():
        _expect(own, name, size, own.integer(name, size))
    _expect(ssm, "ngroups", heads.n_heads, ssm.integer("ngroups"))
    _expect(ssm, "d_state", heads.head_dim, ssm.integer("d_state", 128))
    _expect(ssm, "d_conv", D_CONV, ssm.integer("d_conv", D_CONV))
    for name in ("D_has_hdim", "repeat_kv_before_conv", "bias", "norm_before_gate"):
        ssm.demand(name, False, UNSUPPORTED)
    for name in ("rmsnorm", "conv_bias"):
        ssm.demand(name, True, UNSUPPORTED)
    own.check()
    return [block for block in range(blocks) if block not in attention]


def _expect(fields: Fields, name: str, expected: int, found: int) -> None:
    if found != expected:
        fields.inconsistent(name, f"is {found}, config.json makes it {expected}", _REMEDY)


def mixer_for(attention: AttentionConfig) -> Mamba2Config:
    """The SSM in an attention layer's place: a head for a head, whose state is as wide as a key.

    Every head has B and C of its own here; those that share them hold the same numbers.
    """
    inner = attention.n_heads * attention.head_dim
    return Mamba2Config(
        d_inner=inner,
        d_ssm=inner,
        d_state=attention.head_dim,
        d_conv=D_CONV,
        head_dim=attention.head_dim,
        n_groups=attention.n_heads,
    )


def hybrid_config(config: ModelConfig, replaced: Sequence[int]) -> ModelConfig:
    """The Transformer with the attention of some blocks replaced; itself where none is."""
    if not replaced:
        return config
    layers: list[MixerConfig] = list(config.layers)
    for block in replaced:
        attention = layers[2 * block]
        assert isinstance(attention, AttentionConfig)
        layers[2 * block] = mixer_for(attention)
    keeps = any(layer.attends for layer in layers)
    context = config.max_context if keeps else None
    return config.model_copy(
        update={"family": NAME, "layers": tuple(layers), "max_context": context}
    )


def replace_attention(whole: Layout, replaced: Sequence[int]) -> Layout:
    """A Transformer's places, with those of the SSMs in the places of some attention layers."""
    config = hybrid_config(whole.config, replaced)
    layout = replace(whole, config=config, pieces={})
    for block in replaced:
        attention = whole.config.layers[2 * block]
        mixer = config.layers[2 * block]
        assert isinstance(attention, AttentionConfig) and isinstance(mixer, Mamba2Config)
        norm = whole.pieces[f"layers.{2 * block}.norm.weight"].source.removesuffix(".weight")
        layout.place_layer(
            2 * block,
            norm=norm,
            mixer=f"{norm.rpartition('.')[0]}.mamba",
            rename={"gated_norm": "norm"},
        )
        for module, rows in grouped_rows(mixer, attention.n_kv_heads).items():
            for kind in layout.kinds(f"layers.{2 * block}.{module}"):
                name = f"layers.{2 * block}.{module}.{kind}"
                place = layout.pieces[name]
                shape = (max(rows) + 1, *place.source_shape[1:])
                layout.pieces[name] = replace(place, source_shape=shape, rows=rows)
    kept: dict[str, TensorPlace] = {
        name: place
        for name, place in whole.pieces.items()
        if name not in layout.pieces and not _of_mixer(name, replaced)
    }
    layout.pieces |= kept
    return layout


def _of_mixer(name: str, replaced: Sequence[int]) -> bool:
    parts = name.split(".")
    return parts[0] == "layers" and int(parts[1]) in {2 * block for block in replaced}


def grouped_rows(mixer: Mamba2Config, kv_heads: int) -> dict[str, tuple[int, ...]]:
    """Which stored row each row of in_proj and of conv1d is: B's and x's are stored a KV head."""
    inner, dim = mixer.d_inner, mixer.head_dim
    narrow, group = kv_heads * dim, mixer.n_heads // kv_heads
    shared = [head // group * dim + at for head in range(mixer.n_heads) for at in range(dim)]
    own = list(range(inner))

    def after(start: int, rows: Sequence[int]) -> list[int]:
        return [start + row for row in rows]

    convolved = [*shared, *after(narrow, shared), *after(2 * narrow, own)]
    dt = after(2 * inner + 2 * narrow, range(mixer.n_heads))
    return {
        "in_proj": (*own, *after(inner, convolved), *dt),
        "conv1d": tuple(convolved),
    }


def mamba_config(config: ModelConfig, kv_heads: int, d_intermediate: int) -> dict[str, object]:
    """mamba_config.json of a hybrid."""
    mixers = config.layers[::2]
    mixer = next(m for m in mixers if isinstance(m, Mamba2Config))
    return {
        "d_model": config.d_model,
        "ssm_cfg": {"expand": 1, "ngroups": mixer.n_heads, "d_state": mixer.d_state},
        "rms_norm_eps": config.norm.eps,
        "vocab_size": None,
        "d_inner": mixer.d_inner,
        "d_xb": kv_heads * mixer.head_dim,
        "intermediate_size": d_intermediate,
        "hidden_act": "silu",
        "n_layer": len(mixers),
        "attn_layers": [block for block, m in enumerate(mixers) if m.attends],
    }


FAMILY = Family(NAME, f"{CONFIG} beside a Transformer's config.json", claims, read, first=True)
