"""Compare an exported graph with the fp32 network, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.config import ModelConfig
from edge.errors import ExportError
from edge.export.graph.run import GraphRunner, open_session, session_options
from edge.export.mixers.base import State
from edge.export.network import Layer, Norm, empty_state, head_logits, through
from edge.export.nodes.builder import TensorSource

F32 = NDArray[np.float32]
Tokens = NDArray[np.int64]
Advance = Callable[[int, int], None]  # called with what is done, and of how much
M = TypeVar("M", bound=torch.nn.Module)

# Lengths of runs, repeated: a prefill, odd chunks, single steps, as a session makes them.
RUNS = (64, 1, 7, 1, 1, 3, 16, 1, 2, 1, 1)
# Bits → limit of max |Δlogit| / max |logit|, above which a graph is wrong and not just rounded.
# 8- and 4-bit weights have no limit: their KL and agreement are recorded.
TOLERANCE = {32: 1e-3, 16: 5e-2}
# Log-probabilities held at once.
_SLICE = 1 << 22
# Fixed, so that a checkpoint gives the same record on the same kind of machine.
THREADS = 2


def _quietly(done: int, total: int) -> None:
    pass


def _fetch(tensors: TensorSource, name: str) -> Tensor:
    return torch.as_tensor(tensors[name]).detach().float()


def _load(module: M, tensors: TensorSource, prefix: str) -> M:
    names = [name for name, _ in module.named_parameters()]
    values = {n: _fetch(tensors, prefix + n.removeprefix("mixer.")) for n in names}
    module.load_state_dict(values, assign=True)
    return module.eval()


@torch.no_grad()
def reference_logits(
    config: ModelConfig, tensors: TensorSource, tokens: Tokens, advance: Advance = _quietly
) -> F32:
    """Return the fp32 network's logits [B, T, V] for tokens [B, T], with one layer in memory."""
    table = _fetch(tensors, "embedding.weight")
    x = table[torch.from_numpy(tokens)]
    if not config.tie_embeddings:
        del table

    def layers() -> Iterator[tuple[Layer, State]]:
        for index in range(len(config.layers)):
            advance(index, len(config.layers))
            with torch.device("meta"):
                layer = Layer(config, index)
            shapes = empty_state(config.layers[index], tokens.shape[0])
            state = {name: torch.zeros(shape) for name, shape in shapes.items()}
            yield _load(layer, tensors, f"layers.{index}."), state

    x, _ = through(config, layers(), x, 0)
    with torch.device("meta"):
        norm = Norm(config.norm, config.d_model)
    x = _load(norm, tensors, "norm_f.")(x)
    head = table if config.tie_embeddings else _fetch(tensors, "lm_head.weight")
    logits: F32 = head_logits(config, x, head).numpy()
    return logits


def graph_logits(runner: GraphRunner, tokens: Tokens, advance: Advance = _quietly) -> F32:
    """Return the graph's logits [S, T, V] for S sequences, in runs of the lengths in RUNS.

    KV caches start filled with NaN, to catch reads of slots that were not written.
    """
    done, sequences = 0, []
    for row in tokens:
        sequences.append(_sequence_logits(runner, row[None], done, tokens.size, advance))
        done += row.size
    return np.concatenate(sequences)


def _sequence_logits(
    runner: GraphRunner, tokens: Tokens, before: int, total: int, advance: Advance
) -> F32:
    state = runner.initial(1, tokens.shape[1], fill=np.nan)
    pieces, start, turn = [], 0, 0
    while start < tokens.shape[1]:
        advance(before + start, total)
        stop = start + RUNS[turn % len(RUNS)]
        logits, (state,) = runner.run(tokens[:, start:stop], state)
        pieces.append(logits)
        start, turn = stop, turn + 1
    return np.concatenate(pieces, 1)


def compare(reference: F32, found: F32) -> dict[str, float]:
    """Return max |Δlogit|, that over max |logit|, KL(reference‖found) in nats a token, top-1."""
    difference = float(np.abs(reference - found).max())
    largest = float(np.abs(reference).max()) or 1.0  # a head may be all zeros
    divergence = 0.0
    for start, p in _slices(reference):
        rows = found.reshape(-1, found.shape[-1])[start : start + len(p)]
        divergence += float((np.exp(p) * (p - _log_softmax(rows))).sum())
    agree = float((reference.argmax(-1) == found.argmax(-1)).mean())
    return {
        "max_logit_difference": difference,
        "relative_difference": difference / largest,
        "kl_nats_per_token": max(0.0, divergence / math.prod(reference.shape[:-1])),
        "top1_agreement": agree,
    }


def _slices(logits: F32) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield (first row, log-probabilities of a few rows): all rows in float64 take gigabytes."""
    rows = logits.reshape(-1, logits.shape[-1])
    step = max(1, _SLICE // rows.shape[1])
    for start in range(0, len(rows), step):
        yield start, _log_softmax(rows[start : start + step])


def _log_softmax(logits: F32) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def perplexity(logits: F32, tokens: Tokens) -> float:
    """Return the perplexity of all tokens but each sequence's first; logits [S, T, V]."""
    targets = tokens[:, 1:].reshape(-1)
    surprise = 0.0
    for start, log_p in _slices(logits[:, :-1]):
        chosen = targets[start : start + len(log_p), None]
        surprise -= float(np.take_along_axis(log_p, chosen, -1).sum())
    return math.exp(surprise / targets.size)


def verify_graph(
    config: ModelConfig,
    tensors: TensorSource,
    folder: Path,
    tokens: Tokens,
    bits: int,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    """Run the graph in `folder` on tokens [S, T] and compare it with the network.

    `progress` is called with the share that is done. Returns the figures of `accuracy`. Raises
    ExportError when logits of either are NaN or infinite, or when the difference exceeds TOLERANCE
    for weights of `bits`.
    """
    reference = reference_logits(
        config, tensors, tokens, lambda done, total: progress(0.5 * done / total)
    )
    _require_finite(reference, "the reference network", "the checkpoint's weights overflow in fp32")
    runner = GraphRunner(open_session(folder, options=session_options(THREADS)), config)
    exported = graph_logits(runner, tokens, lambda done, total: progress(0.5 + 0.4 * done / total))
    _require_finite(exported, "the exported graph", "choose another recipe")
    figures = compare(reference, exported)
    allowed = TOLERANCE.get(bits)
    if allowed is not None and figures["relative_difference"] > allowed:
        raise ExportError(
            f"the exported graph differs from the network by {figures['relative_difference']:.1e} "
            f"of the largest logit ({allowed:.0e} allowed)",
            remedy="please report this model's config.json",
        )
    return {
        "reference": "fp32 network",
        "tokens": int(tokens.size),
        **rounded(figures),
        "perplexity_before": float(f"{perplexity(reference, tokens):.6g}"),
        "perplexity": float(f"{perplexity(exported, tokens):.6g}"),
    }


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Round figures of `compare` for the manifest: to two digits, agreement to four decimals."""
    short = {key: float(f"{value:.2g}") for key, value in figures.items()}
    short["top1_agreement"] = round(figures["top1_agreement"], 4)
    return short


def _require_finite(logits: F32, whose: str, remedy: str) -> None:
    bad = int((~np.isfinite(logits)).sum())
    if bad:
        raise ExportError(f"{bad} logits of {whose} are NaN or infinite", remedy=remedy)
