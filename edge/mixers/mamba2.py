"""Mamba-2: a selective SSM with a scalar A per head (Mamba-2, section 7)."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_serializer, model_validator

from edge.mixers.base import Grown, MixerConfig, Positive, Shapes, linear_shapes, refuse_all


def _infinity(bound: object) -> object:
    """Turn "inf" and "-inf", which stand for infinities in JSON, into numbers."""
    return float(bound) if bound in ("inf", "-inf") else bound


# `infinite` tells the C library to accept these strings
_Bound = Annotated[float, BeforeValidator(_infinity), Field(json_schema_extra={"infinite": True})]


class Mamba2Config(MixerConfig, Grown):
    """A Mamba-2 mixer: conv_state [B, K-1, d_ssm + 2·G·N]; ssm_state [B, H, P, N].

    in_proj rows are [z0 d_mlp | x0 d_mlp | z d_ssm | x d_ssm | B G·N | C G·N | dt H] with
    d_mlp = d_inner - d_ssm (usually 0). The gated norm is norm(y·silu(z)) over groups of d_ssm/G;
    `norm_before_gate` makes it norm(y)·silu(z).
    """

    recurrent: ClassVar[bool] = True
    first_matrix: ClassVar[str] = "in_proj"
    later: ClassVar[frozenset[str]] = frozenset({"norm_before_gate"})

    kind: Literal["mamba2"] = "mamba2"
    d_inner: Positive
    d_ssm: Positive
    d_state: Positive = 128
    d_conv: Annotated[int, Field(ge=2, le=16)] = 4
    head_dim: Positive = 64
    n_groups: Positive = 1
    conv_bias: bool = True
    proj_bias: bool = False
    gated_norm: bool = True
    dt_limit: tuple[_Bound, _Bound] = (0.0, math.inf)
    norm_before_gate: bool = False

    @model_validator(mode="after")
    def _divides(self) -> Mamba2Config:
        heads, remainder = divmod(self.d_ssm, self.head_dim)
        refuse_all(
            (
                f"d_ssm {self.d_ssm} is not a multiple of head_dim {self.head_dim}"
                if remainder
                else f"{heads} heads do not divide into {self.n_groups} groups"
                if heads % self.n_groups
                else None,
                f"d_ssm {self.d_ssm} exceeds d_inner {self.d_inner}"
                if self.d_ssm > self.d_inner
                else None,
            )
        )
        return self

    @field_serializer("dt_limit", when_used="json")
    def _plain_json(self, limit: tuple[float, float]) -> list[float | str]:
        # JSON has no infinity; the string reads back as the same float
        return [bound if math.isfinite(bound) else str(bound) for bound in limit]

    @property
    def n_heads(self) -> int:
        return self.d_ssm // self.head_dim

    @property
    def d_mlp(self) -> int:
        return self.d_inner - self.d_ssm

    @property
    def group_states(self) -> int:
        """Number of values of B, and of C: G·N."""
        return self.n_groups * self.d_state

    @property
    def BC_rows(self) -> tuple[str, slice]:
        """Name of the projection that computes B and C, and its rows that do."""
        first = 2 * self.d_inner
        return "in_proj", slice(first, first + 2 * self.group_states)

    @property
    def conv_channels(self) -> int:
        return self.d_ssm + 2 * self.group_states

    @property
    def in_proj_rows(self) -> int:
        return 2 * self.d_mlp + self.d_ssm + self.conv_channels + self.n_heads

    def tensor_shapes(self, d_model: int) -> Shapes:
        heads = (self.n_heads,)
        shapes = (
            linear_shapes("in_proj", self.in_proj_rows, d_model, self.proj_bias)
            | linear_shapes("conv1d", self.conv_channels, self.d_conv, self.conv_bias)
            | {"dt_bias": heads, "A_log": heads, "D": heads}
        )
        if self.gated_norm:
            shapes["gated_norm.weight"] = (self.d_ssm,)
        return shapes | linear_shapes("out_proj", d_model, self.d_inner, self.proj_bias)

    def recurrent_states(self, batch: int) -> Shapes:
        scanned = {"ssm_state": (batch, self.n_heads, self.head_dim, self.d_state)}
        return super().recurrent_states(batch) | scanned

    def log_widths(self) -> dict[str, int]:
        scanned = {"scan_x": self.d_ssm, "scan_dt": self.n_heads, "scan_B": self.group_states}
        return super().log_widths() | scanned

    def workspace(self, tokens: int, capacity: int) -> int:
        return 4 * self.in_proj_rows + 5 * self.n_heads * tokens
