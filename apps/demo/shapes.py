"""The shapes of the three demonstration models.

They are sized for two CPU cores and an hour or two of training, and to ship inside the package.
"""

from __future__ import annotations

from edge.config import AttentionConfig, Mamba2Config, MlpConfig, ModelConfig, RopeConfig

VOCAB = 4096
CONTEXT = 512


def _mamba2(d_model: int, d_state: int, head_dim: int) -> Mamba2Config:
    inner = 2 * d_model
    return Mamba2Config(d_inner=inner, d_ssm=inner, d_state=d_state, head_dim=head_dim)


def chat_config(vocab: int = VOCAB, d_model: int = 256, blocks: str = "mmam") -> ModelConfig:
    """A Bamba hybrid: `m` is (mamba2, mlp), `a` is (attention, mlp); rotary over half a head."""
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
    """A small Mamba-2 that proposes tokens for the chat model; a second layer makes its step
    half as long again. A head apart from the embedding costs a step nothing.
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
    """A Mamba-2 over raw UTF-8 bytes, ids 0..255 (MambaByte, arXiv 2401.13660, with SSD layers)."""
    mixer = _mamba2(d_model, d_state=64, head_dim=64)
    return ModelConfig(
        family="mambabyte", vocab_size=256, d_model=d_model, layers=(mixer,) * layers
    )


def config_for(which: str) -> ModelConfig:
    """The configuration of `chat`, `draft` or `bytes`."""
    if which == "bytes":
        return bytes_config()
    return chat_config() if which == "chat" else draft_config()
