"""What the values and weights that a graph rounds are, in the words of the papers."""

from __future__ import annotations

from edge.config import ModelConfig

# Quamba, arXiv 2410.13229, figures 9 to 11; a value's name in the floating graph → what it is
_VALUES = {
    "normed": "input of {in_proj}",
    "xz": "x and z",
    "z": "gate z",
    "xBC": "x, B, C before the convolution",
    "conv": "x of the scan",
    "dbc": "Δ of low rank, B, C",
    "low_rank_dt": "Δ of low rank",
    "dt": "Δ",
    "B": "B",
    "C": "C",
    "scan": "y",
    "joined": "y",
    "activated": "input of down_proj",
    "attended_time": "input of o_proj",
    "ssm_states": "state h",
}


def name_of(config: ModelConfig, name: str, weight: bool) -> str:
    """`layers.3.x` → "mamba2: x of the scan"; the same for every layer of a kind."""
    if not name.startswith("layers."):
        if weight:
            return "embedding and head weights" if config.tie_embeddings else f"{name}s"
        return "input of the head"
    _, index, own = name.split(".", 2)
    kind = config.layers[int(index)].kind
    if weight:
        what = {"dt_proj.bias": "dt_bias", "dt_bias": "dt_bias"}.get(own, own.replace(".", " "))
        return f"{kind}: {what}"
    if own == "x":
        what = "x before the convolution" if kind == "mamba1" else "x of the scan"
    elif own == "gated":
        what = "input of down_proj" if kind == "mlp" else "y"
    else:
        what = _VALUES.get(own, own).format(in_proj=config.layers[int(index)].first_matrix)
    return f"{kind}: {what}"
