"""Bundles of published sizes with random weights, made in seconds."""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import edge
from edge.apps.bench.gpu.shapes import period
from edge.bundle import BundleWriter, Limits, Provenance, Quantization
from edge.bundle.manifest import TokenizerInfo
from edge.config import ModelConfig
from edge.export.calibration.calibrate import calibrate, calibration_graph
from edge.export.calibration.texts import CalibrationText
from edge.export.exporter import check_graph
from edge.export.graph import GRAPH_FILE, build_graph
from edge.export.kernels import add_kernels, add_plan
from edge.export.quantize.plan import ModelPlan
from edge.export.recipes import Choices, mixture, plan_model, recipe
from edge.tensors import tensor_shapes

Array = NDArray[np.float32]
SEED = 20261121
EMBEDDING_STD = 0.02
DT_RANGE = (1e-3, 0.1)
CALIBRATION = (4, 48)  # sequences and tokens: random models have no text to learn scales from


class RandomTensors(Mapping[str, Array]):
    """Canonical tensors by name: one period of layers, drawn once and repeated."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._shapes = tensor_shapes(config)
        self._period = period(config)
        self._drawn: dict[str, Array] = {}

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, name: str) -> Array:
        shape = self._shapes[name]
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) % self._period)
        drawn = ".".join(parts)
        if drawn not in self._drawn:
            rng = np.random.default_rng([SEED, zlib.crc32(drawn.encode())])
            self._drawn[drawn] = _drawn(name, shape, rng, self._config)
            self._drawn[drawn].flags.writeable = False
        return self._drawn[drawn]


def _drawn(
    name: str, shape: tuple[int, ...], rng: np.random.Generator, config: ModelConfig
) -> Array:
    """As Mamba initialises: states neither die out nor grow, logits differ by about one."""
    last = name.rpartition(".")[2]
    if name.startswith("norm_f"):
        gain = 1 / EMBEDDING_STD / math.sqrt(config.d_model)
        return np.full(shape, gain, np.float32)
    if last == "A_log":
        return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
    if last == "D" or "norm" in name:
        return rng.uniform(0.8, 1.2, shape).astype(np.float32)
    if name.endswith(("dt_bias", "dt_proj.bias")):
        low, high = np.log(DT_RANGE)
        dt = np.exp(rng.uniform(low, high, shape))
        return (dt + np.log(-np.expm1(-dt))).astype(np.float32)
    if last == "bias":
        return np.zeros(shape, np.float32)
    std = EMBEDDING_STD if name.startswith("embedding") else 1 / math.sqrt(shape[-1])
    return (std * rng.standard_normal(shape, np.float32)).astype(np.float32)


def write_bundle(
    config: ModelConfig, quant: str, out: Path, *, chunk: int, architectures: tuple[int, ...] = ()
) -> Path:
    """A bundle of `config` in the recipe `quant`, its scales found on one period of its layers.

    Raises ExportError as exporting does.
    """
    tensors = RandomTensors(config)
    plan = _plan(config, tensors, quant, out.parent)
    with BundleWriter(out) as writer:
        built = build_graph(config, tensors, writer.folder, plan)
        check_graph(writer.folder)
        planned = add_plan(writer, GRAPH_FILE, architectures)
        added = add_kernels(writer, planned, architectures, lambda *_: None, (0.0, 1.0))
        how = recipe(quant)
        writer.finish(
            created_by=f"edge {edge.__version__}",
            model=config,
            quantization=Quantization(recipe=how.name, bits=how.bits),
            state_dtypes=built.state_dtypes,
            opset=built.opsets,
            graphs={"ort": GRAPH_FILE, **added.graphs},
            kernels=added.kernels,
            limits=Limits(chunk=chunk),
            tokenizer=TokenizerInfo(kind="bytes", vocab_size=256),
            provenance=Provenance(source="random", family=config.family, fingerprint="0" * 64),
        )
    return out


def _plan(config: ModelConfig, tensors: RandomTensors, quant: str, beside: Path) -> ModelPlan:
    size = period(config)
    short = config.model_copy(update={"layers": config.layers[:size]})
    mixed = mixture(short, quant, Choices({}, None, None, None, None, False))
    seen = mixed.observations()
    if not seen:
        plan = plan_model(short, mixed, fetch=tensors.__getitem__)
    else:
        rng = np.random.default_rng(SEED)
        sequences = rng.integers(0, config.vocab_size, CALIBRATION)
        text = CalibrationText(sequences, len(sequences), "random", "0" * 64)
        with tempfile.TemporaryDirectory(dir=beside) as name:
            build_graph(short, tensors, name)
            found = calibrate(calibration_graph(name), short, text, seen.values, seen.rotated)
        plan = plan_model(short, mixed, calibration=found, fetch=tensors.__getitem__)
    return replace(plan, layers=plan.layers * (len(config.layers) // size))
