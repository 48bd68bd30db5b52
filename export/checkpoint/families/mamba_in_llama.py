"""The Mamba in the Llama: a Llama or relative with Mamba or Mamba-2 for some attention layers.

Source: jxiw/MambaInLlama 60d64dc, mamba/ and mamba2/hybrid_mamba_layer.py and hybrid_wrapper.py. A
folder has the Transformer's config.json, and mamba_config.json next to it. Heads that shared a key
and a value share B and x, which are stored once. The gated norm's epsilon is 1e-5 in that code, and
the model's here; published models have 1e-5.

In the code for Mamba a head is as wide as the state, whatever the size of attention's heads, and
dt, B and C are computed from the layer's input. `dt_proj` adds its bias to dt, and the scan adds it
again, so it counts twice.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, ModelConfig
from edge.export.checkpoint import families
from edge.export.checkpoint.family import Family
from edge.export.checkpoint.fields import UNSUPPORTED, Fields, read_json
from edge.export.checkpoint.layout import Block, Layout, SourceTensor, TensorPlace
from edge.mixers.base import MixerConfig

NAME = "mamba_in_llama"
CONFIG = "mamba_config.json"
D_CONV = 4
Mixer = Mamba1Config | Mamba2Config
# attention layer → mixer that replaces it
Make = Callable[[AttentionConfig], Mixer]
_REMEDY = "do config.json and mamba_config.json come from the same model?"


def claims(fields: Fields) -> bool:
    return (fields.file.parent / CONFIG).is_file()


def read(fields: Fields) -> Layout:
    """Return the layout. Raises CheckpointError for a bad field of either file."""
    base = next((f for f in families.every() if f.name != NAME and f.claims(fields)), None)
    if base is None:
        model_type = str(fields.values.get("model_type"))[:80]
        fields.stop("model_type", f"{model_type!r} is not a supported Transformer", UNSUPPORTED)
    base_layout = base.read(fields)
    fields.check()
    file = fields.file.parent / CONFIG
    mamba_fields = Fields(file, read_json(file))
    replaced, make = _read_mamba_config(mamba_fields, base_layout.config)
    return replace_attention(base_layout, replaced, make)


def _read_mamba_config(mamba_fields: Fields, config: ModelConfig) -> tuple[list[int], Make]:
    """Check that mamba_config.json fits; return the blocks without attention, and their mixer."""
    blocks = len(config.layers) // 2
    attention_blocks = mamba_fields.indices("attn_layers", blocks)
    attentions = config.layers_of(AttentionConfig)
    absent = [block for block in range(blocks) if 2 * block not in attentions]
    if absent:
        mamba_fields.stop(
            "attn_layers", f"{config.family} has no attention in block {absent[0]}", UNSUPPORTED
        )
    attention = attentions[0]
    ssm = mamba_fields.section("ssm_cfg")
    inner = attention.n_heads * attention.head_dim
    sizes = {
        "d_model": config.d_model, "n_layer": blocks, "d_inner": inner,
        "d_xb": attention.n_kv_heads * attention.head_dim,
    }  # fmt: skip
    for name, size in sizes.items():
        _expect(mamba_fields, name, size, mamba_fields.integer(name, size))
    make = _mamba2(ssm, attention) if "ngroups" in ssm else _mamba1(ssm, attention, config.d_model)
    mamba_fields.check()
    return [block for block in range(blocks) if block not in attention_blocks], make


def _mamba2(ssm: Fields, attention: AttentionConfig) -> Make:
    _expect(ssm, "ngroups", attention.n_heads, ssm.integer("ngroups"))
    _expect(ssm, "d_state", attention.head_dim, ssm.integer("d_state", 128))
    _expect(ssm, "d_conv", D_CONV, ssm.integer("d_conv", D_CONV))
    for name in ("D_has_hdim", "repeat_kv_before_conv", "bias", "norm_before_gate"):
        ssm.demand(name, False)
    for name in ("rmsnorm", "conv_bias"):
        ssm.demand(name, True)
    return mixer_for


def _mamba1(ssm: Fields, attention: AttentionConfig, d_model: int) -> Make:
    for name in ("proj_x_bias", "proj_z_bias", "out_proj_bias"):
        ssm.demand(name, False)
    ssm.demand("repeat_kv_before_conv", True)
    states = ssm.integer("d_state", 16)
    if attention.n_kv_heads * attention.head_dim % states:
        ssm.inconsistent("d_state", f"is {states}, which does not divide d_xb", _REMEDY)
        states = 1
    auto = ssm.values.get("dt_rank", "auto") == "auto"
    mixer = mamba1_for(
        attention,
        d_state=states,
        dt_rank=math.ceil(d_model / 16) if auto else ssm.integer("dt_rank"),
        d_conv=ssm.taps("d_conv"),
        conv_bias=ssm.boolean("conv_bias", True),
    )
    return lambda _: mixer


def _expect(fields: Fields, name: str, expected: int, actual: int) -> None:
    if actual != expected:
        fields.inconsistent(name, f"is {actual}, but config.json implies {expected}", _REMEDY)


def mixer_for(attention: AttentionConfig) -> Mamba2Config:
    """Return the Mamba-2 that replaces an attention layer: as many heads, states as wide as keys.

    Every head has its own B and C; heads that share them hold the same numbers.
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


