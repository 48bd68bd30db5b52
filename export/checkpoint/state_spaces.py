"""Read checkpoints of state-spaces/mamba's `MambaLMHeadModel`: Mamba, Mamba-2, MambaByte.

Source: mamba_ssm/models/config_mamba.py, mixer_seq_simple.py, modules/{mamba_simple,mamba2,mlp,
mha,block}.py at e9594ce. A block is a mixer and, when d_intermediate > 0, a gated MLP. Each follows
its own norm and is a layer here.
"""

from __future__ import annotations

import math
from typing import Any

from edge.config import (
    AttentionConfig,
    Mamba1Config,
    Mamba2Config,
    Mixer,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)
from edge.export.checkpoint.family import known_only
from edge.export.checkpoint.fields import MAX_BLOCKS, UNSUPPORTED, Fields
from edge.export.checkpoint.layout import Layout

MLP_MULTIPLE = 128  # GatedMLP(multiple_of=128)
EPS = 1e-5  # no field of the config reaches norm_epsilon, and the gated norm's eps is a literal

FIELDS = {
    "attn_cfg", "attn_layer_idx", "d_inner", "d_intermediate", "d_model", "n_layer",
    "pad_vocab_size_multiple", "rms_norm", "ssm_cfg", "tie_embeddings",
}  # fmt: skip
# How a model was initialised or run; without effect on trained weights.
_INERT = {"layer", "dt_min", "dt_max", "dt_init_floor"}
_INERT_1 = {"dt_init", "dt_scale", "use_fast_path"}
_INERT_2 = {"conv_init", "A_init_range", "chunk_size", "use_mem_eff_path", "sequence_parallel"}


def ssm_layer(fields: Fields) -> str:
    """Return `ssm_cfg.layer`; absent means Mamba1."""
    ssm = fields.values.get("ssm_cfg")
    layer = ssm.get("layer") if isinstance(ssm, dict) else None
    return "Mamba1" if layer is None else str(layer)


def read(fields: Fields, family: str) -> Layout:
    """Return the layout of a `MambaLMHeadModel`; absent fields take its defaults."""
    known_only(fields, FIELDS)
    d_model = fields.integer("d_model")
    blocks = fields.integer("n_layer", high=MAX_BLOCKS)
    attention_blocks = set(fields.indices("attn_layer_idx", blocks))
    mixer = _mixer(fields, d_model) if len(attention_blocks) < blocks else None
    attn = _attention(fields, d_model) if attention_blocks else None
    mlp = _mlp(fields)
    layers: list[Any] = []
    for block in range(blocks):
        layers.append(attn if block in attention_blocks else mixer)
        layers += [mlp] if mlp else []

    size = fields.integer("vocab_size", 50277)
    config = fields.model(
        family=family,
        vocab_size=size + -size % fields.integer("pad_vocab_size_multiple", 8, high=1 << 20),
        d_model=d_model,
        layers=layers,
        norm=NormConfig(
            kind="rmsnorm" if fields.boolean("rms_norm", True) else "layernorm", eps=EPS
        ),
        tie_embeddings=fields.boolean("tie_embeddings", True),
    )
    return _place(config, blocks, attention_blocks, mlp is not None)


def _mixer(fields: Fields, d_model: int) -> Mixer:
    ssm = fields.section("ssm_cfg")
    layer = ssm_layer(fields)
    if layer == "Mamba1":
        return mamba1(ssm, d_model)
    if layer == "Mamba2":
        return _mamba2(ssm, d_model)
    ssm.stop("layer", f"is {layer!r}; Mamba1 and Mamba2 are known", UNSUPPORTED)


def mamba1(ssm: Fields, d_model: int) -> Mamba1Config:
    """Read the arguments of mamba_ssm's `Mamba`."""
    ssm.known_only(
        {"d_state", "d_conv", "expand", "dt_rank", "conv_bias", "bias"} | _INERT | _INERT_1
    )
    return mamba1_of(ssm, d_model, "expand d_state d_conv dt_rank conv_bias bias")


def mamba1_of(fields: Fields, width: int, names: str, **values: Any) -> Mamba1Config:
    """Read Mamba-1 in a model of `width` from six fields.

    `names` are, in this order, the fields of the expansion factor, states, taps, rank, and whether
    the convolution and the projections have biases. `values` override or add arguments.
    """
    expand, d_state, d_conv, dt_rank, conv_bias, proj_bias = names.split()
    arguments: dict[str, Any] = {
        "d_inner": values.get("d_inner") or fields.scaled(expand, width, 2),
        "d_state": fields.integer(d_state, 16),
        "d_conv": fields.taps(d_conv),
        "dt_rank": values.get("dt_rank") or rank_of(fields, width, dt_rank),
        "conv_bias": fields.boolean(conv_bias, True),
        "proj_bias": fields.boolean(proj_bias, False),
    }
    return fields.build(Mamba1Config, **arguments | values)


def mamba2_of(
    fields: Fields, d_inner: int, head_dim: int, names: str, *, groups: int = 1, **values: Any
) -> Mamba2Config:
    """Read Mamba-2 of `d_inner` channels in heads of `head_dim` from five fields.

    `names` are, in this order, the fields of states, taps, groups (`groups` if absent), and whether
    the convolution and the projections have biases. `values` override or add arguments.
    """
    d_state, d_conv, n_groups, conv_bias, proj_bias = names.split()
    arguments: dict[str, Any] = {
        "d_inner": d_inner,
        "d_ssm": d_inner,
        "head_dim": head_dim,
        "d_state": fields.integer(d_state, 128),
        "d_conv": fields.taps(d_conv),
        "n_groups": fields.integer(n_groups, groups),
        "conv_bias": fields.boolean(conv_bias, True),
        "proj_bias": fields.boolean(proj_bias, False),
        "dt_limit": fields.limits("time_step_limit"),
    }
    return fields.build(Mamba2Config, **arguments | values)


