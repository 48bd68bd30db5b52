"""Check the exported graph and measure what quantizing cost: `accuracy` in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.bundle.manifest import TokenizerInfo
from edge.config import ModelConfig
from edge.export.calibration.prepare import PreparedPlan, Progress
from edge.export.checkpoint import Checkpoint
from edge.export.graph import WEIGHT_FILE
from edge.export.graph.agreement import verify_engine
from edge.export.graph.verify import verify_graph
from edge.tensors import parameters
from edge.text.load import make_tokenizer

Tokens = NDArray[np.int64]
# Bytes of weights that verification may hold in memory, ONNX Runtime's copies included.
VERIFY_LIMIT = 12 << 30
VERIFY_TOKENS = 192
# Number of logits held at once, of the network and of the graph each.
LOGITS = 1 << 26
# Few, because the reference ops run token by token.
ENGINE_TOKENS = 512
# Ratio of perplexities above which the export warns about the recipe.
COSTLY = 1.05
# Verification runs on text, which models are trained on: random tokens exaggerate the differences.
_TEXT = """\
The river rises in the hills north of the town and runs for forty miles before it meets the sea. In
spring, when the snow melts, the water is cold and fast, and the bridges are closed to carts.
Q: How long is the river? A: It is about forty miles long.
The old mill at the bend was built in 1842; its wheel turned until 1967, and today a small turbine
gives power to a dozen houses. "We keep it running," said the engineer, "because someone has to."
def area(w, h): return w * h  # metres
Step 1: open the valve. Step 2: wait until the pressure falls below 3.5 bar. Step 3: close it again,
and write the time into the log. Thank you! What can I do next?
"""


def judge(
    source: Checkpoint,
    prepared: PreparedPlan,
    rounds_activations: bool,
    folder: Path,
    tokenizer: TokenizerInfo,
    report: Progress,
) -> dict[str, Any]:
    """Compare the graph with the fp32 network, and ONNX Runtime with the reference ops.

    Returns the manifest's `accuracy`. Raises ExportError when a difference is larger than rounding
    explains.
    """
    config, plan = source.config, prepared.plan
    size = resident_bytes(config, plan.bits, folder)
    if size > VERIFY_LIMIT:
        return {
            "skipped": f"running it takes {size >> 30} GiB, more than the limit of "
            f"{VERIFY_LIMIT >> 30} GiB"
        }
    report("verifying", 0.75)
    tokens, kind = prepared.held_out, "held-out tokens of the calibration text"
    if tokens is None:
        tokens, kind = sample_tokens(config, folder, tokenizer)
    tokens = tokens[:, : max(VERIFY_TOKENS, LOGITS // (config.vocab_size * len(tokens)))]
    figures = verify_graph(
        config, source, folder, tokens, plan.bits,
        lambda share: report("verifying", 0.75 + 0.1 * share),
    )  # fmt: skip
    if kind == "random tokens":  # every model predicts them equally badly
        del figures["perplexity"], figures["perplexity_before"]
    result = {"on": kind, **figures}
    if rounds_activations and plan.exact:
        result["engine"] = verify_engine(
            config, folder, tokens[:1, :ENGINE_TOKENS],
            lambda share: report("verifying", 0.85 + 0.12 * share),
        )  # fmt: skip
    return result


def resident_bytes(config: ModelConfig, bits: int, folder: Path) -> int:
    """Estimate the bytes of a session: ONNX Runtime widens floating weights and repacks others."""
    if bits >= 16:
        return 2 * 4 * parameters(config)
    return 2 * (folder / WEIGHT_FILE).stat().st_size


def sample_tokens(
    config: ModelConfig, folder: Path, tokenizer: TokenizerInfo
) -> tuple[Tokens, str]:
    """Return tokens [1, ≤VERIFY_TOKENS] of a fixed text, or random ones if it has too few."""
    limit = min(VERIFY_TOKENS, config.max_context or VERIFY_TOKENS)
    ids = _encode(folder, tokenizer)[:limit]
    if len(ids) >= min(limit, 64) and max(ids) < config.vocab_size:
        return np.array([ids], np.int64), "text"
    random = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (1, limit))
    return random.astype(np.int64), "random tokens"


def _encode(folder: Path, info: TokenizerInfo) -> list[int]:
    data = b"" if info.file is None else (folder / info.file).read_bytes()
    return list(make_tokenizer(info, data, info.file or "").encode(_TEXT))


def accuracy_line(accuracy: dict[str, Any]) -> str:
    """Describe in one line how far the bundle is from the network, or why it was not measured."""
    if "skipped" in accuracy:
        return f"not measured: {accuracy['skipped']}"
    return (
        f"against the fp32 network over {accuracy['tokens']} tokens: "
        f"KL {accuracy['kl_nats_per_token']:.2g} nats a token, "
        f"top-1 agrees {accuracy['top1_agreement']:.1%}, "
        f"largest logit difference {accuracy['max_logit_difference']:.2g}"
    )


def perplexity_line(accuracy: dict[str, Any]) -> str:
    """Describe the perplexity before and after, or say that it was not measured."""
    if "perplexity" not in accuracy:
        return "perplexity not measured"
    before, after = accuracy["perplexity_before"], accuracy["perplexity"]
    return f"perplexity {before:.4g} before, {after:.4g} after ({after / before:.3f}×)"


def poor_line(recipe: str, rounds_activations: bool, accuracy: dict[str, Any]) -> str | None:
    """Return a warning that the recipe suits this model poorly, and what to try, or None."""
    ratio = accuracy.get("perplexity", 0) / accuracy.get("perplexity_before", 1)
    if ratio <= COSTLY:
        return None
    alternatives = "that keeps more bits: w8, fp16"
    if rounds_activations:
        alternatives = "that leaves activations floating: w8, w4"
    return (
        f"{recipe} multiplies this model's perplexity by {ratio:.2f}; try a recipe {alternatives}"
    )
