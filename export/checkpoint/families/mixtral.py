"""Mixtral: like Mistral, with a mixture of experts in place of each MLP.

Source: transformers 5.23 models/mixtral, `MixtralForCausalLM`; published files name its `mlp`
`block_sparse_moe`, and its matrices w1, w3 and w2.
"""

from __future__ import annotations

from dataclasses import replace

from edge.export.checkpoint.families import llama
from edge.export.checkpoint.family import Family, experts, known_only, same_windows
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "mixtral"
_OWN = {"head_dim", "num_experts_per_tok", "num_local_experts", "sliding_window"}
_NAMES = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2.",
}  # fmt: skip


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    count, width = fields.integer("num_local_experts", 8), fields.integer("intermediate_size")
    moe = experts(fields, count, width)
    context = fields.integer("max_position_embeddings", 131072)
    layout = llama.read_blocks(
        fields,
        NAME,
        kv_heads=8,
        eps=1e-5,
        context=context,
        windows=same_windows(fields, context),
        theta=1e6,
        feed=lambda block: [moe],
    )
    layout.pieces = {
        name: replace(
            piece,
            source=_published_name(piece.source),
            stack=tuple(map(_published_name, piece.stack)),
        )
        for name, piece in layout.pieces.items()
    }
    return layout


def _published_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


FAMILY = Family.of_transformers(NAME, "MixtralForCausalLM", read)
