"""Text embeddings: the last hidden states of a text, pooled into one vector."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from edge.bundle import open_bundle
from edge.errors import BundleError, ContextFullError, InputError
from edge.runtime import memory
from edge.runtime.engine import Engine
from edge.runtime.joined import JoinedEngine
from edge.runtime.prompts import PromptReader
from edge.runtime.session_options import MAX_PROMPT_TOKENS

if TYPE_CHECKING:
    from edge.runtime.model import Model

Pooling = Literal["mean", "last"]
Vectors: TypeAlias = NDArray[np.float32]
Text: TypeAlias = str | Sequence[int]  # a text, or its token ids


class Embedder:
    """Computes embeddings with a state of its own. Threads may share it; they take turns per text.

    Attributes:
        width: number of values in a vector, d_model.
        capacity: maximum number of tokens of a text; None without attention.
    """

    def __init__(self, model: Model, *, capacity: int | None = None) -> None:
        """Allocate a state (see `Engine.new_state`).

        On ONNX Runtime, also load a second session over the same weights. Raises EngineError if the
        engine does not give hidden states.
        """
        self._joined_engine = model.engine if isinstance(model.engine, JoinedEngine) else None
        self._engine, self._unit = _hidden_engine(model)
        self._state = self._engine.new_state(window=1, capacity=capacity)
        self._chunk = min(model.engine.chunk, self._engine.chunk)
        self._reader = PromptReader(model.tokenizer, MAX_PROMPT_TOKENS)
        self._turn = threading.Lock()
        self.width = model.config.d_model
        self.capacity = self._state.capacity

    def read(self, text: Text) -> list[int]:
        """Return the tokens of a text, with `bos` first if the model uses one.

        Raises InputError for a text that is empty or too long and for ids out of range, and
        ContextFullError.
        """
        tokens = self._reader.encode(text)
        if len(text):
            tokens = self._reader.with_bos(tokens, isinstance(text, str))
        if not tokens:
            raise InputError("a text is empty", field="texts", remedy="leave it out")
        self._reader.check_length(len(tokens))
        if self.capacity is not None and len(tokens) > self.capacity:
            raise ContextFullError(
                f"{len(tokens)} tokens do not fit into a context of {self.capacity}", field="texts"
            )
        return tokens

    def embed(
        self,
        tokens: Sequence[int],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        halted: Callable[[], object] = lambda: None,
    ) -> Vectors | None:
        """Return the vector [d_model] of a text of at least one token.

        Returns None if `halted()` was true before the last chunk. Raises InputError for an unknown
        pooling, and EngineError.
        """
        if pooling not in get_args(Pooling):
            raise InputError(f"must be mean or last, got {pooling!r:.40}", field="pooling")
        total = np.zeros(self.width)
        with self._turn:
            self._state.clear()
            for start in range(0, len(tokens), self._chunk):
                if halted():
                    return None
                states = self._run(tokens[start : start + self._chunk], pooling)
                total = total + states.sum(0) if pooling == "mean" else states[-1]
        vector = total / (len(tokens) if pooling == "mean" else 1) * self._unit
        if normalize:
            vector = vector / (np.linalg.norm(vector) or 1.0)
        return vector.astype(np.float32)

    def embed_texts(
        self, texts: Text | Sequence[Text], pooling: Pooling, normalize: bool
    ) -> Vectors:
        if isinstance(texts, bytes) or not isinstance(texts, Sequence | np.ndarray):
            raise InputError(
                f"must be a text, token ids, or a list of them, not {type(texts).__name__}",
                field="texts",
            )
        single = isinstance(texts, str) or (len(texts) and isinstance(texts[0], int | np.integer))
        token_lists = [
            self.read(text) for text in cast("Sequence[Text]", [texts] if single else texts)
        ]
        embeddings = [
            self.embed(tokens, pooling=pooling, normalize=normalize) for tokens in token_lists
        ]
        vectors = np.array(embeddings, np.float32).reshape(-1, self.width)
        return vectors[0] if single else vectors

    def _run(self, tokens: Sequence[int], pooling: Pooling) -> NDArray[np.float64]:
        """Return the hidden states [L, d_model] of a chunk, in the engine's units."""
        rows: Literal["all", "last"] = "all" if pooling == "mean" else "last"

        def run() -> NDArray[np.float64]:
            batch = np.asarray([tokens], np.int64)
            states = self._engine.run(batch, self._state, rows=rows, commit=True)
            return states[0].astype(np.float64)

        return (
            run() if self._joined_engine is None else self._joined_engine.in_turn(self._state, run)
        )


def _hidden_engine(model: Model) -> tuple[Engine, float]:
    """Return an engine that gives hidden states, and their unit: see `Engine.hidden`.

    Raises EngineError, BundleError.
    """
    engine = model.engine
    if isinstance(engine, JoinedEngine):
        engine = engine.engine
    if engine.name != "ort":
        return engine.hidden()
    from edge.runtime.ort import OrtEngine  # imported late: it needs ONNX Runtime

    assert isinstance(engine, OrtEngine)
    with open_bundle(model.path) as bundle:
        if bundle.fingerprint != model.fingerprint:
            raise BundleError("has changed since it was loaded", file=model.path)
        memory.check_load(memory.plan_bundle(bundle.manifest, window=1, capacity=1), model.path)
        threads, provider = engine.threads, engine.provider
        return OrtEngine.from_bundle(bundle, threads=threads, provider=provider, hidden=True), 1.0
