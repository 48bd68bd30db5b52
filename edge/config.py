"""What a model is: one `ModelConfig` whose layers are a list of mixers.

A layer is always ``x + mixer(norm(x))``. A transformer block (attention, then MLP) is two
layers here, so hybrids need no special case. In blocks of GPT-NeoX both read the same x: their MLP
is `parallel` to the layer before it.

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
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_serializer,
    model_serializer,
    model_validator,
)

Positive = Annotated[int, Field(gt=0, le=1 << 31)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Grown(_Frozen):
    """A config that got fields later: where they hold their default they are not written, so that
    a runtime from before reads the models that it can run.
    """

    later: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _as_before(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = written(self)
        fields = type(self).model_fields
        plain = {name for name in self.later if getattr(self, name) == fields[name].default}
        return {name: value for name, value in data.items() if name not in plain}


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


class RopeScaling(_Frozen):
    """Frequencies changed for contexts longer than those of pretraining; `edge.rope` has the maths.

    `linear` divides all of them by `factor`. `llama3` divides those that turn fewer than
    `low_freq_factor` times in `original_context` tokens, leaves those that turn more than
    `high_freq_factor` times, and goes smoothly from one to the other between.
    """

    kind: Literal["linear", "llama3"]
    factor: float = Field(gt=0, le=1e6)
    low_freq_factor: float = Field(default=1.0, gt=0, le=1e6)
    high_freq_factor: float = Field(default=4.0, gt=0, le=1e6)
    original_context: Positive = 8192

    @model_validator(mode="after")
    def _ascends(self) -> RopeScaling:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
                f"{self.high_freq_factor}"
            )
        return self


class RopeConfig(_Grown):
    """Rotary embedding over the first `dim` values of each head, half against half."""

    later: ClassVar[frozenset[str]] = frozenset({"scaling"})

    theta: float = Field(default=10000.0, gt=0)
    dim: Positive
    scaling: RopeScaling | None = None

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


class MlpConfig(_Grown):
    """Feed-forward, stateless. `swiglu` is down(silu(gate(x)) · up(x)), `gelu` down(gelu(up(x))),
    and `gelu_tanh` the same with the tanh approximation of GELU.

    Attributes:
        parallel: it reads the stream as the layer before it did, not what that made of it:
            x + before(norm(x)) + mlp(norm'(x)).
    """

    later: ClassVar[frozenset[str]] = frozenset({"form", "parallel"})

    kind: Literal["mlp"] = "mlp"
    d_intermediate: Positive
    bias: bool = False
    form: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    parallel: bool = False

    @property
    def gated(self) -> bool:
        return self.form == "swiglu"


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

    @model_validator(mode="after")
    def _has_what_is_parallel(self) -> ModelConfig:
        for index in range(len(self.layers)):
            if self.parallel(index) and (index == 0 or self.parallel(index - 1)):
                raise ValueError(f"layers.{index} is parallel to no layer before it")
        return self

    def parallel(self, index: int) -> bool:
        """Whether a layer reads the residual stream as the one before it did."""
        layer = self.layers[index]
        return isinstance(layer, MlpConfig) and layer.parallel

    @property
    def has_attention(self) -> bool:
        return any(layer.kind == "attention" for layer in self.layers)
