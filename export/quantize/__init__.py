"""Recipes, the plans they make of a model, and the rounding of weights."""

from edge.export.quantize import quamba, rivals, weight_only
from edge.export.quantize.blocks import dequantize_blocks, quantize_blocks
from edge.export.quantize.build import (
    Choices,
    Mixture,
    Observations,
    default_percentile,
    mixture,
    plan_model,
)
from edge.export.quantize.plan import ModelPlan, Storage
from edge.export.quantize.recipes import Recipe, names, recipe, register

__all__ = [
    "Choices",
    "Mixture",
    "ModelPlan",
    "Observations",
    "Recipe",
    "Storage",
    "default_percentile",
    "dequantize_blocks",
    "mixture",
    "names",
    "plan_model",
    "quantize_blocks",
    "recipe",
    "register",
]

for _recipe in (*weight_only.ALL, *quamba.ALL, *rivals.ALL):
    register(_recipe)
