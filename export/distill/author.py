"""A checkpoint that answers many prompts at once, in PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge.errors import InputError
from edge.export.calibration.texts import checkpoint_reader
from edge.export.checkpoint import open_checkpoint
from edge.export.distill.options import device_problem, multiplies_in_bf16
from edge.export.network import Network

Ids = NDArray[np.int64]


class CheckpointAuthor:
    """Reads several sequences in step and chooses the next token of each.

    Products run in bf16 where the device supports it.
    """

    def __init__(self, path: Path, device: str, threads: int | None = None) -> None:
        """Load the checkpoint. Raises CheckpointError, or InputError for an unusable device."""
        if (problem := device_problem(device)) is not None:
            raise InputError(problem, field="device")
        if threads is not None:
            torch.set_num_threads(threads)
        checkpoint = open_checkpoint(path)
        reader = checkpoint_reader(checkpoint, checkpoint.config)
        self.tokenizer, self.template, self._device = reader.tokenizer, reader.template, device
        self._network = Network(checkpoint.config)
        self._network.load_canonical(dict(checkpoint.tensors()))
        self._network.requires_grad_(False).to(device)
        self._bf16 = multiplies_in_bf16(device)
        if self._bf16:  # once, not at every token
            for module in self._network.modules():
                if isinstance(module, nn.Linear):
                    module.to(torch.bfloat16)

    def begin(self, batch: int, longest: int, seed: str) -> None:
        """Forget what was read; `batch` sequences follow. The state grows as they do."""
        self._state = self._network.initial_state(batch)
        self._random = torch.Generator(self._device)
        self._random.manual_seed(int.from_bytes(seed.encode(), "big") % (1 << 63))

    @torch.no_grad()
    def choose(self, tokens: Ids, heat: NDArray[np.float32]) -> Ids:
        """Read tokens [B, T]; return the next of each sequence [B]: the likeliest at temperature 0
        of `heat` [B], else sampled.
        """
        ids = torch.from_numpy(tokens).to(self._device)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._bf16):
            hidden, self._state = self._network.hidden(ids, self._state)
            logits = self._network.head(hidden[:, -1])
        chosen = logits.argmax(-1)
        if (rows := np.flatnonzero(heat)).size:
            warm = torch.from_numpy(rows).to(self._device)
            divisors = torch.from_numpy(heat[rows]).to(self._device)
            p = torch.softmax(logits[warm].float() / divisors[:, None], -1)
            chosen[warm] = torch.multinomial(p, 1, generator=self._random)[:, 0]
        found: Ids = chosen.cpu().numpy()
        return found
