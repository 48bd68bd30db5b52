"""A bundle under measurement: loaded, with one sequence, as a session would run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge.apps.profiling import memory
from edge.runtime.engine import provider_of
from edge.runtime.generate import Context, ContextMark, Logits
from edge.runtime.model import Model, load, resolve
from edge.runtime.sampling import Sampler, SamplingParams
from edge.tensors import parameters


class Subject:
    """A `Runner` over an engine, and what there is to say of its bundle.

    Attributes:
        memory: resident bytes before loading, after it, and after the longest prompt.
    """

    def __init__(
        self,
        bundle: str,
        *,
        engine: str = "auto",
        threads: int | None = None,
        spin: bool = False,
        provider: str | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        """Load it. Raises BundleError, EngineError, TokenizerError."""
        self.memory = memory.Usage()
        self.model: Model = load(
            bundle, engine=engine, threads=threads, spin=spin, provider=provider
        )
        self.memory.loaded()
        self.threads = getattr(self.model.engine, "threads", threads)
        self.spin = spin
        self._sampler = Sampler(sampling or SamplingParams(temperature=0.0))
        self._vocab = self.model.tokenizer.vocab_size
        self._logits: Logits | None = None

    def prepare(self, capacity: int, prompt: Sequence[int]) -> None:
        """Take the memory of a sequence of `capacity` tokens, and use all that a prompt needs."""
        engine = self.model.engine
        room = capacity if self.model.config.has_attention else None
        self._capacity = room
        self._context = Context(engine, engine.new_state(capacity=room))
        self.feed(prompt)
        self.step(self.sample())
        self.memory.used()

    # -- running ---------------------------------------------------------------------------------

    def clear(self) -> None:
        self._context.clear()

    def feed(self, tokens: Sequence[int]) -> None:
        self._logits = self._context.feed(tokens, lambda: False)

    def step(self, token: int) -> None:
        self._logits = self._context.step(token)

    def sample(self) -> int:
        assert self._logits is not None
        return self._sampler(self._logits[: self._vocab])

    def mark(self) -> ContextMark:
        return self._context.mark()

    def restore(self, mark: ContextMark) -> None:
        self._context.restore(mark)

    # -- what it is ------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Which bundle on which engine, and the bytes it takes."""
        model = self.model
        plan = model.engine.memory_plan(capacity=self._capacity)
        weights = model.manifest.entry("weights.bin")
        return {
            "bundle": str(model.path),
            "fingerprint": model.fingerprint,
            "family": model.config.family,
            "quantization": model.manifest.quantization.recipe,
            "parameters": parameters(model.config),
            "weight_bytes": weights.size if weights else 0,
            "engine": model.engine.name,
            "provider": provider_of(model.engine),
            "threads": self.threads,
            "spin": self.spin,
            "chunk": model.engine.chunk,
            "state_bytes": plan["state"],
            "kv_cache_bytes": plan["kv_cache"],
            "kv_cache_tokens": self._capacity,
            "memory_plan": plan,
        }


def longest_context(bundle: str | Path) -> int | None:
    """Tokens a bundle's attention was made for; None where nothing limits them."""
    from edge.bundle import open_bundle

    with open_bundle(resolve(bundle)) as opened:
        config = opened.manifest.model
        return config.max_context if config.has_attention else None
