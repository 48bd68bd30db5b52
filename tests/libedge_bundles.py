"""Bundles of the tiny models of tests/test_graph_models.py, for tests that read a folder."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from edge.bundle import BundleWriter, Limits, Provenance, Quantization
from edge.bundle.manifest import TokenizerInfo
from edge.export.graph import build_graph
from edge.export.kernels import add_plan
from edge.export.network import Network
from edge.export.quantize.plan import CacheType
from edge.export.recipes import Choices, mixture, plan_model
from tests import quantized_models

_ROOT = tempfile.TemporaryDirectory(prefix="edge-bundles-")
GRAPH = "graphs/ort.onnx"


@cache
def bundle(
    name: str, quant: str = "fp32", state: str | None = None, cache: CacheType | None = None
) -> Path:
    """Export the model `name` with the recipe `quant`, scan states of type `state`, and keys and
    values of type `cache`.
    """
    target = Path(_ROOT.name) / f"{name}-{quant}-{state}-{cache}".replace(" ", "-")
    net = quantized_models.network(name)
    plan: Any = quant
    if quant not in ("fp32", "fp16"):
        choices = {} if state is None else {"ssm_state": state}
        plan = quantized_models.plan_of(name, quant, **choices)[1]
    elif cache is not None:
        plan = plan_model(net.config, mixture(net.config, quant, Choices(kv_cache=cache)))
    return write(target, net, quant, plan, chunk=48)


def write(
    target: Path, net: Network, recipe: str = "fp32", plan: Any = "fp32", *, chunk: int
) -> Path:
    """Write a bundle of a network, whose weights `plan` rounds."""
    with BundleWriter(target) as writer:
        made = build_graph(net.config, net.canonical_tensors(), writer.folder, plan)
        added = add_plan(writer, GRAPH, ())
        writer.finish(
            created_by="test",
            model=net.config,
            quantization=Quantization(recipe=recipe, bits=32),
            state_dtypes=made.state_dtypes,
            scan_logs=made.scan_logs,
            opset=made.opsets,
            graphs={"ort": GRAPH, **added.graphs},
            limits=Limits(chunk=chunk),
            tokenizer=TokenizerInfo(kind="bytes", vocab_size=net.config.vocab_size),
            provenance=Provenance(source="test", family="test", fingerprint="0" * 64),
        )
    return target
