"""Peers to measure: this runtime, llama.cpp and transformers, each with the model loaded.

Peers whose names end in -cuda run on an NVIDIA GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.apps.bench import weights
from edge.apps.bench.folder import ModelFolder
from edge.apps.measure.agreement import Logits
from edge.apps.measure.machine import installed
from edge.bundle import open_bundle
from edge.errors import EngineError, InputError
from edge.plugins.cpu import library
from edge.runtime.cuda import install
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.opening import DEVICE_VARIABLE, INTERPRET
from edge.runtime.engine import Rows
from edge.runtime.engines import open_engine
from edge.tensors import parameters

Tokens = NDArray[np.int64]
Rounding = Literal["fp32", "fp16", "w8", "w4", "w8a8"]  # w8a8: activations by static scales
EngineName = Literal["ort", "cpu", "cuda"]

RUN = 4  # tokens of the short run
INSTALL_LLAMA = ".venv/bin/pip install llama-cpp-python gguf"
INSTALL_LLAMA_CUDA = f"CMAKE_ARGS=-DGGML_CUDA=ON {INSTALL_LLAMA}"
DRIVER = "an NVIDIA driver"
ALL_LAYERS = 1 << 20  # more than any model has


class Peer(Protocol):
    """One program with the model loaded. Logits are [rows, V] and valid until the next call.

    Attributes:
        name: name on the command line.
        rounding: rounding of its weights and activations, which sets the tolerance of its results.
        version: version of the program.
        weight_bytes: size of the weights on disk.
        note: remark on its figures for the reader, or "".
    """

    name: str
    rounding: Rounding
    version: str
    weight_bytes: int
    note: str

    def prefill(self, tokens: Tokens, *, every_row: bool = False) -> Logits:
        """Clear the state and run `tokens`. Return logits of the last token, or of each."""
        ...

    def run(self, tokens: Tokens) -> Logits:
        """Run a few tokens at once. Return logits of each."""
        ...

    def step(self, token: int) -> Logits:
        """Run one token. Return its logits."""
        ...

    def close(self) -> None:
        """Release memory and threads."""
        ...


class EdgePeer:
    """This runtime: a bundle on the engine that a session uses.

    It has one state. Prompts are committed in chunks, and everything else can be rewound."""

    note: str = ""

    def __init__(
        self,
        path: Path,
        recipe: Rounding,
        threads: int,
        *,
        spin: bool = False,
        engine: EngineName = "ort",
    ) -> None:
        ort = engine == "ort"
        self.name = f"edge-{recipe}" + ("" if ort else f"-{engine}") + ("-spin" if spin else "")
        self.rounding = recipe
        if spin:
            self.note = "idle threads spin (edge.load(…, spin=True)), as llama.cpp's do"
        if engine == "cpu":
            self.note = "engine cpu: the launch plan over compiled kernels"
        with open_bundle(path) as bundle:
            self.weight_bytes = bundle.manifest.nbytes
            provider = "cpu" if ort else None
            self._engine = open_engine(
                bundle, engine, threads=threads, spin=spin, provider=provider
            )
        if isinstance(self._engine, CudaEngine) and engine == "cuda":
            self.note = f"on {self._engine.exclusive.device.name}"
        suffix = f", onnxruntime {installed('onnxruntime')}" if ort else ""
        self.version = f"{installed('mamba-edge')}{suffix}"
        self._state = self._engine.new_state()
        self._token = np.zeros((1, 1), np.int64)

    def prefill(self, tokens: Tokens, *, every_row: bool = False) -> Logits:
        self._state.clear()
        chunk, outputs = self._engine.chunk, []
        for start in range(0, len(tokens), chunk):
            piece = tokens[None, start : start + chunk]
            rows: Rows = "all" if every_row else "last"
            logits: Logits = self._engine.run(piece, self._state, rows=rows, commit=True)[0]
            outputs.append(logits.copy() if every_row else logits)
        return np.concatenate(outputs) if every_row else outputs[-1]

    def run(self, tokens: Tokens) -> Logits:
        logits: Logits = self._engine.run(tokens[None], self._state, rows="all")[0]
        return logits

    def step(self, token: int) -> Logits:
        self._token[0, 0] = token
        logits: Logits = self._engine.run(self._token, self._state)[0]
        return logits

    def close(self) -> None:
        del self._state, self._engine


BATCH = 512  # a prompt of 256 is then one physical batch
_ROUNDING: dict[str, Rounding] = {"f16": "fp16", "q8_0": "w8", "q4_0": "w4", "q4_1": "w4"}


class LlamaPeer:
    """llama.cpp through llama-cpp-python's low-level interface, without sampling.

    It has one sequence."""

    note = ""

    def __init__(
        self, path: Path, kind: str, vocab_size: int, threads: int, *, gpu: bool = False
    ) -> None:
        self.name = f"llama-{kind}" + ("-cuda" if gpu else "")
        self.rounding = _ROUNDING[kind]
        self.version = f"llama-cpp-python {installed('llama-cpp-python')}"
        self._vocab_size = vocab_size
        self.weight_bytes = path.stat().st_size
        self._llama = llama = importlib.import_module("llama_cpp")
        self._log_callback = llama.llama_log_callback(_discard_log)
        llama.llama_log_set(self._log_callback, ctypes.c_void_p(0))
        llama.llama_backend_init()
        if gpu and not llama.llama_supports_gpu_offload():
            raise EngineError("was built without CUDA", field="llama-cpp-python",
                              remedy=INSTALL_LLAMA_CUDA)  # fmt: skip
        self._gpu = gpu
        model_parameters = llama.llama_model_default_params()
        model_parameters.n_gpu_layers = ALL_LAYERS if gpu else 0
        self._model = llama.llama_model_load_from_file(str(path).encode(), model_parameters)
        if not self._model:
            raise EngineError("llama.cpp cannot load the file", file=path)
        self._context = llama.llama_init_from_model(self._model, self._parameters(threads))
        if not self._context:
            raise EngineError("llama.cpp cannot create a context for the model", file=path)
        self._batch = llama.llama_batch_init(BATCH, 0, 1)
        self._position = 0

    def _parameters(self, threads: int) -> Any:
        parameters = self._llama.llama_context_default_params()
        parameters.n_ctx = 4 * BATCH
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        # a build with CUDA would use it for prompts even if no layer is on the GPU
        parameters.offload_kqv = parameters.op_offload = self._gpu
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


def _discard_log(level: int, text: bytes, data: object) -> None:
    """Discard llama.cpp's log."""


