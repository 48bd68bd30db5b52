"""Parts of tiny random checkpoints for tests: tensors, a tokenizer, small files.

`tests/transformers_checkpoints.py` and `tests/state_spaces_checkpoints.py` write them in the layout
of the real ones. Every tensor is random, norms and biases too, so that no constant can hide a
mistake. A directory has a working tokenizer if its family has one: byte-level BPE, 272 tokens with
padding.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from edge.errors import CheckpointError
from edge.export.checkpoint import open_checkpoint

TOKENS = 270  # of the tokenizer
VOCABULARY = 272  # of the models: padded to a multiple of 8
END = "<|endoftext|>"
CORPUS = ["the state of the model is the whole of the past", "a robot walks and then it stops"]


def save_tokenizer(path: Path, chat_template: str | None = None) -> Path:
    """Write tokenizer.json with at most TOKENS tokens (END is 0), and the small files beside it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END},
    )
    write_json(path / "special_tokens_map.json", {"eos_token": END, "bos_token": END})
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return path


def write_json(path: Path, value: object) -> None:
    """Write `value` as JSON, with bare Infinity where it occurs, as upstream does."""
    path.write_text(json.dumps(value, indent=2))


def edit_config(path: Path, **changes: object) -> None:
    """Set fields of config.json; the value ... removes a field."""
    file = path / "config.json"
    values = json.loads(file.read_text()) | changes
    write_json(file, {k: v for k, v in values.items() if v is not ...})


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return fp32 values in a range typical of the tensor, so that states neither vanish nor
    explode.
    """

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    if name.endswith("A_log"):
        return uniform(-1.5, 1.5)
    if name.endswith(("dt_bias", "dt_proj.bias")):
        return uniform(-3.0, 1.0)
    normal = torch.randn(shape, generator=generator)
    if name.endswith(".D"):
        return normal
    if "norm" in name.split(".")[-2]:
        return uniform(0.5, 1.5) if name.endswith("weight") else 0.3 * normal
    if name.endswith("bias"):
        return 0.3 * normal
    if "embed" in name:
        return 0.5 * normal
    return normal / math.sqrt(math.prod(shape[1:]))


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Replace every parameter with one from `random_tensor`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        routed = [(n, b) for n, b in model.named_buffers() if n.endswith("_bias")]
        for name, parameter in [*sorted(model.named_parameters()), *sorted(routed)]:
            parameter.copy_(random_tensor(name, tuple(parameter.shape), generator))


def refusal(path: Path, *, read: bool = False) -> CheckpointError:
    """Return the CheckpointError of opening and reading a checkpoint; it must have a place and a
    remedy.
    """
    with pytest.raises(CheckpointError) as caught:
        checkpoint = open_checkpoint(path)
        if read:
            list(checkpoint.tensors())
    assert caught.value.file is not None and caught.value.remedy
    return caught.value
