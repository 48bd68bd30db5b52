"""What a family's reader is, and what configs have in common: how they name themselves, and what
transformers' Transformer models say of sizes and RoPE.
"""

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
WINDOW = 4096  # of attention that slides, by default
SLIDING = "sliding_attention"

# What every Transformer says of itself.
_SIZES = frozenset(
    {
        "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
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
_WITH_LENGTH = ("dynamic", "longrope", "su")


@dataclass(frozen=True)
class Family:
    """A reader.

    Attributes:
        name: goes into `ModelConfig.family`.
        accepts: what a config must look like, in words, for the message to those that do not.
        claims: whether this reader is the one for a config.
        read: config fields → layout; raises CheckpointError for bad or unsupported fields.
        first: it is asked before the others, some of which would claim what is its own.
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
        """A family of transformers, whose `model_type` is its name; `form`: what else it has to be.

        `architecture` is the class that a config without a type names.
        """

        def claims(fields: Fields) -> bool:
            return is_transformers(fields, name, architecture)

        return cls(name, ", ".join(filter(None, (f"model_type {name}", form))), claims, read)


def is_transformers(fields: Fields, model_type: str, architecture: str) -> bool:
    """A `-hf` checkpoint. These often keep state-spaces' own keys too, beside `hidden_size`."""
    if is_state_spaces(fields):
        return False
    named = fields.values.get("architectures")
    if fields.values.get("model_type") is not None:
        return bool(fields.values["model_type"] == model_type)
    return isinstance(named, list) and architecture in named


def is_state_spaces(fields: Fields) -> bool:
    """An original state-spaces checkpoint: `MambaLMHeadModel`'s config, which names no type."""
    named = fields.values.get("model_type") in (None, "mamba", "mamba2", "mambabyte")
    return named and "d_model" in fields and "n_layer" in fields and "hidden_size" not in fields


def known_only(fields: Fields, own: Iterable[str]) -> None:
    """Refuse the fields that change a model and are not among `own`; note unknown ones."""
    if "quantization_config" in fields:
        fields.refuse(
            "quantization_config", "says that the weights are quantized already",
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
    """The model of these layers, whose RMSNorms add the field `norm`; `eps` and `tied` are what
    it and `tie_word_embeddings` are where nothing is said. A context is for layers that attend.

    Raises CheckpointError with everything that is wrong with the file.
    """
    return fields.model(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        d_model=fields.integer("hidden_size"),
        layers=layers,
        norm=fields.build(NormConfig, eps=fields.epsilon(norm, eps)),
        tie_embeddings=fields.boolean("tie_word_embeddings", tied),
        max_context=context if any(layer.attends for layer in layers) else None,
        logits_softcap=logits_softcap,
    )


def attention(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    size: int | None = None,
    bias: bool = False,
    **values: Any,
) -> AttentionConfig:
    """Attention by the fields that configs share; `values` are set beside them.

    `kv_heads` is the default, where None are as many as heads. A `size` of None is
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
    """`layer_types`, or `layers_block_type`, in our words (`kinds`); absent, all are `default`."""
    name = "layer_types" if "layer_types" in fields else "layers_block_type"
    given = fields.values.get(name)
    if given is None:
        return [default] * count
    found = (
        [kinds.get(kind) for kind in given if isinstance(kind, str)]
        if isinstance(given, list)
        else []
    )
    if len(found) != count or None in found or len(found) != len(given):
        fields.refuse(name, f"is {show(given)}, not {count} times one of {', '.join(kinds)}")
        return [default] * count
    return [kind for kind in found if kind]


def sliding_kinds(fields: Fields, slides: Callable[[int], bool]) -> list[str]:
    """`layer_types` of a model some of whose blocks look back a window only; absent, by number."""
    blocks = fields.blocks()
    if fields.values.get("layer_types") is not None:
        kinds = {kind: kind for kind in ("full_attention", SLIDING)}
        return layer_types(fields, blocks, kinds, "full_attention")
    return [SLIDING if slides(at) else "full_attention" for at in range(blocks)]


def windows(
    fields: Fields, kinds: Sequence[str], context: int, default: int = WINDOW
) -> list[int | None]:
    """How many tokens each block looks back on: `sliding_window` where it slides, which null is
    none of. A window that holds the whole `context` does nothing.
    """
    if SLIDING not in kinds or fields.values.get("sliding_window", 0) is None:
        return []
    window = fields.integer("sliding_window", default)
    return [window if kind == SLIDING and window < context else None for kind in kinds]


def same_windows(fields: Fields, context: int) -> list[int | None]:
    """`windows` of a model all of whose blocks slide where `sliding_window` is said."""
    blocks = fields.blocks()
    return windows(fields, [SLIDING] * blocks, context) if "sliding_window" in fields else []


def used_windows(
    fields: Fields, context: int, slides: Callable[[int, int], bool] | None = None
) -> list[int | None]:
    """`windows` of a model that has them where `use_sliding_window` is true. Which blocks have one
    is by their number and `max_window_layers`: by default those from there on.
    """
    first = fields.integer("max_window_layers", 28, low=0)
    if not fields.boolean("use_sliding_window", False):
        return []
    slides = slides or (lambda block, first: block >= first)
    kinds = sliding_kinds(fields, lambda block: slides(block, first))
    return windows(fields, kinds, context)


def head_size(fields: Fields) -> int:
    """`head_dim`, or `hidden_size / num_attention_heads`."""
    if "head_dim" in fields:
        return fields.integer("head_dim")
    return head_dim(fields, fields.integer("num_attention_heads", 32))


def head_dim(fields: Fields, heads: int) -> int:
    """`hidden_size / num_attention_heads`, which has to be whole."""
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
    """The rotation of heads of `size` values; `share` of each, where nothing else is said.

    As transformers 5 reads it: `rope_scaling` (before) goes before `rope_parameters`, what either
    says before the config's own field `base`, and `theta` where neither says anything. `kinds` are
    those that the family has.
    """
    given, kind = _scaling_section(fields)
    if kind in kinds:
        given.known_only(_ROPE | _SCALED.get(kind, set()))
    else:
        field = "rope_type" if "rope_type" in given else "type"
        known = " and ".join([", ".join(kinds[:-1]), kinds[-1]]) if kinds[1:] else kinds[0]
        why = ", which changes with the length of the text" if kind in _WITH_LENGTH else ""
        given.refuse(field, f"is {str(kind)[:40]!r}{why}; {known} are known", UNSUPPORTED)
    theta = given.number("rope_theta", fields.number(base, theta))
    rotated = given.number("partial_rotary_factor", share)
    dim = int(size * rotated) if 0 < rotated <= 1 else 0
    if dim < 2 or dim % 2:
        message = f"is {rotated}, which makes no whole pairs of a head of {size}"
        given.inconsistent("partial_rotary_factor", message)
    scaling = _scaling(fields, given, kind, dim // 2) if kind in kinds else None
    return given.build(RopeConfig, theta=theta, dim=dim, scaling=scaling)


def _scaling_section(fields: Fields) -> tuple[Fields, object]:
    """What says how RoPE is scaled, and the kind of scaling."""
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    given = fields.section(name)
    return given, given.values.get("rope_type", given.values.get("type")) or "default"


def for_kind(fields: Fields, kind: str, base: str = "rope_theta", theta: float = 1e4) -> Fields:
    """The config as layers of one kind of attention read it, of models whose kinds turn by RoPE of
    their own; `base` and `theta` as in `rope`.

    Newer files have a section for each kind; in older ones scaling is for `full_attention` alone.
    """
    given, values = fields.values.get("rope_parameters"), dict(fields.values)
    own = given.get(kind) if isinstance(given, dict) else None
    if isinstance(own, dict):
        values["rope_parameters"] = own
    if isinstance(own, dict) or kind != "full_attention":
        values.pop("rope_scaling", None)
    values["rope_theta"] = fields.number(base, theta)
    return Fields(fields.file, values, fields.prefix, fields.refused)


def rope_magnitude(fields: Fields) -> float:
    """What rotated queries and keys are multiplied by, each: YaRN's, LongRoPE's, or 1."""
    given, kind = _scaling_section(fields)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "longrope":
        stretched = fields.integer("max_position_embeddings", 1) / _original(fields, given)
        longer = math.log(max(1.0, given.number("factor", stretched)))
        stated = math.sqrt(1 + longer / math.log(max(2, _original(fields, given))))
    else:
        longer = math.log(max(1.0, given.number("factor", 1.0)))
        part, whole = (given.number(name, 0.0) for name in ("mscale", "mscale_all_dim"))
        if not part or not whole:
            part, whole = 1.0, 0.0
        stated = (1 + 0.1 * part * longer) / max(1e-6, 1 + 0.1 * whole * longer)
    magnitude = given.number("attention_factor", stated)
    if not 0 < magnitude <= MAX_MAGNITUDE:
        given.refuse("attention_factor", f"is {magnitude}, outside 0 to {MAX_MAGNITUDE}")
    return magnitude


def positions(fields: Fields, default: int) -> int:
    """The positions that were trained, or that YaRN stretches them to; of LongRoPE those that its
    short factors are for.
    """
    trained = fields.integer("max_position_embeddings", default)
    given, kind = _scaling_section(fields)
    if kind == "longrope":
        return min(trained, _original(fields, given))
    if kind != "yarn":
        return trained
    original = given.integer("original_max_position_embeddings", trained)
    return min(max(trained, int(original * given.number("factor", 1.0))), MAX_DIM)


def _original(fields: Fields, given: Fields) -> int:
    """The context before LongRoPE stretched it, which is said in either place."""
    name = "original_max_position_embeddings"
    trained = fields.integer("max_position_embeddings", MAX_DIM)
    return given.integer(name, fields.integer(name, trained))


def _scaling(fields: Fields, given: Fields, kind: object, pairs: int) -> RopeScaling | None:
    if kind == "linear":
        return given.build(RopeScaling, kind=kind, factor=given.number("factor"))
    if kind == "longrope":
        each = given.numbers("short_factor", pairs)
        return given.build(RopeScaling, kind="each", factor=1.0, factors=each)
    if kind not in ("llama3", "yarn"):
        return None
    trained = fields.integer("max_position_embeddings", 2048)
    context = given.integer("original_max_position_embeddings", trained)
    if kind == "llama3":
        turns: dict[str, Any] = {name: given.number(name) for name in _LLAMA3}
    else:
        turns = {
            "factor": given.number("factor"),
            "beta_fast": given.number("beta_fast", 32.0) or 32.0,
            "beta_slow": given.number("beta_slow", 1.0) or 1.0,
            "truncate": given.boolean("truncate", True),
        }
    return given.build(RopeScaling, kind=kind, original_context=context, **turns)


# how many a token goes to
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
    """`count` experts of `width`; `per_token` by default. `router` are fields of `RouterConfig`."""
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