class TransformersPeer:
    """transformers, eager fp32: the reference for all results, and a peer.

    It steps through its cache. Its Mamba starts from a zero state when given several tokens, even
    with a cache (5.23), so a run goes token by token.
    """

    name = "transformers"
    rounding: Rounding = "fp32"
    note = "eager fp32; continues by single tokens only, so its 4-token run is 4 steps"

    def __init__(self, workspace: ModelFolder, threads: int) -> None:
        import torch
        from transformers.utils import logging

        self._torch = torch
        torch.set_num_threads(threads)
        log: Any = logging
        log.set_verbosity_error()
        log.disable_progress_bar()
        self.version = f"{installed('transformers')}, torch {torch.__version__}"
        self.weight_bytes = 4 * parameters(workspace.config)
        self._model = weights.transformers_model(workspace.config)
        self._cache: Any = None

    def prefill(self, tokens: Tokens, *, every_row: bool = False) -> Logits:
        return self._forward(tokens, None, keep=0 if every_row else 1)

    def run(self, tokens: Tokens) -> Logits:
        return np.concatenate([self.step(int(token)) for token in tokens])

    def step(self, token: int) -> Logits:
        return self._forward(np.array([token], np.int64), self._cache, keep=1)

    def whole(self, tokens: Tokens) -> Logits:
        """Return the reference: logits of each token, from one pass without a cache."""
        with self._torch.inference_mode():
            out = self._model(self._torch.from_numpy(tokens)[None], use_cache=False)
        logits: Logits = out.logits[0].float().numpy()
        return logits

    def close(self) -> None:
        self._model = self._cache = None

    def _forward(self, tokens: Tokens, cache: Any, keep: int) -> Logits:
        with self._torch.inference_mode():
            out = self._model(
                self._torch.from_numpy(tokens)[None],
                cache_params=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        self._cache = out.cache_params
        logits: Logits = out.logits[0].numpy()
        return logits


# -- the registry ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerEntry:
    """Registry entry of a peer.

    Attributes:
        packages: packages that it needs.
        install: how to install them.
        write: writes its model, unless the folder has it.
        make: loads the peer with that number of threads.
        compiled: whether it needs the kernels compiled at installation.
        gpu: whether it needs a GPU.
    """

    packages: tuple[str, ...]
    install: str
    write: Callable[[ModelFolder], object]
    make: Callable[[ModelFolder, int], Peer]
    compiled: bool = False
    gpu: bool = False


_NEEDS_EXPORT = ("onnxruntime", "onnx", "torch"), ".venv/bin/pip install '.[export,ort]'"
_NEEDS_LLAMA = ("llama-cpp-python", "gguf"), INSTALL_LLAMA
_NEEDS_TORCH = ("torch", "transformers"), ".venv/bin/pip install torch transformers"


_NEEDS_GPU = ("triton", "cuda-core"), ".venv/bin/pip install '.[export,ort,kernels,cuda]'"


def _edge(recipe: Rounding, spin: bool = False, engine: EngineName = "ort") -> PeerEntry:
    def write(workspace: ModelFolder) -> Path:
        return workspace.bundle(recipe)

    def make(workspace: ModelFolder, threads: int) -> Peer:
        return EdgePeer(write(workspace), recipe, threads, spin=spin, engine=engine)

    packages, install = _NEEDS_EXPORT
    if engine == "cpu":
        return PeerEntry(packages, f"{install}, with a C++ compiler", write, make, compiled=True)
    if engine == "cuda":
        return PeerEntry((*packages, *_NEEDS_GPU[0]), _NEEDS_GPU[1], write, make, gpu=True)
    return PeerEntry(packages, install, write, make)


def _llama(kind: str, gpu: bool = False) -> PeerEntry:
    def write(workspace: ModelFolder) -> Path:
        return workspace.gguf(kind)

    def make(workspace: ModelFolder, threads: int) -> Peer:
        vocab_size = workspace.config.vocab_size
        return LlamaPeer(write(workspace), kind, vocab_size, threads, gpu=gpu)

    packages, install = _NEEDS_LLAMA
    return PeerEntry(packages, INSTALL_LLAMA_CUDA if gpu else install, write, make, gpu=gpu)


PEERS = {
    "edge-w8": _edge("w8"),
    "edge-w8-spin": _edge("w8", spin=True),
    "edge-w8a8": _edge("w8a8"),
    "edge-w8a8-spin": _edge("w8a8", spin=True),
    "edge-w4": _edge("w4"),
    "edge-fp16": _edge("fp16"),
    "edge-fp32": _edge("fp32"),
    "edge-w8-cpu": _edge("w8", engine="cpu"),
    "edge-w8a8-cpu": _edge("w8a8", engine="cpu"),
    "edge-w4-cpu": _edge("w4", engine="cpu"),
    **{f"edge-{r}-cuda": _edge(r, engine="cuda") for r in ("w8a8", "w8", "w4", "fp16")},
    **{f"llama-{kind}": _llama(kind) for kind in ("q8_0", "q4_0", "f16")},
    **{f"llama-{kind}-cuda": _llama(kind, gpu=True) for kind in ("q8_0", "q4_0", "f16")},
    "transformers": PeerEntry(*_NEEDS_TORCH, lambda workspace: None, TransformersPeer),
}
DEFAULT = (
    "edge-w8a8-cpu", "edge-w8-cpu", "edge-w4-cpu", "edge-w8a8", "edge-w8",
    "llama-q8_0", "llama-q4_0", "transformers",
)  # fmt: skip


def missing(name: str) -> tuple[str, ...]:
    """Return the packages, or kernels, that a peer lacks. Raises InputError for an unknown peer."""
    if name not in PEERS:
        remedy = f"choose {', '.join(PEERS)}"
        raise InputError(f"unknown peer {name!r}", field="peers", remedy=remedy)
    entry = PEERS[name]
    lacking = tuple(package for package in entry.packages if not installed(package))
    if entry.compiled and library.path() is None:
        lacking += ("kernels compiled at installation",)
    interpreted = name.startswith("edge-") and os.environ.get(DEVICE_VARIABLE) == INTERPRET
    if entry.gpu and not interpreted and install.driver_version() is None:
        lacking += (DRIVER,)
    return lacking
