"""Weight storage recipes and the rounding they use."""

from edge.export.quantize.blocks import dequantize_blocks, quantize_blocks
from edge.export.quantize.recipes import Recipe, Storage, names, recipe, register

__all__ = [
    "Recipe",
    "Storage",
    "dequantize_blocks",
    "names",
    "quantize_blocks",
    "recipe",
    "register",
]
