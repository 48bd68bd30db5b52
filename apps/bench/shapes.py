"""Model shapes to measure: those of the published Mamba checkpoints, and one for tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge.errors import InputError


@dataclass(frozen=True)
class Shape:
    """Sizes of a Mamba model with tied embeddings, expansion 2, 16 states and 4 conv taps."""

    name: str
    layers: int
    d_model: int
    vocab_size: int = 50280
    d_state: int = 16
    d_conv: int = 4

    @property
    def d_inner(self) -> int:
        return 2 * self.d_model

    @property
    def dt_rank(self) -> int:
        return math.ceil(self.d_model / 16)

    def mixer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors of one mixer as transformers names and shapes them."""
        inner, rank, state = self.d_inner, self.dt_rank, self.d_state
        return {
            "in_proj.weight": (2 * inner, self.d_model),
            "conv1d.weight": (inner, 1, self.d_conv),
            "conv1d.bias": (inner,),
            "x_proj.weight": (rank + 2 * state, inner),
            "dt_proj.weight": (inner, rank),
            "dt_proj.bias": (inner,),
            "A_log": (inner, state),
            "D": (inner,),
            "out_proj.weight": (self.d_model, inner),
        }

    @property
    def parameters(self) -> int:
        mixer = sum(math.prod(shape) for shape in self.mixer_shapes().values())
        return self.layers * (mixer + self.d_model) + (self.vocab_size + 1) * self.d_model


_ALL = (
    Shape("tiny", 2, 64, vocab_size=512),
    Shape("130m", 24, 768),
    Shape("370m", 48, 1024),
    Shape("790m", 48, 1536),
    Shape("1.4b", 48, 2048),
)
SHAPES = {shape.name: shape for shape in _ALL}


def shape_named(name: str) -> Shape:
    """Raises InputError for a name that is not in SHAPES."""
    if name not in SHAPES:
        raise InputError(f"there is no shape {name!r}", field="shape", remedy=", ".join(SHAPES))
    return SHAPES[name]
