"""GGUF architecture of OLMo 2 and OLMo 3, distinguished by a sliding window.

A list says which blocks slide, or a number n says that all but every n-th do; the default is 4.
Sliding blocks may have a separate RoPE base, and RoPE is scaled only in the others. llama.cpp
ignores a list, and applies YaRN's factor of scores twice if it has its name of 2025; here both mean
what the checkpoint said. Source: llama.cpp, conversion/olmo.py, conversion/base.py and
src/models/olmo2.cpp.
"""

from __future__ import annotations

from typing import Any

from edge.export.checkpoint.gguf.architectures import (
    INERT,
    NORMS_BEHIND,
    OPTIONAL,
    QK_NORMS,
    TRANSFORMER_BLOCK,
    TREATED,
    complete_transformer,
    like_llama,
)
from edge.export.checkpoint.gguf.conversion import Metadata, Shapes

_DEFAULT_PERIOD = 4
_SLIDING_BASE = "rope.freq_base_swa"
# YaRN's `attention_factor`, by its current name and by that of 2025
_FACTORS = ("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor")
_MATRICES = {
    ours: theirs for ours, theirs in TRANSFORMER_BLOCK.items() if not ours.endswith("norm.weight")
}


def _complete(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    complete_transformer(shapes, metadata, config)
    factors = [metadata[key] for key in _FACTORS if key in metadata]
    if factors:
        config.setdefault("rope_scaling", {})["attention_factor"] = factors[0]
    pattern = config.pop("layer_types", _DEFAULT_PERIOD)
    if not config.get("sliding_window"):  # 0 is none
        config.pop("sliding_window", None)
        return
    sliding = {"rope_theta": metadata[_SLIDING_BASE]} if _SLIDING_BASE in metadata else {}
    config |= {
        "model_type": "olmo3",
        "layer_types": _kinds(pattern, config.get("num_hidden_layers")),
        "rope_parameters": {
            "full_attention": config.pop("rope_scaling", {"rope_type": "default"}),
            "sliding_attention": {"rope_type": "default"} | sliding,
        },
    }


def _kinds(pattern: Any, blocks: Any) -> Any:
    """Return the kind of each block, or a malformed `pattern` itself, which is refused later."""
    if isinstance(pattern, list) and all(isinstance(slides, bool) for slides in pattern):
        sliding = pattern
    elif type(pattern) is int and pattern >= 0 and isinstance(blocks, int) and 0 < blocks < 4096:
        sliding = [not pattern or block % pattern < pattern - 1 for block in range(blocks)]
    else:
        return pattern
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


OLMO2 = like_llama(
    "olmo2",
    rotated=False,
    optional={
        **OPTIONAL,
        "attention.sliding_window": "sliding_window",
        "attention.sliding_window_pattern": "layer_types",
    },
    inert=INERT | TREATED | {_SLIDING_BASE, *_FACTORS},
    block=_MATRICES | QK_NORMS | NORMS_BEHIND,
    complete=_complete,
)
