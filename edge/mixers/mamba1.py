"""Mamba-1: a selective SSM with a diagonal A per channel and state (Mamba, algorithm 2)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from edge.mixers.base import Grown, MixerConfig, Positive, Shapes, linear_shapes, refuse_all


class Mamba1Config(MixerConfig, Grown):
    """A Mamba-1 mixer: conv_state [B, K-1, E]; ssm_state [B, N, E].

    Attributes:
        inner_eps: epsilon of the RMSNorms of dt (before `dt_proj`), B and C; None without these
            norms.
        B_groups, C_groups: number of equal groups of channels, each with its own B or C; x_proj
            rows are [dt R | B B_groups·N | C C_groups·N].
        reads_input: whether x_proj reads the input of in_proj, not the convolution's output.
    """

    recurrent: ClassVar[bool] = True
    first_matrix: ClassVar[str] = "in_proj"
    later: ClassVar[frozenset[str]] = frozenset(
        {"inner_eps", "B_groups", "C_groups", "reads_input"}
    )

    kind: Literal["mamba1"] = "mamba1"
    d_inner: Positive
    d_state: Positive = 16
    d_conv: Annotated[int, Field(ge=2, le=16)] = 4
    dt_rank: Positive
    conv_bias: bool = True
    proj_bias: bool = False
    inner_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    B_groups: Positive = 1
    C_groups: Positive = 1
    reads_input: bool = False

    @model_validator(mode="after")
    def _divides(self) -> Mamba1Config:
        refuse_all(
            (
                f"{self.C_groups} groups of C do not divide into {self.B_groups} of B"
                if self.C_groups % self.B_groups
                else None,
                f"{self.d_inner} channels do not divide into {self.C_groups} groups"
                if self.d_inner % self.C_groups
                else None,
                "B and C of several groups cannot have norms"
                if self.inner_eps is not None and self.C_groups > 1
                else None,
            )
        )
        return self

    @property
    def x_proj_parts(self) -> tuple[int, int, int]:
        """Number of values of low-rank dt, of B, and of C."""
        return self.dt_rank, self.B_groups * self.d_state, self.C_groups * self.d_state

    @property
    def BC_rows(self) -> tuple[str, slice]:
        """Name of the projection that computes B and C, and its rows that do."""
        return "x_proj", slice(self.dt_rank, sum(self.x_proj_parts))

    @property
    def conv_channels(self) -> int:
        return self.d_inner

    def tensor_shapes(self, d_model: int) -> Shapes:
        inner, state, rank = self.d_inner, self.d_state, self.dt_rank
        x_proj_columns = d_model if self.reads_input else inner
        norms: Shapes = {
            "dt_norm.weight": (rank,), "B_norm.weight": (state,), "C_norm.weight": (state,)
        }  # fmt: skip
        return (
            linear_shapes("in_proj", 2 * inner, d_model, self.proj_bias)
            | linear_shapes("conv1d", inner, self.d_conv, self.conv_bias)
            | linear_shapes("x_proj", sum(self.x_proj_parts), x_proj_columns, False)
            | (norms if self.inner_eps is not None else {})
            | linear_shapes("dt_proj", inner, rank, True)
            | {"A_log": (inner, state), "D": (inner,)}
            | linear_shapes("out_proj", d_model, inner, self.proj_bias)
        )

    def recurrent_states(self, batch: int) -> Shapes:
        scanned = {"ssm_state": (batch, self.d_state, self.d_inner)}
        return super().recurrent_states(batch) | scanned

    def log_widths(self) -> dict[str, int]:
        inner = self.d_inner
        scanned = {"scan_x": inner, "scan_dt": inner, "scan_B": self.x_proj_parts[1]}
        return super().log_widths() | scanned

    def workspace(self, tokens: int, capacity: int) -> int:
        return self.d_inner * (self.d_state + 8) + sum(self.x_proj_parts)
