"""Random models calibrated on random tokens, and the graphs of their plans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge.export.calibration.calibrate import calibrate, calibration_graph
from edge.export.calibration.texts import CalibrationText
from edge.export.graph import BuiltGraph, build_graph
from edge.export.graph.run import GraphRunner, GraphState, open_reference, open_session
from edge.export.graph.run import session_options as options_of
from edge.export.network import Network
from edge.export.quantize.observers import Calibration
from edge.export.quantize.plan import ModelPlan
from edge.export.recipes import Choices, Mixture, mixture, names, plan_model
from tests.test_graph_models import V, logits
from tests.test_graph_models import network as sharp_network

# Models whose states are calibrated too, which takes a pass that emits the state after every token.
WITH_STATES = ("mamba1", "mamba2", "mamba2 groups")
F32 = NDArray[np.float32]
Tokens = NDArray[np.int64]


@cache
def network(name: str) -> Network:
    """Return the model `name` of tests/test_graph_models.py with logits that spread like a trained
    one's.

    Random logits are so sharp that one value rounded the other way changes whole tokens.
    """
    net = sharp_network(name)
    spread = float(logits(net, np.random.default_rng(1).integers(0, V, (1, 60))).std())
    with torch.no_grad():
        for key, parameter in net.canonical_tensors().items():
            if key.startswith("norm_f."):
                parameter.mul_(2 / spread)
    return net


@cache
def calibrated(name: str) -> Calibration:
    """Return everything that any recipe needs of the model `name` of tests/test_graph_models.py."""
    net = network(name)
    seen = [mixture(net.config, recipe).observations() for recipe in names()]
    if name in WITH_STATES:
        seen.append(mixture(net.config, "w8a8", Choices(ssm_state="int8")).observations())
    values = {value for each in seen for value in each.values}
    rotated = {value for each in seen for value in each.rotated}
    tokens = np.random.default_rng(0).integers(0, V, (2, 48))
    text = CalibrationText(tokens, 2, "random", "")
    with TemporaryDirectory() as folder:
        build_graph(net.config, net.canonical_tensors(), folder)
        return calibrate(calibration_graph(folder), net.config, text, values, rotated)


def plan_of(name: str, quant: str, **choices: Any) -> tuple[Mixture, ModelPlan]:
    net = network(name)
    tensors = net.canonical_tensors()
    mixed = mixture(net.config, quant, Choices(**choices))
    plan = plan_model(
        net.config,
        mixed,
        calibration=calibrated(name),
        fetch=lambda key: tensors[key].detach().numpy(),
    )
    return mixed, plan


def built(name: str, plan: ModelPlan, folder: Path) -> BuiltGraph:
    net = network(name)
    return build_graph(net.config, net.canonical_tensors(), folder, plan)


def runners(name: str, folder: Path) -> tuple[GraphRunner, GraphRunner]:
    """Return ONNX Runtime and the reference ops on the same graph."""
    config = network(name).config
    engine = GraphRunner(open_session(folder, options=options_of(1)), config)
    return engine, GraphRunner(open_reference(folder), config)


def in_runs(graph: GraphRunner, tokens: Tokens, runs: Sequence[int]) -> tuple[F32, GraphState]:
    """Return the logits of all tokens and the state after them, starting from KV caches full of
    NaN.
    """
    state = graph.initial(1, sum(runs), fill=np.nan)
    pieces, start = [], 0
    for steps in runs:
        found, (state,) = graph.run(tokens[:, start : start + steps], state)
        pieces.append(found)
        start += steps
    return np.concatenate(pieces, 1), state


def tokens_of(steps: int, seed: int = 3) -> Tokens:
    return np.random.default_rng(seed).integers(0, V, (1, steps))
