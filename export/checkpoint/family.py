"""The reader of a family, and helpers for fields that configs share: model types, sizes, RoPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.config import (
    AttentionConfig,
    ExpertsConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    RopeScaling,
    RouterConfig,
)
from edge.export.checkpoint.fields import MAX_DIM, UNSUPPORTED, Fields, show
from edge.export.checkpoint.known import BOOKKEEPING, CHANGING
from edge.export.checkpoint.layout import Layout
from edge.mixers.base import MixerConfig

MAX_MAGNITUDE = 1000.0
WINDOW = 4096  # default window of sliding attention
SLIDING = "sliding_attention"

# fields of every Transformer's config, and those of drafters
_SIZES = frozenset(
    {
        "head_ids", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "vocab_size",
    }
)  # fmt: skip
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
ROPES = ("default", "linear", "llama3")
_LONGROPE = {"attention_factor", "factor", "long_factor", "short_factor"}
_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_SCALED = {
    "linear": {"factor"},
    "llama3": {*_LLAMA3, "original_max_position_embeddings"},
    "longrope": {*_LONGROPE, "original_max_position_embeddings"},
    "yarn": {*_YARN, "factor", "original_max_position_embeddings"},
}
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


@dataclass(frozen=True)
class Family:
    """A reader of configs.

    Attributes:
        name: name for `ModelConfig.family`.
        accepts: description of the configs it reads, for error messages.
        claims: predicate that says whether this reader is the one for a config.
        read: config fields → layout; raises CheckpointError for bad or unsupported fields.
        first: whether to try it before other readers, which might claim its configs.
    """

    name: str
    accepts: str
    claims: Callable[[Fields], bool]
    read: Callable[[Fields], Layout]
    first: bool = False

    @classmethod
    def of_transformers(
        cls, name: str, architecture: str, read: Callable[[Fields], Layout], form: str = ""
    ) -> Family:
        """Return a family of transformers whose `model_type` is `name`.

        `architecture` is the class that a config without a type names. `form` describes further
        requirements.
        """

        def claims(fields: Fields) -> bool:
            return is_transformers(fields, name, architecture)

        return cls(name, ", ".join(filter(None, (f"model_type {name}", form))), claims, read)


def is_transformers(fields: Fields, model_type: str, architecture: str) -> bool:
    """Return whether a checkpoint is in `-hf` form, which may have state-spaces' keys as well."""
    if is_state_spaces(fields):
        return False
    architectures = fields.values.get("architectures")
    if fields.values.get("model_type") is not None:
        return bool(fields.values["model_type"] == model_type)
    return isinstance(architectures, list) and architecture in architectures


def is_state_spaces(fields: Fields) -> bool:
    """Return whether a checkpoint has `MambaLMHeadModel`'s config, which names no type."""
    known_type = fields.values.get("model_type") in (None, "mamba", "mamba2", "mambabyte")
    return (
        known_type and "d_model" in fields and "n_layer" in fields and "hidden_size" not in fields
    )


def known_only(fields: Fields, own: Iterable[str]) -> None:
    """Refuse fields that change a model and are not among `own`; note unknown ones."""
    if "quantization_config" in fields:
        fields.refuse(
            "quantization_config", "says that the weights are already quantized",
            "start from the checkpoint before it was quantized, and choose a recipe with --quant",
        )  # fmt: skip
    for name in sorted(set(fields.values) - BOOKKEEPING - _SIZES - {*own, "quantization_config"}):
        value, harmless = fields.values[name], CHANGING.get(name)
        if value is None or name.startswith("_"):
            continue
        if harmless is None:
            fields.unknown.append(name)
        elif value not in harmless:
            only = " or ".join(["null", *(show(v) for v in harmless)])
            fields.refuse(name, f"is {show(value)}; only {only} is supported", UNSUPPORTED)


def whole(
    fields: Fields,
    family: str,
    layers: Sequence[MixerConfig],
    *,
    eps: float = 1e-5,
    norm: str = "rms_norm_eps",
    tied: bool = False,
    context: int | None = None,
    logits_softcap: float | None = None,
) -> ModelConfig:
    """Build the model of these layers, whose RMSNorms take their epsilon from the field `norm`.

    `eps` and `tied` are the defaults of `norm` and `tie_word_embeddings`. `context` only applies to
    layers that attend. Raises CheckpointError with all faults of the file.
    """
    vocab_size = fields.integer("vocab_size")
    return fields.model(
        family=family,
        vocab_size=vocab_size,
        d_model=fields.integer("hidden_size"),
        layers=layers,
        norm=fields.build(NormConfig, eps=fields.epsilon(norm, eps)),
        tie_embeddings=fields.boolean("tie_word_embeddings", tied),
        max_context=context if any(layer.attends for layer in layers) else None,
        logits_softcap=logits_softcap,
        head_ids=fields.indices("head_ids", vocab_size, "token id") or None,
    )


