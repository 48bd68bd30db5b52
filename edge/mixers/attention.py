"""Causal attention with grouped heads, and RoPE of its queries and keys."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from edge.mixers.base import (
    Grown,
    MixerConfig,
    Positive,
    Shapes,
    linear_shapes,
    refuse_all,
)


class RopeScaling(Grown):
    """RoPE frequencies scaled for contexts longer than in pretraining; `edge.rope` has the maths.

    `linear` divides all frequencies by `factor`. `llama3` divides those that turn fewer than
    `low_freq_factor` times in `original_context` tokens, keeps those that turn more than
    `high_freq_factor` times, and interpolates smoothly in between. `yarn` does the same with
    `beta_slow` and `beta_fast` turns, linearly over the pairs of values in between; `truncate`
    begins and ends at whole pairs. `each` divides every frequency by its own entry of `factors`, as
    LongRoPE does. Factors that these methods apply to queries and keys are part of the weights.
    """

    later: ClassVar[frozenset[str]] = frozenset({"beta_fast", "beta_slow", "factors", "truncate"})

    kind: Literal["linear", "llama3", "yarn", "each"]
    factor: float = Field(gt=0, le=1e6)
    low_freq_factor: float = Field(default=1.0, gt=0, le=1e6)
    high_freq_factor: float = Field(default=4.0, gt=0, le=1e6)
    original_context: Positive = 8192
    beta_fast: float = Field(default=32.0, gt=0, le=1e6)
    beta_slow: float = Field(default=1.0, gt=0, le=1e6)
    truncate: bool = True
    factors: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] = ()

    @model_validator(mode="after")
    def _ascends(self) -> RopeScaling:
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"{low} {getattr(self, low)} is not below {high} {getattr(self, high)}"
                )
        return self


class RopeConfig(Grown):
    """RoPE over the first `dim` values of each head; value i is paired with i + dim/2."""

    later: ClassVar[frozenset[str]] = frozenset({"scaling"})

    theta: float = Field(default=10000.0, gt=0)
    dim: Positive
    scaling: RopeScaling | None = None

    @model_validator(mode="after")
    def _even(self) -> RopeConfig:
        if self.dim % 2:
            raise ValueError(f"rope dim {self.dim} is odd")
        if self.scaling is not None and self.scaling.kind == "yarn" and self.theta <= 1:
            raise ValueError(f"theta {self.theta} is not above 1, which yarn requires")
        factors = 0 if self.scaling is None else len(self.scaling.factors)
        per_pair = self.scaling is not None and self.scaling.kind == "each"
        if factors != (self.dim // 2 if per_pair else 0):
            raise ValueError(f"{factors} factors for {self.dim // 2} pairs of values")
        return self


class AttentionConfig(MixerConfig):
    """An attention layer. Its KV cache is a key and a value, each [B, n_kv_heads, capacity, P].

    Attributes:
        qk_norm: whether every head of q and k has an RMSNorm before RoPE, with a weight [P] each.
        qk_whole: whether that norm is over all heads at once, with a weight [heads·P] each.
        d_conv: width K of a causal convolution of q, k and v before RoPE, without SiLU and with a
            bias; conv_state [B, K-1, (n_heads + 2·n_kv_heads)·P]. None means no convolution.
        parallel: whether it reads the same residual stream as the layer before it.
        window: number of positions a token attends to, its own included. None means all.
        softcap: bound that scores approach, as softcap·tanh(score/softcap). None means unbounded.
        output_gate: whether the heads' output is multiplied by sigmoid(gate_proj(u)), elementwise.
        head_gate: the same with one gate per head.
        recalls: whether it reads the residual stream and the embedded token, concatenated, and its
            output goes to the next layer and not to the stream.
    """

    attends: ClassVar[bool] = True
    first_matrix: ClassVar[str] = "qkv_proj"
    later: ClassVar[frozenset[str]] = frozenset(
        {
            "d_conv", "head_gate", "output_gate", "parallel", "qk_norm", "qk_whole", "recalls",
            "softcap", "window",
        }
    )  # fmt: skip

    kind: Literal["attention"] = "attention"
    n_heads: Positive
    n_kv_heads: Positive
    head_dim: Positive
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_whole: bool = False
    parallel: bool = False
    output_gate: bool = False
    head_gate: bool = False
    recalls: bool = False
    window: Positive | None = None
    softcap: Annotated[float, Field(gt=0, le=1e6)] | None = None
    d_conv: Annotated[int, Field(ge=2, le=16)] | None = None

    @model_validator(mode="after")
    def _divides(self) -> AttentionConfig:
        refuse_all(
            (
                f"{self.n_heads} heads do not divide into {self.n_kv_heads} KV heads"
                if self.n_heads % self.n_kv_heads
                else None,
                f"rope dim {self.rope.dim} exceeds head_dim {self.head_dim}"
                if self.rope is not None and self.rope.dim > self.head_dim
                else None,
                f"heads of {self.head_dim} values, not a multiple of 8, cannot be convolved"
                if self.d_conv is not None and self.head_dim % 8
                else None,
                "a convolution and a gate exclude each other"
                if self.d_conv is not None and self.gates
                else None,
                "output_gate and head_gate exclude each other"
                if self.output_gate and self.head_gate
                else None,
            )
        )
        return self

    @property
    def is_parallel(self) -> bool:
        return self.parallel

    @property
    def is_aside(self) -> bool:
        return self.recalls

    def input_width(self, d_model: int) -> int:
        return 2 * d_model if self.recalls else d_model

    @property
    def conv_channels(self) -> int:
        """Number of rows of q, k and v."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim

    @property
    def gates(self) -> int:
        """Number of rows of gate_proj."""
        return self.n_heads * (self.head_dim * self.output_gate + self.head_gate)

    @property
    def looks_back(self) -> int | None:
        return self.window

    @property
    def rotation(self) -> RopeConfig | None:
        return self.rope

    def tensor_shapes(self, d_model: int) -> Shapes:
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        width = self.input_width(d_model)
        q_norm, k_norm = (q, kv) if self.qk_whole else (self.head_dim, self.head_dim)
        conv = (
            {}
            if self.d_conv is None
            else linear_shapes("conv1d", self.conv_channels, self.d_conv, True)
        )
        return (
            linear_shapes("q_proj", q, width, self.qkv_bias)
            | linear_shapes("k_proj", kv, width, self.qkv_bias)
            | linear_shapes("v_proj", kv, width, self.qkv_bias)
            | (linear_shapes("gate_proj", self.gates, width, self.qkv_bias) if self.gates else {})
            | ({"q_norm.weight": (q_norm,), "k_norm.weight": (k_norm,)} if self.qk_norm else {})
            | conv
            | linear_shapes("o_proj", d_model, q, self.out_bias)
        )

    def kv_caches(self, capacity: int, batch: int) -> Shapes:
        shape = (batch, self.n_kv_heads, capacity, self.head_dim)
        return {"key_cache": shape, "value_cache": shape}

    def workspace(self, tokens: int, capacity: int) -> int:
        return 4 * self.n_heads * self.head_dim + self.n_heads * max(tokens, capacity)
