"""What llama.cpp's conversion makes of each family, and how that is undone: a table.

Metadata become the fields of a config.json, tensors keep their names and get back their values, so
that the readers of `edge.export.checkpoint.families` read both. Facts: llama.cpp,
convert_hf_to_gguf.py and gguf-py/gguf/constants.py, 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edge.export.checkpoint.gguf.weights import AS_IT_IS, Array, Restoration, Shape

Metadata = Mapping[str, Any]
# (names of the file's tensors, metadata without the architecture's prefix, config made so far)
Completion = Callable[["Shapes", Metadata, dict[str, Any]], None]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class GgufArchitecture:
    """One value of `general.architecture`.

    Attributes:
        name: that value, and the prefix of its keys.
        required: key → field of config.json; a file without one of them is refused.
        optional: the same, for those that may be absent.
        inert: keys that say nothing that the model depends on.
        fixed: fields of config.json that the architecture implies.
        ends: tensor outside of blocks → its name in the checkpoint.
        block: tensor of a block, without `blk.N.` → its name in the checkpoint's layer.
        layer: how the checkpoint's names of a layer begin.
        rotated: query and key rows are in the order of llama.cpp's RoPE, pair beside pair.
        complete: adds the fields that depend on more than one key.
    """

    name: str
    required: Mapping[str, str]
    optional: Mapping[str, str]
    inert: frozenset[str]
    fixed: Mapping[str, Any]
    ends: Mapping[str, str]
    block: Mapping[str, str]
    layer: str
    rotated: bool = False
    complete: Completion = field(default=lambda shapes, metadata, config: None)

    def restoration(self, name: str, config: Mapping[str, Any]) -> Restoration:
        """What is to be undone in a tensor of the file."""
        rest = name.split(".", 2)[2] if name.startswith("blk.") and name.count(".") > 1 else name
        if self.rotated and rest.startswith(("attn_q.", "attn_k.")):
            heads = config["num_attention_heads" if rest[5] == "q" else "num_key_value_heads"]
            return _unrotated(heads)
        return _RESTORED.get(rest, AS_IT_IS)


# -- what a conversion does to values ----------------------------------------------------------


def _unrotated(heads: Any) -> Restoration:
    """Rows of a head as the checkpoint has them: both halves of all pairs one after the other.

    llama.cpp rotates neighbours, transformers rotates value i with value i + head_dim / 2.
    """

    def values(array: Array) -> Array:
        if not isinstance(heads, int) or heads < 1 or array.shape[0] % (2 * heads):
            return array  # the config is refused for it
        pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return Restoration(values=values)


def _flat(shape: Shape) -> Shape:
    return (int(np.prod(shape)),)


def _conv(shape: Shape) -> Shape:
    return (shape[0], 1, *shape[1:])


def _vector(shape: Shape) -> Shape:
    """[H, 1] of Mamba-2 is [H]; Mamba-1's matrices are left alone."""
    return shape[:1] if shape[1:] == (1,) else shape


_RESTORED = {
    "ssm_a": Restoration(_vector, lambda a: np.log(-a)),
    "ssm_d": Restoration(_vector),
    "ssm_norm.weight": Restoration(_flat),
    "ssm_conv1d.weight": Restoration(_conv),
    "shortconv.conv.weight": Restoration(_conv),
}

# -- Transformers ------------------------------------------------------------------------------

