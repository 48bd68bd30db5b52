"""Gated DeltaNet: linear attention whose state decays and is corrected by the delta rule."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from edge.mixers.base import MixerConfig, Positive, Shapes, linear_shapes, refuse_all


class GatedDeltaNetConfig(MixerConfig):
    """Gated Delta Networks (arXiv 2412.06464), with keys and queries normalized to unit length.

    q, k [G·N] and v [H·P] are convolved together, with SiLU and without a bias; the heads of a
    group share a key and a query. a and b yield a head's decay and write strength, z gates the
    normed output.

    conv_state [B, K-1, 2·G·N + H·P]; ssm_state [B, H, P, N].

    Attributes:
        beta_max: maximum write strength: 1, or 2 where the state's eigenvalues may be negative.
        norm_eps: epsilon of the gated norm. None means the epsilon of the model's norms.
    """

    recurrent: ClassVar[bool] = True
    first_matrix: ClassVar[str] = "in_proj"

    kind: Literal["gated_deltanet"] = "gated_deltanet"
    n_heads: Positive
    head_dim: Positive
    n_groups: Positive
    d_state: Positive
    d_conv: Annotated[int, Field(ge=2, le=16)] = 4
    beta_max: Annotated[float, Field(gt=0, le=2)] = 1.0
    norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _divides(self) -> GatedDeltaNetConfig:
        remainder = self.n_heads % self.n_groups
        message = f"{self.n_heads} heads do not divide into {self.n_groups} groups"
        refuse_all((message if remainder else None,))
        return self

    @property
    def group_states(self) -> int:
        """Number of values of q, and of k: G·N."""
        return self.n_groups * self.d_state

    @property
    def d_inner(self) -> int:
        """Number of values of v, and of z: H·P."""
        return self.n_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.group_states + self.d_inner

    @property
    def in_proj_rows(self) -> dict[str, int]:
        """The input projections, in the order in which a graph joins them → number of rows."""
        return {
            "q_proj": self.group_states,
            "k_proj": self.group_states,
            "v_proj": self.d_inner,
            "z_proj": self.d_inner,
            "a_proj": self.n_heads,
            "b_proj": self.n_heads,
        }

    def tensor_shapes(self, d_model: int) -> Shapes:
        shapes: Shapes = {}
        for name, rows in self.in_proj_rows.items():
            shapes |= linear_shapes(name, rows, d_model, False)
        return (
            shapes
            | linear_shapes("conv1d", self.conv_channels, self.d_conv, False)
            | {"dt_bias": (self.n_heads,), "A_log": (self.n_heads,)}
            | {"gated_norm.weight": (self.head_dim,)}
            | linear_shapes("out_proj", d_model, self.d_inner, False)
        )

    def recurrent_states(self, batch: int) -> Shapes:
        scanned = {"ssm_state": (batch, self.n_heads, self.head_dim, self.d_state)}
        return super().recurrent_states(batch) | scanned

    def log_widths(self) -> dict[str, int]:
        scanned = {"scan_x": self.d_inner, "scan_dt": 2 * self.n_heads, "scan_B": self.group_states}
        return super().log_widths() | scanned

    def workspace(self, tokens: int, capacity: int) -> int:
        # ONNX Runtime expands keys and queries to every head
        return 4 * sum(self.in_proj_rows.values()) + 4 * self.n_heads * self.d_state
