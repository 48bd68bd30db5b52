"""Shapes of the demonstration models, and of two with Mamba-1 layers that are only measured.

They are small enough to train in an hour or two on two CPU cores. The first three ship in the
package.
"""

from __future__ import annotations

from collections.abc import Callable

from edge.config import (
    AttentionConfig,
    Mamba1Config,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    RopeConfig,
)

VOCAB = 4096
CONTEXT = 512


def _mamba2(d_model: int, d_state: int, head_dim: int) -> Mamba2Config:
    inner = 2 * d_model
    return Mamba2Config(d_inner=inner, d_ssm=inner, d_state=d_state, head_dim=head_dim)


def chat_config(vocab: int = VOCAB, d_model: int = 256, blocks: str = "mmam") -> ModelConfig:
    """Return a Bamba hybrid. `m`: (mamba2, mlp); `a`: (attention, mlp), RoPE over half a head."""
    head_dim = min(64, d_model // 2)
    heads = d_model // head_dim
    attention = AttentionConfig(
        n_heads=heads,
        n_kv_heads=max(1, heads // 2),
        head_dim=head_dim,
        rope=RopeConfig(dim=head_dim // 2),
    )
    mamba = _mamba2(d_model, d_state=64, head_dim=head_dim)
    mlp = MlpConfig(d_intermediate=d_model * 5 // 2)
    mixers = [mixer for kind in blocks for mixer in (mamba if kind == "m" else attention, mlp)]
    return ModelConfig(
        family="bamba",
        vocab_size=vocab,
        d_model=d_model,
        layers=tuple(mixers),
        max_context=CONTEXT,
    )


def draft_config(vocab: int = VOCAB, d_model: int = 128, layers: int = 1) -> ModelConfig:
    """Return a small Mamba-2 that drafts for the chat model.

    A second layer would make a step 1.5 times as long. An untied head does not slow a step down.
    """
    mixer = _mamba2(d_model, d_state=32, head_dim=64)
    return ModelConfig(
        family="mamba2",
        vocab_size=vocab,
        d_model=d_model,
        layers=(mixer,) * layers,
        tie_embeddings=False,
    )


def bytes_config(d_model: int = 256, layers: int = 5) -> ModelConfig:
    """Return a Mamba-2 over UTF-8 bytes, ids 0..255 (MambaByte, arXiv 2401.13660, with SSD)."""
    mixer = _mamba2(d_model, d_state=64, head_dim=64)
    return ModelConfig(
        family="mambabyte", vocab_size=256, d_model=d_model, layers=(mixer,) * layers
    )


def mamba1_config(vocab: int = VOCAB, d_model: int = 256, layers: int = 6) -> ModelConfig:
    """Return a Mamba (arXiv 2312.00752): the architecture that Quamba quantizes."""
    mixer = Mamba1Config(d_inner=2 * d_model, dt_rank=d_model // 16)
    return ModelConfig(family="mamba", vocab_size=vocab, d_model=d_model, layers=(mixer,) * layers)


def mamba1_bytes_config(d_model: int = 256, layers: int = 5) -> ModelConfig:
    """Return a MambaByte with the paper's own layers (arXiv 2401.13660)."""
    whole = mamba1_config(256, d_model, layers)
    return whole.model_copy(update={"family": "mambabyte"})


SHAPES: dict[str, Callable[[], ModelConfig]] = {
    "chat": chat_config,
    "draft": draft_config,
    "bytes": bytes_config,
    "mamba1": mamba1_config,
    "mamba1-bytes": mamba1_bytes_config,
}
BYTES = ("bytes", "mamba1-bytes")


def config_for(which: str) -> ModelConfig:
    """Return the configuration of a model by its name in SHAPES."""
    return SHAPES[which]()
