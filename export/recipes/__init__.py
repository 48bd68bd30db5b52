"""Recipes by name, and the plans that they make for a model."""

from edge.export.recipes import tables
from edge.export.recipes.base import Recipe, names, recipe, register
from edge.export.recipes.mixture import Choices, Mixture, Observations, mixture, plan_model

__all__ = [
    "Choices",
    "Mixture",
    "Observations",
    "Recipe",
    "mixture",
    "names",
    "plan_model",
    "recipe",
    "register",
]

for _recipe in tables.ALL:
    register(_recipe)
