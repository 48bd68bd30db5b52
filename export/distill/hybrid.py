"""Define the hybrid: which attention layers of a Transformer become selective SSMs, and their
sizes. Block n holds attention layer n, counted from 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from edge.config import AttentionConfig, MlpConfig, ModelConfig
from edge.errors import ExportError, Faults, InputError
from edge.export.checkpoint.families.mamba_in_llama import Make, mamba1_for, mixer_for

CHOICES = ("even", "measured")


def mixer_maker(name: str, teacher: ModelConfig) -> Make:
    """Return a function that makes mixers `name`, one of MIXERS, from the teacher's attention."""
    return MIXERS[name](teacher)


def _mamba1(teacher: ModelConfig) -> Make:
    """Make one head per attention head, with a state as wide as a key and Mamba's rank of dt."""
    rank = math.ceil(teacher.d_model / 16)
    return lambda attention: mamba1_for(attention, d_state=attention.head_dim, dt_rank=rank)


MIXERS: dict[str, Callable[[ModelConfig], Make]] = {
    "mamba2": lambda teacher: mixer_for,
    "mamba1": _mamba1,
}


def check_teacher(teacher: ModelConfig, path: Path) -> None:
    """Raise ExportError, with every reason, for a teacher that is not built like Llama."""
    faults = Faults()
    attention, mlps = list(teacher.layers_of(AttentionConfig).values()), teacher.layers[1::2]
    in_turn = len(mlps) == len(attention) and list(teacher.layers[::2]) == attention
    if not in_turn or len(teacher.layers_of(MlpConfig)) != len(mlps):
        faults.add("layers", "do not alternate attention and MLP")
    if len({(a.n_heads, a.n_kv_heads, a.head_dim) for a in attention}) > 1:
        faults.add("layers", "do not all have the same heads")
    if any(a.out_bias for a in attention):
        faults.add("out_bias", "an SSM's output has no bias to take it")
    if any(layer.is_parallel for layer in teacher.layers):
        faults.add("mlp", "runs beside attention")
    if any(layer.norms != "before" for layer in teacher.layers):
        faults.add("norms", "are behind attention or MLP")
    if teacher.norm.kind != "rmsnorm":
        faults.add("norm", f"is a {teacher.norm.kind}")
    faults.refuse(
        ExportError, file=path, remedy="teachers are Llama, Mistral and models of their form"
    )


def evenly(blocks: Sequence[int], kept: int) -> list[int]:
    """Return the blocks to replace when `kept` of `blocks`, evenly spaced from the last, are kept.

    With 16 of 32 kept, every other block is replaced, beginning with the first, as in the paper.
    """
    count = len(blocks)
    keep = {(turn + 1) * count // kept - 1 for turn in range(kept)}
    return [block for place, block in enumerate(blocks) if place not in keep]


def phases(order: Sequence[int], counts: Sequence[int], even: bool) -> list[list[int]]:
    """Return the blocks replaced in each phase; each phase includes those of the one before.

    `order` has the blocks of the last phase, the cheapest first; `counts` are the numbers per
    phase, ascending. `even` spreads the earlier phases over the model instead of taking the first.
    """
    replaced = [sorted(order)]
    for count in reversed(counts[:-1]):
        later = replaced[0]
        chosen = evenly(later, len(later) - count) if even else sorted(order[:count])
        replaced.insert(0, chosen)
    return replaced


def kept_count(share: float, blocks: int) -> int:
    """Return how many of `blocks` keep attention; half a block counts as one."""
    return int(share * blocks + 0.5)


def parse_blocks(text: str, blocks: int) -> list[int]:
    """Parse `0,2,5-9` to ascending block numbers. Raises InputError listing every invalid part."""
    faults, numbers = Faults(), set[int]()
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if bounds is None:
            faults.add("layers", f"{part.strip()[:40]!r} is not a block number or a range")
            continue
        first = int(bounds[1])
        last = int(bounds[2] or first)
        if not first <= last < blocks:
            faults.add("layers", f"{part.strip()} is not within 0 to {blocks - 1}")
        else:
            numbers.update(range(first, last + 1))
    remedy = "name the blocks to replace, such as 0,2,5-9, or give even or measured"
    faults.refuse(InputError, remedy=remedy)
    return sorted(numbers)
