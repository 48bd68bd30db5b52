"""The models that are measured, as configs."""

from __future__ import annotations

from collections.abc import Mapping

from edge.config import (
    AttentionConfig,
    Mamba1Config,
    Mamba2Config,
    Mixer,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)
from edge.errors import InputError


def _model(family: str, d_model: int, layers: tuple[Mixer, ...], vocab: int) -> ModelConfig:
    return ModelConfig(
        family=family,
        d_model=d_model,
        vocab_size=vocab,
        layers=layers,
        norm=NormConfig(),
        tie_embeddings=True,
    )


def _mamba(d_model: int, layers: int, vocab: int = 50280) -> ModelConfig:
    mixer = Mamba1Config(d_inner=2 * d_model, dt_rank=-(-d_model // 16))
    return _model("mamba", d_model, (mixer,) * layers, vocab)


def _mamba2(d_model: int, layers: int, d_state: int = 128, vocab: int = 50288) -> ModelConfig:
    inner = 2 * d_model
    mixer = Mamba2Config(d_inner=inner, d_ssm=inner, head_dim=min(64, inner), d_state=d_state)
    return _model("mamba2", d_model, (mixer,) * layers, vocab)


def _hybrid(d_model: int, blocks: int, vocab: int = 50288) -> ModelConfig:
    """Mamba-2 and attention in turn, a gated MLP after each."""
    mixer = _mamba2(d_model, 1).layers[0]
    heads = max(1, d_model // 64)
    attention = AttentionConfig(
        n_heads=heads,
        n_kv_heads=max(1, heads // 4),
        head_dim=64,
        rope=RopeConfig(theta=10_000.0, dim=64),
    )
    mlp = MlpConfig(d_intermediate=2 * d_model)
    return _model("bamba", d_model, (mixer, mlp, attention, mlp) * blocks, vocab)


MODELS: Mapping[str, ModelConfig] = {
    "mamba-130m": _mamba(768, 24),
    "mamba-1.4b": _mamba(2048, 48),
    "mamba-2.8b": _mamba(2560, 64),
    "mamba2-2.7b": _mamba2(2560, 64),
    "hybrid-1b": _hybrid(2048, 8),
    # for tests of this report, through the interpreter
    "tiny-mamba": _mamba(64, 2, vocab=320),
    "tiny-mamba2": _mamba2(64, 2, d_state=16, vocab=320),
    "tiny-hybrid": _hybrid(64, 1, vocab=320),
}
DEFAULT = tuple(name for name in MODELS if not name.startswith("tiny"))


def model_named(name: str) -> ModelConfig:
    """Raises InputError for a name that is not in MODELS."""
    if name not in MODELS:
        raise InputError(f"there is no model {name!r}", field="models", remedy=", ".join(MODELS))
    return MODELS[name]


def period(config: ModelConfig) -> int:
    """How many different layers are made: two of one kind, or the hybrid's whole pattern."""
    kinds = [layer.kind for layer in config.layers]
    size = 4 if "attention" in kinds else 2
    assert kinds == kinds[:size] * (len(kinds) // size)
    return size
