"""Is the engine right? Asked before anything is timed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.bundle import open_bundle
from edge.export.graph.run import GraphRunner, open_reference
from edge.runtime.cuda.device import Device
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.opening import from_bundle

Logits = NDArray[np.float32]
SEED = 5
PROMPT, RUN, STEPS = 99, 4, 3  # a prompt that is long enough to be run in parts
# nats a token and share of tokens: int8 rounding differs where sums are taken in another order, and
# one flipped value is carried on (docs/inside/quantization.md); fp16 products round their input
LIMITS = {"w8a8": (5e-3, 0.9), "fp16": (1e-4, 0.99)}


@dataclass(frozen=True)
class Agreement:
    """How far the engine is from the reference ops on one period of a model's layers.

    Attributes:
        kl: mean of KL(reference ‖ engine), nats a token. top1: share of equal best tokens.
        replay: largest difference of logits between a run after a rewind and the same tokens as
            steps, relative to the spread of the logits.
    """

    kl: float
    top1: float
    replay: float
    right: bool

    def line(self) -> str:
        verdict = "right" if self.right else "WRONG"
        return f"{verdict}: KL {self.kl:.1e}, top-1 {self.top1:.3f}, replay {self.replay:.1e}"


def agreement(bundle: Path, quant: str, device: Device | None, prompt: int = PROMPT) -> Agreement:
    """A prompt, a short run, steps, and a rewind, against the reference graph on the CPU."""
    with open_bundle(bundle) as opened:
        engine = from_bundle(opened, device)
        config = opened.manifest.model
        rng = np.random.default_rng(SEED)
        tokens = rng.integers(0, config.vocab_size, (1, prompt + RUN + STEPS))
        runner = GraphRunner(open_reference(bundle), config)
        expected = runner.run(tokens, runner.initial(capacity=tokens.shape[1]))[0][0]
    state = engine.new_state(window=8)
    found = [engine.run(tokens[:, :prompt], state, rows="all", commit=True)[0].copy()]
    engine.run(tokens[:, prompt : prompt + RUN] * 0, state)
    state.rewind(RUN)
    found.append(engine.run(tokens[:, prompt : prompt + RUN], state, rows="all")[0].copy())
    found += [
        engine.run(tokens[:, i : i + 1], state)[0].copy()
        for i in range(prompt + RUN, tokens.shape[1])
    ]
    logits = np.concatenate(found)
    replay = _replayed(engine, tokens, logits, prompt)
    p, q = _log_softmax(expected), _log_softmax(logits)
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    top1 = float((expected.argmax(-1) == logits.argmax(-1)).mean())
    kl_limit, top1_limit = LIMITS[quant]
    return Agreement(kl, top1, replay, kl <= kl_limit and top1 >= top1_limit)


def _replayed(engine: CudaEngine, tokens: NDArray[np.int64], logits: Logits, prompt: int) -> float:
    """The same tokens, every one a step of its own after the prompt."""
    state = engine.new_state(window=8)
    engine.run(tokens[:, :prompt], state, commit=True)
    steps = [
        engine.run(tokens[:, i : i + 1], state)[0, 0].copy() for i in range(prompt, tokens.shape[1])
    ]
    spread = float(logits.std()) or 1.0
    return float(np.abs(np.stack(steps) - logits[prompt:]).max()) / spread


def _log_softmax(x: Logits) -> NDArray[np.float64]:
    shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
    out: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return out