def attention(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    size: int | None = None,
    bias: bool = False,
    **values: Any,
) -> AttentionConfig:
    """Read attention from the fields that configs share; `values` are further arguments.

    `kv_heads` is the default number of KV heads; None is one per head. `size` None is
    `hidden_size / num_attention_heads`.
    """
    heads = fields.integer("num_attention_heads", 32)
    return fields.build(
        AttentionConfig,
        n_heads=heads,
        n_kv_heads=fields.integer("num_key_value_heads", kv_heads or heads),
        head_dim=head_dim(fields, heads) if size is None else size,
        **{"qkv_bias": bias, "out_bias": bias, **values},
    )


def layer_types(fields: Fields, count: int, kinds: Mapping[str, str], default: str) -> list[str]:
    """Read `layer_types`, or `layers_block_type`, mapped by `kinds`; absent, all are `default`."""
    name = "layer_types" if "layer_types" in fields else "layers_block_type"
    listed = fields.values.get(name)
    if listed is None:
        return [default] * count
    mapped = (
        [kinds.get(kind) for kind in listed if isinstance(kind, str)]
        if isinstance(listed, list)
        else []
    )
    if len(mapped) != count or None in mapped or len(mapped) != len(listed):
        fields.refuse(name, f"is {show(listed)}, not {count} times one of {', '.join(kinds)}")
        return [default] * count
    return [kind for kind in mapped if kind]


def sliding_kinds(fields: Fields, slides: Callable[[int], bool]) -> list[str]:
    """Read `layer_types` of a model in which some blocks slide; if absent, `slides` decides."""
    blocks = fields.blocks()
    if fields.values.get("layer_types") is not None:
        kinds = {kind: kind for kind in ("full_attention", SLIDING)}
        return layer_types(fields, blocks, kinds, "full_attention")
    return [SLIDING if slides(block) else "full_attention" for block in range(blocks)]


def windows(
    fields: Fields, kinds: Sequence[str], context: int, default: int = WINDOW
) -> list[int | None]:
    """Return each block's window in tokens: `sliding_window` where the block slides, else None.

    A null `sliding_window` is no window, and neither is one that covers the whole `context`.
    """
    if SLIDING not in kinds or fields.values.get("sliding_window", 0) is None:
        return []
    window = fields.integer("sliding_window", default)
    return [window if kind == SLIDING and window < context else None for kind in kinds]


def same_windows(fields: Fields, context: int) -> list[int | None]:
    """Return `windows` of a model in which all blocks slide if `sliding_window` is present."""
    blocks = fields.blocks()
    return windows(fields, [SLIDING] * blocks, context) if "sliding_window" in fields else []


def used_windows(
    fields: Fields, context: int, slides: Callable[[int, int], bool] | None = None
) -> list[int | None]:
    """Return `windows` of a model that uses them if `use_sliding_window` is true.

    `slides` of a block's number and `max_window_layers` says which blocks have a window; by default
    those from `max_window_layers` on.
    """
    first = fields.integer("max_window_layers", 28, low=0)
    if not fields.boolean("use_sliding_window", False):
        return []
    slides = slides or (lambda block, first: block >= first)
    kinds = sliding_kinds(fields, lambda block: slides(block, first))
    return windows(fields, kinds, context)


def head_size(fields: Fields) -> int:
    """Return `head_dim`, or `hidden_size / num_attention_heads`."""
    if "head_dim" in fields:
        return fields.integer("head_dim")
    return head_dim(fields, fields.integer("num_attention_heads", 32))


