"""A gated short convolution: C · conv(B · x), with B, C and x from one projection of the input."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from edge.mixers.base import MixerConfig, Shapes, linear_shapes


class ShortConvConfig(MixerConfig):
    """in_proj rows are [B D | C D | x D]. conv_state [B, K-1, D], of B · x; there is no ssm_state.

    Attributes:
        bias: whether in_proj, the convolution and out_proj have a bias.
    """

    first_matrix: ClassVar[str] = "in_proj"

    kind: Literal["shortconv"] = "shortconv"
    d_model: Annotated[int, Field(gt=0, le=1 << 31)]
    d_conv: Annotated[int, Field(ge=2, le=16)] = 3
    bias: bool = False

    @property
    def conv_channels(self) -> int:
        return self.d_model

    def tensor_shapes(self, d_model: int) -> Shapes:
        return (
            linear_shapes("in_proj", 3 * d_model, d_model, self.bias)
            | linear_shapes("conv1d", d_model, self.d_conv, self.bias)
            | linear_shapes("out_proj", d_model, d_model, self.bias)
        )

    def workspace(self, tokens: int, capacity: int) -> int:
        return 6 * self.d_model
