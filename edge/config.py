"""The model description: one `ModelConfig` whose layers are a list of mixers (`edge.mixers`).

A layer computes ``x + mixer(norm(x))``, or normalizes the mixer's output. A transformer block
(attention, then MLP) is two layers here, so hybrids need no special case. In GPT-NeoX blocks both
layers read the same x: the MLP is `parallel` to the layer before it. In Zamba2 attention and MLP
run aside: their output, computed from x and the embedded token, is added to the input of the next
layer, and x stays as it was.

Symbols (Mamba, arXiv 2312.00752; Mamba-2, arXiv 2405.21060):

    B  batch                     T  tokens in this run
    D  d_model                   V  vocab_size (rows of the embedding, padding included)
    E  d_inner (Mamba-1)         N  d_state
    K  d_conv                    R  dt_rank
    H  heads                     P  head_dim
    G  n_groups
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar, Union

from pydantic import Field, model_validator

from edge import mixers
from edge.mixers.attention import AttentionConfig, RopeConfig, RopeScaling
from edge.mixers.base import Frozen, Grown, MixerConfig, Positive, refuse_all
from edge.mixers.experts import ExpertsConfig, RouterConfig
from edge.mixers.gated_deltanet import GatedDeltaNetConfig
from edge.mixers.mamba1 import Mamba1Config
from edge.mixers.mamba2 import Mamba2Config
from edge.mixers.mlp import MlpConfig
from edge.mixers.shortconv import ShortConvConfig

__all__ = [
    "AttentionConfig",
    "ExpertsConfig",
    "GatedDeltaNetConfig",
    "Mamba1Config",
    "Mamba2Config",
    "Mixer",
    "MlpConfig",
    "ModelConfig",
    "NormConfig",
    "RopeConfig",
    "RopeScaling",
    "RouterConfig",
    "ShortConvConfig",
]

if TYPE_CHECKING:
    Mixer = MixerConfig
else:
    Mixer = Annotated[Union[mixers.every()], Field(discriminator="kind")]  # noqa: UP007


Kind = TypeVar("Kind", bound=MixerConfig)


class NormConfig(Frozen):
    """The norm of every layer and before the head. `layernorm` has a bias, `rmsnorm` has none."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: float = Field(default=1e-5, gt=0, lt=1)


class ModelConfig(Grown):
    """A language model: embedding, layers, final norm, head.

    Attributes:
        family: model family of the checkpoint (`mamba`, `mamba2`, `mambabyte`, `bamba`, …).
        vocab_size: number of rows of the embedding and the head, padding included.
        tie_embeddings: whether the head uses the embedding's matrix.
        head_ids: ids that a tied head computes logits of, ascending; the others are never likely.
            None means all. A drafter saves most of its head this way (FR-Spec, arXiv 2502.14856).
        max_context: number of positions attention was trained for; None without attention.
        logits_softcap: bound that logits approach, as cap·tanh(logit/cap). None means unbounded.
    """

    later: ClassVar[frozenset[str]] = frozenset({"logits_softcap", "head_ids"})

    family: str = Field(min_length=1, max_length=64)
    vocab_size: Positive
    d_model: Positive
    layers: tuple[Mixer, ...] = Field(min_length=1, max_length=4096)
    norm: NormConfig = NormConfig()
    tie_embeddings: bool = True
    max_context: Positive | None = None
    logits_softcap: Annotated[float, Field(gt=0, le=1e6)] | None = None
    head_ids: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _layers_fit_together(self) -> ModelConfig:
        previous: MixerConfig | None = None
        faults = []
        for index, layer in enumerate(self.layers):
            unpaired = previous is None or previous.is_parallel or previous.is_aside
            if layer.is_parallel and (unpaired or layer.is_aside):
                faults.append(f"layers.{index} is parallel to no layer before it")
            recalls = layer.input_width(self.d_model) != self.d_model
            if layer.is_aside and recalls == (previous is not None and previous.is_aside):
                faults.append(f"layers.{index} cannot be aside after the layer before it")
            previous = layer
        if previous is not None and previous.is_aside:
            faults.append("the last layer is aside, and nothing reads it")
        if self.head_ids is not None and not self._ascend(self.head_ids):
            faults.append(f"head_ids are not ascending ids below {self.vocab_size}")
        if self.head_ids is not None and not self.tie_embeddings:
            faults.append("head_ids choose rows of the embedding, and the head is not tied to it")
        refuse_all(faults)
        return self

    def _ascend(self, ids: tuple[int, ...]) -> bool:
        bounds = (-1, *ids, self.vocab_size)
        return len(ids) > 0 and all(low < high for low, high in pairwise(bounds))

    @property
    def head_size(self) -> int:
        """Number of rows of the head's product."""
        return self.vocab_size if self.head_ids is None else len(self.head_ids)

    def layers_of(self, kind: type[Kind]) -> dict[int, Kind]:
        """Return the layers whose mixer is of one class, by index."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, kind)}

    def parallel(self, index: int) -> bool:
        """Return whether a layer reads the same residual stream as the layer before it."""
        return self.layers[index].is_parallel

    @property
    def kinds(self) -> dict[str, int]:
        """Number of layers of each kind, in order of first appearance."""
        return dict(Counter(layer.kind for layer in self.layers))

    @property
    def has_attention(self) -> bool:
        return any(layer.attends for layer in self.layers)

    @property
    def conv_widths(self) -> list[int]:
        """Distinct widths K of the convolutions, ascending."""
        return sorted({layer.conv_width for layer in self.layers if layer.conv_width is not None})
