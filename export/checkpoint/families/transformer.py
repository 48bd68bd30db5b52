"""What configs of transformers' Transformer models have in common: inert fields and RoPE."""

from __future__ import annotations

from edge.config import RopeConfig, RopeScaling
from edge.export.checkpoint.fields import Fields

UNSUPPORTED = "this variant cannot be exported"
MAX_BLOCKS = 2048

# Who made a config and how it is run or trained; the defaults of generation that older versions
# kept here. Nothing of it changes the logits.
INERT = frozenset(
    {
        "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
        "bos_token_id", "chunk_size_feed_forward", "do_sample", "dtype", "eos_token_id", "id2label",
        "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "max_length",
        "max_new_tokens", "model_type", "output_attentions", "output_hidden_states",
        "pad_token_id", "problem_type", "repetition_penalty", "return_dict", "temperature",
        "tie_word_embeddings", "top_k", "top_p", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
_SIZES = frozenset(
    {
        "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
        "num_attention_heads", "num_hidden_layers", "vocab_size",
        "rope_parameters", "rope_scaling",
    }
)  # fmt: skip
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")


def known_only(fields: Fields, own: set[str]) -> None:
    """Refuse a config with fields that neither every Transformer has nor `own` names."""
    if "quantization_config" in fields:
        fields.refuse(
            "quantization_config", "says that the weights are quantized already",
            "start from the checkpoint before it was quantized, and choose a recipe with --quant",
        )  # fmt: skip
    fields.known_only(INERT | _SIZES | own)


def head_dim(fields: Fields, heads: int) -> int:
    """`hidden_size / num_attention_heads`, which has to be whole."""
    width = fields.integer("hidden_size")
    if width % heads:
        fields.refuse("num_attention_heads", f"does not divide hidden_size {width}")
    return width // heads


def rope(fields: Fields, size: int, *, base: str = "rope_theta", share: float = 1.0) -> RopeConfig:
    """The rotation of heads of `size` values; `share` of each, where nothing else is said.

    As transformers 5 reads it: `rope_scaling` (before) goes before `rope_parameters`, what either
    says before the config's own field `base`.
    """
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    given = fields.section(name)
    kind = given.values.get("rope_type", given.values.get("type")) or "default"
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind == "linear":
        known |= {"factor"}
    elif kind == "llama3":
        known |= {*_LLAMA3, "original_max_position_embeddings"}
    elif kind != "default":
        field = "rope_type" if "rope_type" in given else "type"
        given.refuse(field, f"is {str(kind)[:40]!r}; default, linear and llama3 are known",
                     UNSUPPORTED)  # fmt: skip
    given.known_only(known)
    theta = given.number("rope_theta", fields.number(base, 10000.0))
    rotated = given.number("partial_rotary_factor", share)
    dim = int(size * rotated) if 0 < rotated <= 1 else 0
    if dim < 2 or dim % 2:
        message = f"is {rotated}, which makes no whole pairs of a head of {size}"
        given.refuse("partial_rotary_factor", message)
    return given.build(RopeConfig, theta=theta, dim=dim, scaling=_scaling(fields, given, kind))


def _scaling(fields: Fields, given: Fields, kind: object) -> RopeScaling | None:
    if kind == "linear":
        return given.build(RopeScaling, kind=kind, factor=given.number("factor"))
    if kind == "llama3":
        trained = fields.integer("max_position_embeddings", 2048)
        return given.build(
            RopeScaling,
            kind=kind,
            **{name: given.number(name) for name in _LLAMA3},
            original_context=given.integer("original_max_position_embeddings", trained),
        )
    return None