def heads_of(fields: Fields, name: str, heads: int, head_dim: int, d_inner: int) -> None:
    """Refuse `heads`, from the field `name`, if they do not make up the channels."""
    if heads * head_dim != d_inner:
        message = f"{heads} heads of {head_dim} do not make {d_inner} channels"
        fields.inconsistent(name, message)


def rank_of(fields: Fields, width: int, name: str) -> int:
    """Return the rank of dt: a sixteenth of the width if the field is "auto" or absent."""
    automatic = fields.values.get(name) in (None, "auto")
    return math.ceil(width / 16) if automatic else fields.integer(name)


def _mamba2(ssm: Fields, d_model: int) -> Mamba2Config:
    """Read the arguments of mamba_ssm's `Mamba2`."""
    ssm.known_only(
        {"d_state", "d_conv", "expand", "headdim", "d_ssm", "ngroups", "rmsnorm", "dt_limit"}
        | {"norm_before_gate", "D_has_hdim", "bias", "conv_bias"} | _INERT | _INERT_2
    )  # fmt: skip
    ssm.demand("norm_before_gate", False)
    ssm.demand("D_has_hdim", False)
    d_inner = ssm.scaled("expand", d_model, 2)
    return mamba2_of(
        ssm,
        d_inner,
        ssm.integer("headdim", 64),
        "d_state d_conv ngroups conv_bias bias",
        d_ssm=ssm.integer("d_ssm", d_inner),
        gated_norm=ssm.boolean("rmsnorm", True),
        dt_limit=ssm.limits("dt_limit"),
    )


def _attention(fields: Fields, d_model: int) -> AttentionConfig:
    """Read the arguments of mamba_ssm's `MHA`, whose biases default to on."""
    attn = fields.section("attn_cfg")
    attn.known_only(
        {"num_heads", "num_heads_kv", "head_dim", "mlp_dim", "qkv_proj_bias", "out_proj_bias"}
        | {"softmax_scale", "causal", "d_conv", "rotary_emb_dim", "rotary_emb_base"}
        | {"rotary_emb_interleaved"}
    )
    # MHA's default is False, with which a language model would look ahead.
    if not attn.boolean("causal", False):
        attn.refuse("causal", "is not true", "only causal attention is supported")
    attn.demand("mlp_dim", 0)
    attn.demand("rotary_emb_interleaved", False)
    if "softmax_scale" in attn:
        attn.refuse("softmax_scale", "is set", "only 1/sqrt(head_dim), its default, is supported")
    heads = attn.integer("num_heads")
    if "head_dim" not in attn and d_model % heads:
        attn.inconsistent("num_heads", f"does not divide d_model {d_model}")
    rotary = attn.integer("rotary_emb_dim", 0, low=0)
    theta = attn.number("rotary_emb_base", 10000.0)
    return attn.build(
        AttentionConfig,
        n_heads=heads,
        n_kv_heads=attn.integer("num_heads_kv", heads),
        head_dim=attn.integer("head_dim", max(1, d_model // heads)),
        rope=attn.build(RopeConfig, theta=theta, dim=rotary) if rotary else None,
        qkv_bias=attn.boolean("qkv_proj_bias", True),
        out_bias=attn.boolean("out_proj_bias", True),
        d_conv=attn.integer("d_conv", 0, low=0, high=16) or None,
    )


def _mlp(fields: Fields) -> MlpConfig | None:
    width = fields.integer("d_intermediate", 0, low=0)
    return MlpConfig(d_intermediate=width + -width % MLP_MULTIPLE) if width else None


def _place(config: ModelConfig, blocks: int, attention_blocks: set[int], has_mlp: bool) -> Layout:
    layout = Layout(config)
    per_block = 2 if has_mlp else 1
    for block in range(blocks):
        index, source = block * per_block, f"backbone.layers.{block}"
        if block in attention_blocks:
            # rows of query, key and value are stacked, and convolved in that order
            layout.place_layer(
                index,
                norm=f"{source}.norm",
                mixer=f"{source}.mixer",
                rename={"o_proj": "out_proj"},
                joined={"in_proj": ("q_proj", "k_proj", "v_proj")},
            )
        else:
            layout.place_layer(index, norm=f"{source}.norm", mixer=f"{source}.mixer")
        if has_mlp:
            # GatedMLP stacks [up | gate]: y, gate = fc1(x).chunk(2); fc2(y·silu(gate))
            layout.place_layer(
                index + 1,
                norm=f"{source}.norm2",
                mixer=f"{source}.mlp",
                rename={"down_proj": "fc2"},
                joined={"fc1": ("up_proj", "gate_proj")},
            )
    layout.place_ends("backbone.norm_f", embedding="backbone.embedding.weight")
    return layout


def place_transformers(config: ModelConfig) -> Layout:
    """Place the tensors of `MambaForCausalLM` or `Mamba2ForCausalLM`, which differ only in the
    mixer.

    Both also load `backbone.embedding.weight`, the state-spaces spelling.
    """
    layout = Layout(
        config, rename=lambda n: n.replace("backbone.embedding.", "backbone.embeddings.")
    )
    for index in range(len(config.layers)):
        source = f"backbone.layers.{index}"
        layout.place_layer(index, norm=f"{source}.norm", mixer=f"{source}.mixer")
    layout.place_ends("backbone.norm_f", embedding="backbone.embeddings.weight")
    return layout