def mamba1_for(attention: AttentionConfig, *, d_state: int, dt_rank: int, d_conv: int = D_CONV,
               conv_bias: bool = True) -> Mamba1Config:  # fmt: skip
    """Return the Mamba-1 that replaces an attention layer.

    B is stored once for the heads that share it; x is not, because every channel has its own
    convolution.
    """
    inner = attention.n_heads * attention.head_dim
    return Mamba1Config(
        d_inner=inner,
        d_state=d_state,
        d_conv=d_conv,
        dt_rank=dt_rank,
        conv_bias=conv_bias,
        B_groups=attention.n_kv_heads * attention.head_dim // d_state,
        C_groups=inner // d_state,
        reads_input=True,
    )


def hybrid_config(
    config: ModelConfig, replaced: Sequence[int], make: Make = mixer_for
) -> ModelConfig:
    """Return the config with the attention of some blocks replaced, or itself if none is."""
    if not replaced:
        return config
    layers: list[MixerConfig] = list(config.layers)
    attentions = config.layers_of(AttentionConfig)
    for block in replaced:
        layers[2 * block] = make(attentions[2 * block])
    attends = any(layer.attends for layer in layers)
    context = config.max_context if attends else None
    return config.model_copy(
        update={"family": NAME, "layers": tuple(layers), "max_context": context}
    )


def replace_attention(whole: Layout, replaced: Sequence[int], make: Make = mixer_for) -> Layout:
    """Return a Transformer's layout with SSMs in place of some attention layers."""
    config = hybrid_config(whole.config, replaced, make)
    layout = replace(whole, config=config, pieces={})
    attentions = whole.config.layers_of(AttentionConfig)
    for block in replaced:
        mixer: Any = config.layers[2 * block]
        norm = whole.pieces[f"layers.{2 * block}.norm.weight"].source.removesuffix(".weight")
        theirs = f"{norm.rpartition('.')[0]}.mamba"
        layout.place_layer(2 * block, norm=norm, mixer=theirs)
        stored = _STORED[mixer.kind](mixer, attentions[2 * block].n_kv_heads)
        stored.place(layout, f"layers.{2 * block}", theirs)
    unchanged: dict[str, TensorPlace] = {
        name: place
        for name, place in whole.pieces.items()
        if name not in layout.pieces and not _is_replaced(name, replaced)
    }
    layout.pieces |= unchanged
    return layout


def _is_replaced(name: str, replaced: Sequence[int]) -> bool:
    parts = name.split(".")
    return parts[0] == "layers" and int(parts[1]) in {2 * block for block in replaced}


