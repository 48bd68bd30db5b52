"""What a family reader is, and the questions that tell one checkpoint format from another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout


@dataclass(frozen=True)
class Family:
    """A reader.

    Attributes:
        name: goes into `ModelConfig.family`.
        accepts: what a config must look like, in words, for the message to those that do not.
        claims: whether this reader is the one for a config.
        read: config fields → layout; raises CheckpointError for a bad or unsupported field.
    """

    name: str
    accepts: str
    claims: Callable[[Fields], bool]
    read: Callable[[Fields], Layout]


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
