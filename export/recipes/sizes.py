"""Compute the size of a model's weights under a recipe from its config alone."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from edge.export.checkpoint.layout import Layout
from edge.export.mixers import mixer_of
from edge.export.nodes.builder import SHARED
from edge.export.quantize.layer_plan import storage, stored_as
from edge.export.quantize.plan import F16, F32, Dynamic, Storage, fitting
from edge.export.recipes.mixture import mixture
from edge.tensors import tensor_shapes

# bytes per block: an fp32 scale, or a scale and a minimum in fp16
_BLOCK_BYTES = 4
_SCALE_BYTES = 4


class WeightBytes(NamedTuple):
    """Sizes of weights in bytes.

    Attributes:
        stored: bytes in weights.bin, which holds shared matrices once.
        read: bytes read for one token, counting every use; only the chosen experts.
    """

    stored: int
    read: int


def weight_bytes(layout: Layout, recipe: str) -> WeightBytes:
    """Return the size of a checkpoint's weights as `recipe` would store them.

    Excludes alignment, and channels that calibration leaves floating. Raises ExportError for an
    unknown recipe.
    """
    config, mixed = layout.config, mixture(layout.config, recipe)
    ends = {
        "embedding.weight": fitting(storage(mixed.ends, "embedding", F32), config.d_model),
        "lm_head.weight": fitting(storage(mixed.ends, "head", F32), config.d_model),
    }
    mixers = [mixer_of(layer) for layer in config.layers]
    matrices = [mixer.matrices(config.d_model) for mixer in mixers]
    shares: dict[str, tuple[Storage, float]] = {}
    also_fp16: set[str] = set()  # stored in fp16 too, for outliers found at run time
    members: dict[str, list[str]] = defaultdict(list)
    shapes = tensor_shapes(config)
    if config.head_ids is not None:
        shapes["head.weight"] = (config.head_size, config.d_model)
        ends["head.weight"] = ends["embedding.weight"]
    for name, shape in shapes.items():
        first, _, rest = name.partition(".")
        if first != "layers":
            shared = config.tie_embeddings and config.head_ids is None
            looked_up = name == "embedding.weight" and not shared
            shares[name] = ends.get(name, F32), 0.0 if looked_up else 1.0
            members[name].append(name)
            continue
        index, _, own = rest.partition(".")
        layer, mixer = config.layers[int(index)], mixers[int(index)]
        stored = mixer.stored(own, shape)
        holder = own if stored is None else stored.name
        module = holder.removesuffix(".weight")
        matrix = matrices[int(index)].get(module) if holder.endswith(".weight") else None
        table = mixed.tables[layer.kind]
        form, how = (F32, None) if matrix is None else stored_as(table, module, matrix)
        full_name = f"layers.{index}.{holder}"
        if isinstance(how, Dynamic) and how.outliers is not None:
            also_fp16.add(full_name)
        shares[full_name] = form, layer.read_share(own.partition(".")[0])
        members[full_name].append(name)
    total, bytes_read, counted = 0, 0.0, set()
    for full_name, (form, share) in shares.items():
        size = sum(_size(shapes[name], form) for name in members[full_name])
        if full_name in also_fp16:
            size += sum(_size(shapes[name], F16) for name in members[full_name])
        identity = tuple(layout.pieces.get(name, name) for name in members[full_name]), form
        total += 0 if identity in counted else size
        if size >= SHARED:
            counted.add(identity)
        bytes_read += share * size
    return WeightBytes(total, round(bytes_read))


def _size(shape: tuple[int, ...], form: Storage) -> int:
    count, rows = math.prod(shape), math.prod(shape[:-1])
    size = count * form.bits // 8
    if form.block is not None:
        return size + _BLOCK_BYTES * (count // form.block)
    return size + _SCALE_BYTES * rows if form.rows else size