def shared_rows(heads: int, kv_heads: int, dim: int) -> list[int]:
    """Return the stored row of each row of all heads, where heads of a group share a key."""
    group = heads // kv_heads
    return [head // group * dim + at for head in range(heads) for at in range(dim)]


class _Stored(ABC):
    """A new mixer's tensors, as that code stores them: parts of `kv_heads` heads are shared."""

    @abstractmethod
    def rows(self) -> dict[str, tuple[int, ...]]:
        """Return the stored row of each row of a module."""

    @abstractmethod
    def place(self, layout: Layout, ours: str, theirs: str) -> None:
        """Tell a layout where the layer `ours` has its tensors."""

    @abstractmethod
    def sizes(self) -> tuple[dict[str, object], int]:
        """Return the fields of `ssm_cfg` that this kind alone has, and `d_xb`."""


class _StoredMamba2(_Stored):
    def __init__(self, mixer: Mamba2Config, kv_heads: int):
        self.mixer, self.kv_heads = mixer, kv_heads
        self.narrow = kv_heads * mixer.head_dim

    def rows(self) -> dict[str, tuple[int, ...]]:
        heads, inner, narrow = self.mixer.n_heads, self.mixer.d_inner, self.narrow
        shared = shared_rows(heads, self.kv_heads, self.mixer.head_dim)
        own = list(range(inner))

        def shifted(start: int, rows: Sequence[int]) -> list[int]:
            return [start + row for row in rows]

        convolved = [*shared, *shifted(narrow, shared), *shifted(2 * narrow, own)]
        dt = shifted(2 * inner + 2 * narrow, range(heads))
        return {
            "in_proj": (*own, *shifted(inner, convolved), *dt),
            "conv1d": tuple(convolved),
        }

    def place(self, layout: Layout, ours: str, theirs: str) -> None:
        for module, rows in self.rows().items():
            for kind in layout.kinds(f"{ours}.{module}"):
                name = f"{ours}.{module}.{kind}"
                place = layout.pieces[name]
                shape = (max(rows) + 1, *place.source_shape[1:])
                layout.pieces[name] = replace(place, source_shape=shape, rows=rows)

    def sizes(self) -> tuple[dict[str, object], int]:
        return {"ngroups": self.mixer.n_heads}, self.narrow


class _StoredMamba1(_Stored):
    def __init__(self, mixer: Mamba1Config, kv_heads: int):
        self.mixer = mixer

    def rows(self) -> dict[str, tuple[int, ...]]:
        inner, (_, narrow, _) = self.mixer.d_inner, self.mixer.x_proj_parts
        return {"in_proj": (*self._shared(), *range(narrow, narrow + inner))}

    def _shared(self) -> list[int]:
        return shared_rows(self.mixer.C_groups, self.mixer.B_groups, self.mixer.d_state)

    def place(self, layout: Layout, ours: str, theirs: str) -> None:
        d_model, (rank, narrow, inner) = layout.config.d_model, self.mixer.x_proj_parts

        def part(name: str, height: int, rows: Sequence[int], first: int) -> Block:
            return Block(
                SourceTensor(f"{theirs}.{name}.weight", (height, d_model)), rows, (first, 0)
            )

        own = range(inner)
        x, z = part("in_proj_x", narrow, self._shared(), 0), part("in_proj_z", inner, own, inner)
        layout.place_blocks(f"{ours}.in_proj.weight", [x, z])
        dt = part("dt_proj_down", rank, range(rank), 0)
        B = part("B_proj", narrow, range(narrow), rank)
        C = part("C_proj", inner, own, rank + narrow)
        layout.place_blocks(f"{ours}.x_proj.weight", [dt, B, C])
        layout.multiply(f"{ours}.dt_proj", 2, kinds=("bias",))

    def sizes(self) -> tuple[dict[str, object], int]:
        return {"dt_rank": self.mixer.dt_rank}, self.mixer.x_proj_parts[1]


_STORED: dict[str, Callable[[Any, int], _Stored]] = {
    "mamba1": _StoredMamba1,
    "mamba2": _StoredMamba2,
}


def grouped_rows(mixer: Mixer, kv_heads: int) -> dict[str, tuple[int, ...]]:
    """Return the stored row of each row of in_proj and conv1d; B and x are stored per KV head.

    For Mamba, whose in_proj is x and z, only x is.
    """
    return _STORED[mixer.kind](mixer, kv_heads).rows()


def mamba_config(config: ModelConfig, kv_heads: int, d_intermediate: int) -> dict[str, object]:
    """Return the content of a hybrid's mamba_config.json."""
    mixers = config.layers[::2]
    mixer: Any = next(mixer for mixer in mixers if mixer.kind in _STORED)
    own, d_xb = _STORED[mixer.kind](mixer, kv_heads).sizes()
    return {
        "d_model": config.d_model,
        "ssm_cfg": {"expand": 1, "d_state": mixer.d_state, **own},
        "rms_norm_eps": config.norm.eps,
        "vocab_size": None,
        "d_inner": mixer.d_inner,
        "d_xb": d_xb,
        "intermediate_size": d_intermediate,
        "hidden_act": "silu",
        "n_layer": len(mixers),
        "attn_layers": [block for block, m in enumerate(mixers) if m.attends],
    }


FAMILY = Family(NAME, f"{CONFIG} beside a Transformer's config.json", claims, read, first=True)
