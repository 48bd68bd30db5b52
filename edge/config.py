"""What a model is: one `ModelConfig` whose layers are a list of mixers.

A layer is always ``x + mixer(norm(x))``. A transformer block (attention, then MLP) is two
layers here, so hybrids need no special case.

Symbols (Mamba, arXiv 2312.00752; Mamba-2, arXiv 2405.21060):

    B  batch                     T  tokens in this run
    D  d_model                   V  vocab_size (rows of the embedding, padding included)
    E  d_inner (Mamba-1)         N  d_state
    K  d_conv                    R  dt_rank
    H  heads                     P  head_dim
    G  n_groups
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

Positive = Annotated[int, Field(gt=0, le=1 << 31)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NormConfig(_Frozen):
    """The norm before every layer and before the head. `layernorm` has a bias, `rmsnorm` none."""

    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: float = Field(default=1e-5, gt=0, lt=1)


class Mamba1Config(_Frozen):
    """Selective SSM with a diagonal A per channel and state (Mamba, algorithm 2).

    conv_state [B, K-1, E]; ssm_state [B, N, E].
    """

    kind: Literal["mamba1"] = "mamba1"
    d_inner: Positive
    d_state: Positive = 16
    d_conv: Annotated[int, Field(ge=2, le=16)] = 4
    dt_rank: Positive
    conv_bias: bool = True
    proj_bias: bool = False

    @property
    def conv_channels(self) -> int:
        return self.d_inner


class Mamba2Config(_Frozen):
    """Selective SSM with a scalar A per head (Mamba-2, section 7).

    in_proj rows are [z0 d_mlp | x0 d_mlp | z d_ssm | x d_ssm | B G·N | C G·N | dt H] with
    d_mlp = d_inner - d_ssm (usually 0). The gated norm is norm(y·silu(z)) over groups of d_ssm/G.

    conv_state [B, K-1, d_ssm + 2·G·N]; ssm_state [B, H, P, N].
    """

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
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @model_validator(mode="after")
    def _divides(self) -> Mamba2Config:
        if self.d_ssm % self.head_dim:
            raise ValueError(f"d_ssm {self.d_ssm} is not a multiple of head_dim {self.head_dim}")
        if self.n_heads % self.n_groups:
            raise ValueError(f"{self.n_heads} heads do not divide into {self.n_groups} groups")
        if self.d_ssm > self.d_inner:
            raise ValueError(f"d_ssm {self.d_ssm} exceeds d_inner {self.d_inner}")
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
    def conv_channels(self) -> int:
        return self.d_ssm + 2 * self.n_groups * self.d_state

    @property
    def in_proj_rows(self) -> int:
        return 2 * self.d_mlp + self.d_ssm + self.conv_channels + self.n_heads


class RopeConfig(_Frozen):
    """Rotary embedding over the first `dim` values of each head, half against half."""

    theta: float = Field(default=10000.0, gt=0)
    dim: Positive

    @model_validator(mode="after")
    def _even(self) -> RopeConfig:
        if self.dim % 2:
            raise ValueError(f"rope dim {self.dim} is odd")
        return self


class AttentionConfig(_Frozen):
    """Causal attention with grouped heads.

    kv_cache: key and value, each [B, n_kv_heads, capacity, P].
    """

    kind: Literal["attention"] = "attention"
    n_heads: Positive
    n_kv_heads: Positive
    head_dim: Positive
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    out_bias: bool = False

    @model_validator(mode="after")
    def _divides(self) -> AttentionConfig:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} heads do not divide into {self.n_kv_heads} KV heads")
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ValueError(f"rope dim {self.rope.dim} exceeds head_dim {self.head_dim}")
        return self


class MlpConfig(_Frozen):
    """down(silu(gate(x)) · up(x)). Stateless."""

    kind: Literal["mlp"] = "mlp"
    d_intermediate: Positive
    bias: bool = False


Mixer = Annotated[
    Mamba1Config | Mamba2Config | AttentionConfig | MlpConfig, Field(discriminator="kind")
]


class ModelConfig(_Frozen):
    """A language model: embedding, layers, final norm, head.

    Attributes:
        family: where the checkpoint came from (`mamba`, `mamba2`, `mambabyte`, `bamba`, …).
        vocab_size: rows of the embedding and the head, padding included.
        tie_embeddings: the head is the embedding.
        max_context: the positions the attention layers were trained for; None without attention.
    """

    family: str = Field(min_length=1, max_length=64)
    vocab_size: Positive
    d_model: Positive
    layers: tuple[Mixer, ...] = Field(min_length=1, max_length=4096)
    norm: NormConfig = NormConfig()
    tie_embeddings: bool = True
    max_context: Positive | None = None

    @property
    def has_attention(self) -> bool:
        return any(layer.kind == "attention" for layer in self.layers)
