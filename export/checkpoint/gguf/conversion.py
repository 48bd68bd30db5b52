"""Describe how llama.cpp's conversion changes each family, so that it can be undone.

Metadata become the fields of a config.json, and tensors get back their values, so that the readers
of `edge.export.checkpoint.families` also read GGUF files. Source: llama.cpp, convert_hf_to_gguf.py,
conversion/ and gguf-py/gguf/constants.py, 2026.
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
# restores the checkpoint's order of a tensor's rows
Order = Callable[[Array], Array]


@dataclass(frozen=True)
class GgufArchitecture:
    """One value of `general.architecture`.

    Attributes:
        name: the value, and the prefix of its keys.
        required: key → field of config.json; a file without one of these keys is refused.
        optional: the same for keys that may be absent.
        inert: keys that the model does not depend on.
        fixed: fields of config.json that the architecture implies.
        ends: tensor outside blocks → its name in the checkpoint.
        block: tensor of a block, without `blk.N.` → its name in the checkpoint's layer, or the name
            of the tensor that it has some rows of, in their order.
        layer: prefix of a layer's names in the checkpoint.
        rotated: whether query and key rows are in the order of llama.cpp's RoPE, pairs adjacent.
        shifted: whether norm weights include the value that the model adds to them.
        order: (tensor of a block, config) → function that restores the order of its rows or
            columns, or None.
        sizes: keys that must equal the size of a head.
        score: score function of routers, which the key `expert_gating_func` must state.
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
    shifted: bool = False
    order: Callable[[str, Mapping[str, Any]], Order | None] = lambda tensor, config: None
    sizes: tuple[str, ...] = ("rope.dimension_count", "attention.value_length")
    score: str = "softmax"
    complete: Completion = field(default=lambda shapes, metadata, config: None)

    def restoration(self, name: str, config: Mapping[str, Any]) -> Restoration:
        """Return how to restore a tensor of the file."""
        rest = name.split(".", 2)[2] if name.startswith("blk.") and name.count(".") > 1 else name
        if self.rotated and rest.startswith(("attn_q.", "attn_k.")):
            heads = config["num_attention_heads" if rest[5] == "q" else "num_key_value_heads"]
            return _unrotated(heads)
        # the norm of a scan is not shifted
        if self.shifted and rest.endswith("norm.weight") and rest != "ssm_norm.weight":
            return Restoration(values=lambda array: array - 1)
        restoration, order = _RESTORED.get(rest, AS_IT_IS), self.order(rest, config)
        return restoration if order is None else _in_order(restoration, order)


# -- restoring values --------------------------------------------------------------------------


def _unrotated(heads: Any) -> Restoration:
    """Restore the checkpoint's order of a head's rows: the first halves of all pairs, then the
    second.

    llama.cpp rotates adjacent values; transformers rotates value i with value i + head_dim / 2.
    """

    def values(array: Array) -> Array:
        if not isinstance(heads, int) or heads < 1 or array.shape[0] % (2 * heads):
            return array  # the config is refused elsewhere
        pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return Restoration(values=values)


def _in_order(restoration: Restoration, order: Order) -> Restoration:
    """Return `restoration` followed by restoring the order of rows."""
    values = restoration.values
    return replace(restoration, values=lambda a: order(a if values is None else values(a)))


def _flat(shape: Shape) -> Shape:
    return (int(np.prod(shape)),)


def _conv(shape: Shape) -> Shape:
    return (shape[0], 1, *shape[1:])


def _vector(shape: Shape) -> Shape:
    """Squeeze Mamba-2's [H, 1] to [H]; leave Mamba-1's matrices as they are."""
    return shape[:1] if shape[1:] == (1,) else shape


def _row(shape: Shape) -> Shape:
    return (1, *_flat(shape))


_RESTORED = {
    "ffn_gate_inp_shexp.weight": Restoration(_row),
    "ssm_a": Restoration(_vector, lambda a: np.log(-a)),
    "ssm_d": Restoration(_vector),
    "ssm_norm.weight": Restoration(_flat),
    "ssm_conv1d.weight": Restoration(_conv),
    "shortconv.conv.weight": Restoration(_conv),
}
