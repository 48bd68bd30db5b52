"""Recipes, the plans they make of a model, and the rounding of weights."""

from edge.export.quantize import weight_only as weight_only  # registers its recipes
from edge.export.quantize.blocks import dequantize_blocks, quantize_blocks
from edge.export.quantize.build import plan_model
from edge.export.quantize.plan import ModelPlan, Storage
from edge.export.quantize.recipes import Recipe, names, recipe, register

__all__ = [
    "ModelPlan",
    "Recipe",
    "Storage",
    "dequantize_blocks",
    "names",
    "plan_model",
    "quantize_blocks",
    "recipe",
    "register",
]