_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
}
_ATTENTION = {
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "feed_forward_length": "intermediate_size",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_INERT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
_TREATED = frozenset(
    {
        "attention.value_length", "rope.dimension_count", "rope.scaling.type",
        "rope.scaling.factor", "rope.scaling.original_context_length",
    }
)  # fmt: skip
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{
        f"attn_{theirs}.{kind}": f"self_attn.{ours}_proj.{kind}"
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
        for kind in ("weight", "bias")
    },
    **{
        f"ffn_{which}.{kind}": f"mlp.{which}_proj.{kind}"
        for which in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}
ROPE_FACTORS = "rope_freqs.weight"


def _complete_transformer(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    config.setdefault("num_key_value_heads", heads)
    if (
        isinstance(heads, int)
        and isinstance(width, int)
        and config.get("head_dim") == width // max(1, heads)
    ):
        del config["head_dim"]  # not every family may say so
    kind = metadata.get("rope.scaling.type")
    if kind not in (None, "none"):
        config["rope_scaling"] = {"rope_type": kind, "factor": metadata.get("rope.scaling.factor")}


def _complete_llama(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    _complete_transformer(shapes, metadata, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes


LLAMA = GgufArchitecture(
    name="llama",
    required={**_SIZES, **_ATTENTION},
    optional=_OPTIONAL,
    inert=_INERT | _TREATED,
    fixed={"model_type": "llama", "hidden_act": "silu"},
    ends=_ENDS,
    block=_BLOCK,
    layer="model.layers",
    rotated=True,
    complete=_complete_llama,
)


def _like_llama(name: str, **changes: Any) -> GgufArchitecture:
    """Llama's keys and tensors, with what is another's own."""
    fixed = {"model_type": name, "hidden_act": "silu"}
    return replace(LLAMA, name=name, fixed=fixed, **{"complete": _complete_transformer, **changes})


# q and k of these are as they were: llama.cpp rotates halves
QWEN2 = _like_llama("qwen2", rotated=False)
QWEN3 = _like_llama(
    "qwen3",
    rotated=False,
    block={
        **_BLOCK,
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
    },
)
# every fourth block has no RoPE, which is what its config says where it says nothing
SMOLLM3 = _like_llama("smollm3", complete=_complete_llama)
GRANITE = _like_llama(
    "granite",
    optional={
        **_OPTIONAL,
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    complete=_complete_llama,
)

# -- Mamba -------------------------------------------------------------------------------------

_MAMBA = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": "intermediate_size",
    "ssm.state_size": "state_size",
}
_MAMBA_INERT = frozenset(
    {"context_length", "feed_forward_length", "attention.head_count", "vocab_size"}
)
_MAMBA_ENDS = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_MAMBA_BLOCK = {
    "attn_norm.weight": "norm.weight",
    "ssm_in.weight": "mixer.in_proj.weight",
    "ssm_in.bias": "mixer.in_proj.bias",
    "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_conv1d.bias": "mixer.conv1d.bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_out.weight": "mixer.out_proj.weight",
    "ssm_out.bias": "mixer.out_proj.bias",
}


def _complete_mamba(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    inner, width = config.get("intermediate_size"), config.get("hidden_size")
    if isinstance(inner, int) and isinstance(width, int) and width > 0:
        config["expand"] = inner / width
    config["use_conv_bias"] = "blk.0.ssm_conv1d.bias" in shapes
    config["use_bias"] = "blk.0.ssm_in.bias" in shapes
    if metadata.get("ssm.dt_b_c_rms"):
        config["model_type"] = "falcon_mamba"


def _complete_mamba2(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    _complete_mamba(shapes, metadata, config)
    inner, heads = config.get("intermediate_size"), config.get("num_heads")
    if isinstance(inner, int) and isinstance(heads, int) and heads > 0:
        config["head_dim"] = inner // heads


MAMBA = GgufArchitecture(
    name="mamba",
    required={**_MAMBA, "ssm.time_step_rank": "time_step_rank"},
    optional={},
    inert=_MAMBA_INERT | {"ssm.dt_b_c_rms"},
    fixed={"model_type": "mamba", "hidden_act": "silu"},
    ends=_MAMBA_ENDS,
    block={
        **_MAMBA_BLOCK,
        "ssm_x.weight": "mixer.x_proj.weight",
        "ssm_dt.weight": "mixer.dt_proj.weight",
        "ssm_dt.bias": "mixer.dt_proj.bias",
    },
    layer="backbone.layers",
    complete=_complete_mamba,
)
MAMBA2 = GgufArchitecture(
    name="mamba2",
    required={**_MAMBA, "ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
    optional={},
    inert=_MAMBA_INERT,
    fixed={"model_type": "mamba2", "hidden_act": "silu"},
    ends=_MAMBA_ENDS,
    block={
        **_MAMBA_BLOCK,
        "ssm_dt.bias": "mixer.dt_bias",
        "ssm_norm.weight": "mixer.norm.weight",
    },
    layer="backbone.layers",
    complete=_complete_mamba2,
)

ARCHITECTURES = {each.name: each for each in (LLAMA, MAMBA, MAMBA2, QWEN2, QWEN3, SMOLLM3, GRANITE)}
