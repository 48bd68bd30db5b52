"""A drafter: a small Mamba, or Transformer, whose embedding and head are a factor of its target's.

With E [V, D] the target's head, h its last hidden and Q [D, r] the first principal axes of h, the
target's logits E·h are nearly (E·Q)·(Qᵀh). The drafter's ends are E·Q [V, r], tied. It thus has
good outputs for every id before it learns anything, and is an ordinary model of width r. The first
axes of E itself, its truncated SVD, do not help: h has little variance along them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.config import (
    AttentionConfig,
    Mamba1Config,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    RopeConfig,
)
from edge.export import text_files
from edge.export.checkpoint import Checkpoint, find_layout
from edge.export.checkpoint.fields import Fields
from edge.export.distill.optimizer import initialise
from edge.export.distill.save import model_card, write_folder
from edge.export.distill.transformers_config import FAMILIES
from edge.export.network import Network
from edge.tensors import parameters

HEAD_DIM = 64
STATES = {"mamba": 16, "mamba2": 64}
ATTENTION = "attention"
MIXERS = (*STATES, ATTENTION)
CONTEXT = 4096  # of attention, where the teacher states none
MLP_STEP = 32  # widths of MLPs are multiples of it, as blocks of 4-bit weights are


def drafter_shape(
    teacher: ModelConfig, mixer: str, rank: int, layers: int, head_ids: tuple[int, ...] | None
) -> ModelConfig:
    """Return a config with `layers` of `mixer`, one of MIXERS, of width `rank`, over the teacher's
    vocabulary, of which it drafts `head_ids`, or all.

    Layers of attention alternate with MLPs, so wide that the model has as many parameters as one of
    mamba2: what a drafter costs is mostly the weights that it reads.
    """
    if mixer == ATTENTION:
        return _llama_shape(teacher, rank, layers, head_ids)
    inner = 2 * rank
    layer: Mamba1Config | Mamba2Config
    if mixer == "mamba":
        layer = Mamba1Config(d_inner=inner, d_state=STATES[mixer], dt_rank=math.ceil(rank / 16))
    else:
        head = min(HEAD_DIM, inner)
        layer = Mamba2Config(d_inner=inner, d_ssm=inner, d_state=STATES[mixer], head_dim=head)
    return ModelConfig(
        family=mixer, vocab_size=teacher.vocab_size, d_model=rank, layers=(layer,) * layers,
        head_ids=head_ids,
    )  # fmt: skip


def _llama_shape(
    teacher: ModelConfig, rank: int, layers: int, head_ids: tuple[int, ...] | None
) -> ModelConfig:
    head = HEAD_DIM if rank % HEAD_DIM == 0 else HEAD_DIM // 2
    attention = AttentionConfig(
        n_heads=rank // head, n_kv_heads=rank // head, head_dim=head, rope=RopeConfig(dim=head)
    )

    def of(d_intermediate: int) -> ModelConfig:
        block = (attention, MlpConfig(d_intermediate=d_intermediate))
        return ModelConfig(
            family="llama", vocab_size=teacher.vocab_size, d_model=rank,
            layers=block * (layers // 2), max_context=teacher.max_context or CONTEXT,
            head_ids=head_ids,
        )  # fmt: skip

    # the number of parameters is linear in the width of the MLPs
    wanted = parameters(drafter_shape(teacher, "mamba2", rank, layers, head_ids))
    least = parameters(of(MLP_STEP))
    steps = (wanted - least) / (parameters(of(2 * MLP_STEP)) - least)
    return of(MLP_STEP * (1 + max(0, round(steps))))


def most_frequent(ids: NDArray[np.int32], count: int, vocab_size: int) -> tuple[int, ...] | None:
    """Return the `count` most frequent of `ids`, ascending; the lower id of equals. None if `count`
    is the whole vocabulary.
    """
    if count >= vocab_size:
        return None
    counts = np.bincount(ids.reshape(-1), minlength=vocab_size)
    return tuple(sorted(np.argsort(-counts, kind="stable")[:count].tolist()))


@torch.no_grad()
def begin(drafter: Network, teacher: Network, hidden: Tensor) -> None:
    """Initialise the drafter: its ends by the factor found on the teacher's last `hidden` [n, D],
    its norm by that factor's sizes, the rest at random.
    """
    initialise(drafter)
    hidden = hidden.float()
    axes = torch.linalg.eigh(hidden.T @ hidden)[1][:, -drafter.config.d_model :].flip(1)
    drafter.embedding.weight.copy_(teacher.head_weight @ axes)
    drafter.norm_f.weight.copy_((hidden @ axes).square().mean(0).sqrt())


def write_drafter(
    drafter: Network, teacher: Checkpoint, folder: Path, figures: Mapping[str, Any],
    tokenizer: Path | None = None,
) -> None:  # fmt: skip
    """Write the drafter to `folder`, replacing an older one: a transformers checkpoint with the
    teacher's chat template and its tokenizer, or the one at `tokenizer`. `figures` go into the
    model card.
    """
    config = drafter.config
    values = FAMILIES[config.family](config)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    values |= {name: teacher.source_config.get(name) for name in ids}
    if config.head_ids is not None:
        values["head_ids"] = [*config.head_ids]
    _, layout = find_layout(Fields(folder / "config.json", values))
    tensors = {name: p.detach().cpu() for name, p in drafter.canonical_tensors().items()}
    files = text_files.copied(teacher, tokenizer)
    write_folder(folder, layout, tensors, values, _card(config, teacher, figures), files)


def _card(config: ModelConfig, teacher: Checkpoint, figures: Mapping[str, Any]) -> str:
    size = parameters(config) / 1e6
    drafts = "any" if config.head_ids is None else f"the {config.head_size} most frequent"
    description = (
        f"{len(config.layers)} layers of {config.family}, width {config.d_model}, {size:.1f} M "
        "parameters, distilled by `edge train draft`. Its embedding, which is also its head, began "
        f"as a factor of its target's. It drafts {drafts} tokens for that model and is of no use "
        "alone."
    )
    return model_card(teacher, f"A drafter for {teacher.path.name}", description, figures)
