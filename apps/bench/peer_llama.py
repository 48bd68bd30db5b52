"""llama.cpp through llama-cpp-python's low-level interface: decoding only, no sampling."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np

from edge.apps.bench.peers import Logits, Rounding, Tokens, Workspace, installed
from edge.errors import EngineError

BATCH = 512  # a prompt of 256 is then one physical batch
_ROUNDING: dict[str, Rounding] = {"f16": "fp16", "q8_0": "w8", "q4_0": "w4"}


class LlamaPeer:
    """One sequence. Batches are filled before they are needed, so only decoding is timed."""

    note = ""

    def __init__(self, workspace: Workspace, kind: str, threads: int) -> None:
        self.name = f"llama-{kind}"
        self.rounding = _ROUNDING[kind]
        self.version = f"llama-cpp-python {installed('llama-cpp-python')}"
        self._vocab_size = workspace.shape.vocab_size
        path = workspace.gguf(kind)
        self.weight_bytes = path.stat().st_size
        self._llama = llama = importlib.import_module("llama_cpp")
        self._quiet = llama.llama_log_callback(_ignore)
        llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(
            str(path).encode(), llama.llama_model_default_params()
        )
        if not self._model:
            raise EngineError("llama.cpp refuses the file", file=path)
        self._context = llama.llama_init_from_model(self._model, self._parameters(threads))
        if not self._context:
            raise EngineError("llama.cpp makes no context for the model", file=path)
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        self._position = 0

    def _parameters(self, threads: int) -> Any:
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx = 4 * BATCH
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.no_perf = True
        return parameters

    def prefill(self, tokens: Tokens, *, every_row: bool = False) -> Logits:
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        self._position = 0
        return self._decode(tokens, every_row)

    def run(self, tokens: Tokens) -> Logits:
        return self._decode(tokens, True)

    def step(self, token: int) -> Logits:
        return self._decode(np.array([token], np.int64), True)

    def close(self) -> None:
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)

    def _decode(self, tokens: Tokens, every_row: bool) -> Logits:
        count = len(tokens)
        self._fill(tokens, every_row)
        status = self._llama.llama_decode(self._context, self._batch)
        if status:
            raise EngineError(f"llama_decode returned {status}")
        self._position += count
        rows = count if every_row else 1
        # reading the logits waits for the computation
        pointer = self._llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(rows, self._vocab_size))

    def _fill(self, tokens: Tokens, every_row: bool) -> None:
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for index in range(count):
            batch.token[index] = int(tokens[index])
            batch.pos[index] = self._position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = every_row or index == count - 1


def _ignore(level: int, text: bytes, data: object) -> None:
    """llama.cpp's log goes nowhere."""
