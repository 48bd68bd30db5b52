"""Launch plans of random models, by model and recipe."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from edge.config import ModelConfig
from edge.export.quantize.plan import StateType
from edge.export.recipes import names
from edge.launch import LaunchPlan
from edge.plugins.lowering.plan import lower
from tests.quantized_models import built, network, plan_of

# of tests/test_graph_models.py: every mixer, norm and order
MODELS = ("mamba1", "mamba1 odd", "mamba2", "mamba2 groups", "mamba2 with mlp", "attention", "all")
CASES: tuple[tuple[str, str, StateType | None], ...] = (
    *((model, quant, None) for model in MODELS for quant in names()),
    ("parallel", "fp32", None),
    ("parallel", "w8a8", None),
    ("mamba1", "w8a8", "fp16"),
    ("mamba1", "w8a8", "int8"),
    ("mamba2", "w8a8", "fp16"),
    ("mamba2 groups", "w8a8", "int8"),
)


class Lowered(NamedTuple):
    """A plan, and the model it must match."""

    plan: LaunchPlan
    config: ModelConfig
    weight_bytes: int
    state_dtypes: Mapping[str, str]


@cache
def model(name: str, quant: str, state: StateType | None = None) -> Lowered:
    choices = {} if state is None else {"ssm_state": state}
    _, plan = plan_of(name, quant, **choices)
    with TemporaryDirectory() as folder:
        made = built(name, plan, Path(folder))
        found = lower(made.graph.read_bytes(), folder)
    return Lowered(found, network(name).config, made.weight_bytes, made.state_dtypes)


def lowered(name: str, quant: str, state: StateType | None = None) -> LaunchPlan:
    return model(name, quant, state).plan
