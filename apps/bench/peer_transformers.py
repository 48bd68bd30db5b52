"""transformers, eager fp32: the reference that results are judged by, and a peer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import MambaForCausalLM
from transformers.utils import logging

from edge.apps.bench.peers import Logits, Rounding, Tokens, Workspace, installed


class TransformersPeer:
    """Steps through its cache. Its Mamba starts from zeros when given several tokens, cache or
    not (5.23), so a run goes token by token.
    """

    name = "transformers"
    rounding: Rounding = "fp32"
    note = "eager fp32; continues by single tokens only, so its 4-token run is 4 steps"

    def __init__(self, workspace: Workspace, threads: int) -> None:
        torch.set_num_threads(threads)
        log: Any = logging
        log.set_verbosity_error()
        log.disable_progress_bar()
        checkpoint = workspace.checkpoint
        self.version = f"{installed('transformers')}, torch {torch.__version__}"
        self.weight_bytes = (checkpoint / "model.safetensors").stat().st_size
        model: Any = MambaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._model = model.eval()
        self._cache: Any = None

    def prefill(self, tokens: Tokens, *, every_row: bool = False) -> Logits:
        return self._forward(tokens, None, keep=0 if every_row else 1)

    def run(self, tokens: Tokens) -> Logits:
        return np.concatenate([self.step(int(token)) for token in tokens])

    def step(self, token: int) -> Logits:
        return self._forward(np.array([token], np.int64), self._cache, keep=1)

    def whole(self, tokens: Tokens) -> Logits:
        """Logits of each token of one pass without a cache: the reference."""
        with torch.inference_mode():
            out = self._model(torch.from_numpy(tokens)[None], use_cache=False)
        logits: Logits = out.logits[0].float().numpy()
        return logits

    def close(self) -> None:
        self._model = self._cache = None

    def _forward(self, tokens: Tokens, cache: Any, keep: int) -> Logits:
        with torch.inference_mode():
            out = self._model(
                torch.from_numpy(tokens)[None],
                cache_params=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        self._cache = out.cache_params
        logits: Logits = out.logits[0].numpy()
        return logits