def head_dim(fields: Fields, heads: int) -> int:
    """Return `hidden_size / num_attention_heads`, which must be whole."""
    width = fields.integer("hidden_size")
    if width % heads:
        fields.inconsistent("num_attention_heads", f"does not divide hidden_size {width}")
    return max(1, width // heads)


def rope(
    fields: Fields,
    size: int,
    *,
    base: str = "rope_theta",
    theta: float = 10000.0,
    share: float = 1.0,
    kinds: tuple[str, ...] = ROPES,
) -> RopeConfig:
    """Read the RoPE of heads of `size` values; by default it rotates `share` of each.

    As in transformers 5, the older `rope_scaling` takes precedence over `rope_parameters`, either
    over the config's field `base`, and `theta` is the default. `kinds` are the kinds of scaling
    that the family supports.
    """
    section, kind = _scaling_section(fields)
    if kind in kinds:
        section.known_only(_ROPE | _SCALED.get(kind, set()))
    else:
        field = "rope_type" if "rope_type" in section else "type"
        known = " and ".join([", ".join(kinds[:-1]), kinds[-1]]) if kinds[1:] else kinds[0]
        why = ", which changes with the length of the text" if kind in _LENGTH_DEPENDENT else ""
        section.refuse(field, f"is {str(kind)[:40]!r}{why}; {known} are known", UNSUPPORTED)
    theta = section.number("rope_theta", fields.number(base, theta))
    rotated = section.number("partial_rotary_factor", share)
    dim = int(size * rotated) if 0 < rotated <= 1 else 0
    if dim < 2 or dim % 2:
        message = f"is {rotated}, which does not rotate whole pairs in a head of {size}"
        section.inconsistent("partial_rotary_factor", message)
    scaling = _scaling(fields, section, kind, dim // 2) if kind in kinds else None
    return section.build(RopeConfig, theta=theta, dim=dim, scaling=scaling)


def _scaling_section(fields: Fields) -> tuple[Fields, object]:
    """Return the section that describes RoPE scaling, and the kind of scaling."""
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    section = fields.section(name)
    return section, section.values.get("rope_type", section.values.get("type")) or "default"


def for_kind(fields: Fields, kind: str, base: str = "rope_theta", theta: float = 1e4) -> Fields:
    """Return the fields for layers of one kind of attention, in models with a RoPE per kind.

    `base` and `theta` are as in `rope`. Newer files have a section for each kind; in older files
    scaling applies only to `full_attention`.
    """
    parameters, values = fields.values.get("rope_parameters"), dict(fields.values)
    own = parameters.get(kind) if isinstance(parameters, dict) else None
    if isinstance(own, dict):
        values["rope_parameters"] = own
    if isinstance(own, dict) or kind != "full_attention":
        values.pop("rope_scaling", None)
    values["rope_theta"] = fields.number(base, theta)
    return Fields(fields.file, values, fields.prefix, fields.refused)


def rope_magnitude(fields: Fields) -> float:
    """Return the factor on rotated queries and on rotated keys: YaRN's, LongRoPE's, or 1."""
    section, kind = _scaling_section(fields)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "longrope":
        stretched = fields.integer("max_position_embeddings", 1) / _original_context(
            fields, section
        )
        log_factor = math.log(max(1.0, section.number("factor", stretched)))
        default = math.sqrt(1 + log_factor / math.log(max(2, _original_context(fields, section))))
    else:
        log_factor = math.log(max(1.0, section.number("factor", 1.0)))
        mscale, mscale_all = (section.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
        if not mscale or not mscale_all:
            mscale, mscale_all = 1.0, 0.0
        default = (1 + 0.1 * mscale * log_factor) / max(1e-6, 1 + 0.1 * mscale_all * log_factor)
    magnitude = section.number("attention_factor", default)
    if not 0 < magnitude <= MAX_MAGNITUDE:
        section.refuse("attention_factor", f"is {magnitude}, outside 0 to {MAX_MAGNITUDE}")
    return magnitude


def positions(fields: Fields, default: int) -> int:
    """Return the number of positions: those trained, those that YaRN extends them to, or those
    that LongRoPE's short factors cover.
    """
    trained = fields.integer("max_position_embeddings", default)
    section, kind = _scaling_section(fields)
    if kind == "longrope":
        return min(trained, _original_context(fields, section))
    if kind != "yarn":
        return trained
    original = section.integer("original_max_position_embeddings", trained)
    return min(max(trained, int(original * section.number("factor", 1.0))), MAX_DIM)


def _original_context(fields: Fields, section: Fields) -> int:
    """Return the context before LongRoPE extended it, from either of two places."""
    name = "original_max_position_embeddings"
    trained = fields.integer("max_position_embeddings", MAX_DIM)
    return section.integer(name, fields.integer(name, trained))


def _scaling(fields: Fields, section: Fields, kind: object, pairs: int) -> RopeScaling | None:
    if kind == "linear":
        return section.build(RopeScaling, kind=kind, factor=section.number("factor"))
    if kind == "longrope":
        factors = section.numbers("short_factor", pairs)
        return section.build(RopeScaling, kind="each", factor=1.0, factors=factors)
    if kind not in ("llama3", "yarn"):
        return None
    trained = fields.integer("max_position_embeddings", 2048)
    context = section.integer("original_max_position_embeddings", trained)
    if kind == "llama3":
        parameters: dict[str, Any] = {name: section.number(name) for name in _LLAMA3}
    else:
        parameters = {
            "factor": section.number("factor"),
            "beta_fast": section.number("beta_fast", 32.0) or 32.0,
            "beta_slow": section.number("beta_slow", 1.0) or 1.0,
            "truncate": section.boolean("truncate", True),
        }
    return section.build(RopeScaling, kind=kind, original_context=context, **parameters)


# field with the number of experts per token
PER_TOKEN = "num_experts_per_tok"


def experts(
    fields: Fields,
    count: int,
    width: int,
    *,
    per_token: int = 2,
    form: str = "swiglu",
    d_latent: int | None = None,
    **router: Any,
) -> ExpertsConfig:
    """Read `count` experts of `width`; `per_token` is a default, `router` has `RouterConfig`'s
    fields."""
    top_k = fields.integer(PER_TOKEN, per_token)
    reachable = count // router.get("groups", 1) * router.get("top_groups", 1)
    if top_k > min(count, reachable):
        fields.inconsistent(PER_TOKEN, f"is {top_k}, of {min(count, reachable)} experts")
    return fields.build(
        ExpertsConfig,
        n_experts=count,
        d_intermediate=width,
        router=fields.build(RouterConfig, top_k=top_k, **router),
        form=form,
        d_latent=d_latent,
    )
