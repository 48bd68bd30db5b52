"""OLMo 3: like OLMo 2, with a sliding window in three of four blocks, and YaRN in the others.

Source: transformers 5.23 models/olmo3, `Olmo3ForCausalLM`.
"""

from __future__ import annotations

from edge.export.checkpoint.families import llama, olmo2
from edge.export.checkpoint.family import (
    Family,
    for_kind,
    known_only,
    positions,
    sliding_kinds,
    windows,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "olmo3"
THETA = 5e5
_OWN = {"attention_bias", "head_dim", "layer_types", "sliding_window"}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    kinds = sliding_kinds(fields, lambda block: (block + 1) % 4 > 0)
    fields_by_kind = {kind: for_kind(fields, kind, theta=THETA) for kind in sorted({*kinds})}
    context = positions(fields_by_kind.get("full_attention", fields), 2048)
    return llama.read_blocks(
        fields,
        NAME,
        context=context,
        windows=windows(fields, kinds, context),
        turned=[fields_by_kind[kind] for kind in kinds],
        **olmo2.BLOCKS,
    )


FAMILY = Family.of_transformers(NAME, "Olmo3ForCausalLM", read)
