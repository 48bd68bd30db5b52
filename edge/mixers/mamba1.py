"""Mamba-1: a selective SSM with a diagonal A per channel and state (Mamba, algorithm 2)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from edge.mixers.base import Grown, MixerConfig, Positive, Shapes, linear_shapes


class Mamba1Config(MixerConfig, Grown):
    """conv_state [B, K-1, E]; ssm_state [B, N, E].

    Attributes:
        inner_eps: what the RMSNorms of dt (before `dt_proj`), B and C add to the mean square; None
            without these norms.
    """

    recurrent: ClassVar[bool] = True
    later: ClassVar[frozenset[str]] = frozenset({"inner_eps"})

    kind: Literal["mamba1"] = "mamba1"
    d_inner: Positive
    d_state: Positive = 16
    d_conv: Annotated[int, Field(ge=2, le=16)] = 4
    dt_rank: Positive
    conv_bias: bool = True
    proj_bias: bool = False
    inner_eps: Annotated[float, Field(gt=0, lt=1)] | None = None

    @property
    def conv_channels(self) -> int:
        return self.d_inner

    @property
    def conv_width(self) -> int:
        return self.d_conv

    @property
    def first_matrix(self) -> str:
        return "in_proj"

    def tensor_shapes(self, d_model: int) -> Shapes:
        inner, state, rank = self.d_inner, self.d_state, self.dt_rank
        norms: Shapes = {
            "dt_norm.weight": (rank,), "B_norm.weight": (state,), "C_norm.weight": (state,)
        }  # fmt: skip
        return (
            linear_shapes("in_proj", 2 * inner, d_model, self.proj_bias)
            | linear_shapes("conv1d", inner, self.d_conv, self.conv_bias)
            | linear_shapes("x_proj", rank + 2 * state, inner, False)
            | (norms if self.inner_eps is not None else {})
            | linear_shapes("dt_proj", inner, rank, True)
            | {"A_log": (inner, state), "D": (inner,)}
            | linear_shapes("out_proj", d_model, inner, self.proj_bias)
        )

    def recurrent_states(self, batch: int) -> Shapes:
        return {
            "conv_state": (batch, self.d_conv - 1, self.d_inner),
            "ssm_state": (batch, self.d_state, self.d_inner),
        }

    def log_widths(self) -> dict[str, int]:
        inner = self.d_inner
        return {"conv_in": inner, "scan_x": inner, "scan_dt": inner, "scan_B": self.d_state}

    def workspace(self, tokens: int, capacity: int) -> int:
        return self.d_inner * (self.d_state + 8)
