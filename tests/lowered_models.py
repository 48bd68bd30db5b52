"""Launch plans of random models, by model and recipe."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from edge.export.quantize import names
from edge.export.quantize.plan import StateType
from edge.launch import LaunchPlan
from edge.plugins.lowering.plan import lower
from tests.quantized_models import built, plan_of

# of tests/test_graph_models.py: every mixer, norm and order
MODELS = ("mamba1", "mamba1 odd", "mamba2", "mamba2 groups", "mamba2 with mlp", "attention", "all")
CASES: tuple[tuple[str, str, StateType | None], ...] = (
    *((model, quant, None) for model in MODELS for quant in names()),
    ("mamba1", "w8a8", "fp16"),
    ("mamba1", "w8a8", "int8"),
    ("mamba2", "w8a8", "fp16"),
    ("mamba2 groups", "w8a8", "int8"),
)


@cache
def lowered(model: str, quant: str, state: StateType | None = None) -> LaunchPlan:
    choices = {} if state is None else {"ssm_state": state}
    _, plan = plan_of(model, quant, **choices)
    with TemporaryDirectory() as folder:
        graph = built(model, plan, Path(folder)).graph
        return lower(graph.read_bytes(), folder)
