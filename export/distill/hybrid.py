"""What the hybrid is: which attention layers of a Transformer become selective SSMs, and of what
sizes. Blocks are counted as people count them: block n holds the n-th attention layer.
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
    """What makes mixers of that name, one of MIXERS, of the teacher's attention."""
    return MIXERS[name](teacher)


def _mamba1(teacher: ModelConfig) -> Make:
    """A head for a head, whose state is as wide as a key; dt of the rank that Mamba has."""
    rank = math.ceil(teacher.d_model / 16)
    return lambda attention: mamba1_for(attention, d_state=attention.head_dim, dt_rank=rank)


MIXERS: dict[str, Callable[[ModelConfig], Make]] = {
    "mamba2": lambda teacher: mixer_for,
    "mamba1": _mamba1,
}


def check_teacher(teacher: ModelConfig, path: Path) -> None:
    """Raise ExportError, with every reason, for a teacher that is not like a Llama."""
    faults = Faults()
    attention, mlps = _attention(teacher), teacher.layers[1::2]
    in_turn = len(mlps) == len(attention) and list(teacher.layers[::2]) == attention
    if not in_turn or not all(isinstance(layer, MlpConfig) for layer in mlps):
        faults.add("layers", "are not attention and MLP in turn")
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


def _attention(teacher: ModelConfig) -> list[AttentionConfig]:
    return [layer for layer in teacher.layers if isinstance(layer, AttentionConfig)]


def evenly(blocks: Sequence[int], kept: int) -> list[int]:
    """Those of `blocks` that are left when `kept` are taken out evenly, from the last on.

    Of 32, with 16 kept, it is every other that goes, the first of them first: as the paper does.
    """
    count = len(blocks)
    keep = {(turn + 1) * count // kept - 1 for turn in range(kept)}
    return [block for place, block in enumerate(blocks) if place not in keep]


def phases(order: Sequence[int], counts: Sequence[int], even: bool) -> list[list[int]]:
    """Which blocks are replaced in each phase: each phase has all of the one before.

    `order`: those of the last phase, the cheapest first; `counts`: how many, ascending. `even`
    spreads the earlier phases over the model instead of taking the first.
    """
    found = [sorted(order)]
    for count in reversed(counts[:-1]):
        later = found[0]
        some = evenly(later, len(later) - count) if even else sorted(order[:count])
        found.insert(0, some)
    return found


def kept_count(share: float, blocks: int) -> int:
    """How many of `blocks` keep attention; half a block counts as one."""
    return int(share * blocks + 0.5)


def parse_blocks(text: str, blocks: int) -> list[int]:
    """`0,2,5-9` → block numbers, ascending. Raises InputError with every part that names none."""
    faults, found = Faults(), set[int]()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if ends is None:
            faults.add("layers", f"{part.strip()[:40]!r} is not a number of a block, or a range")
            continue
        first = int(ends[1])
        last = int(ends[2] or first)
        if not first <= last < blocks:
            faults.add("layers", f"{part.strip()} is not within 0 to {blocks - 1}")
        else:
            found.update(range(first, last + 1))
    remedy = "name blocks to replace such as 0,2,5-9; or even, or measured"
    faults.refuse(InputError, remedy=remedy)
    return sorted(found)
