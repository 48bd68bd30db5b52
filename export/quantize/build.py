"""From a recipe to the plan of one model."""

from __future__ import annotations

from edge.config import Mixer, ModelConfig
from edge.export.quantize.how import Table
from edge.export.quantize.names import layer_matrices
from edge.export.quantize.plan import F32, LayerPlan, ModelPlan, Product, Storage
from edge.export.quantize.recipes import Recipe, storage

# Blocks tried, largest first, when a recipe's own does not divide a weight's columns.
_BLOCKS = (128, 64, 32)


def fitting(wanted: Storage, columns: int) -> Storage:
    """`wanted`, with blocks that divide the columns; fp32 where none does."""
    if wanted.block is None:
        return wanted
    largest = wanted.block
    block = next((b for b in _BLOCKS if b <= largest and columns % b == 0), None)
    return F32 if block is None else Storage(wanted.bits, block)


def plan_model(config: ModelConfig, recipe: Recipe) -> ModelPlan:
    """The plan of a recipe that leaves activations floating."""
    embedding = fitting(storage(recipe.ends, "embedding", F32), config.d_model)
    head = fitting(storage(recipe.ends, "head", F32), config.d_model)
    return ModelPlan(
        recipe=recipe.name,
        embedding=embedding,
        head=Product(embedding if config.tie_embeddings else head),
        layers=tuple(
            _weights_only(layer, config.d_model, recipe.layers.get(layer.kind, {}))
            for layer in config.layers
        ),
    )


def _weights_only(layer: Mixer, d_model: int, table: Table) -> LayerPlan:
    return LayerPlan(
        {
            name: Product(fitting(storage(table, name, F32), columns))
            for name, (_, columns) in layer_matrices(layer, d_model).items()
        }
    )
