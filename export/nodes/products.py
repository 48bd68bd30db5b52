"""Add embedding look-ups and products x · Wᵀ to a graph, and store their matrices, as planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError
from edge.export.nodes.builder import F32, GraphBuilder
from edge.export.quantize.gptq import quantize_gptq
from edge.export.quantize.plan import Product, Rounding, Storage
from edge.export.quantize.weights import (
    GRID_BLOCK,
    on_a_grid,
    on_an_8_bit_grid,
    quantize_blocks,
    quantize_int8,
    quantize_minimum,
)
from edge.plugins.hadamard.matrices import factors, rotate

Make = Callable[[], F32]
# Initializers of a matrix in blocks; minimums only where blocks have one.
_PARTS = ("packed", "scales", "minimums")
# Rounds every finite activation to 0 in columns whose floating value goes through another product.
_ZEROING_SCALE = np.float32(1e30)


@dataclass(frozen=True)
class ProductInput:
    """Names of the values that a product reads; "" for values that do not exist.

    Attributes:
        value: fp32 input; absent after a norm that rounds its output.
        rounded: int8 form of the input.
        rows: fp32 [..., 1], scales of the rows of `rounded`, where they are found at run time.
        outliers: fp32, elements of `value` that are not rounded, where they are found at run time.
    """

    value: str = ""
    rounded: str = ""
    rows: str = ""
    outliers: str = ""


def scale_of(g: GraphBuilder, name: str, scale: F32, shape: tuple[int, ...] = (-1,)) -> str:
    """Store a scale [1] or [C] under `name`, once; [C] is reshaped to `shape`.

    Raises ExportError unless all values are positive.
    """
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ExportError("has a scale that is zero, negative, NaN or infinite", field=name)
    if name not in g.initializers:
        flat = np.asarray(scale, np.float32).reshape(-1)
        return g.floats(name, flat) if flat.size == 1 else g.constant(name, flat.reshape(shape))
    return name


def input_scale(product: Product, columns: int) -> F32:
    """Return the scales to round x with, [1] or [K]: the plan's, except for outliers."""
    assert product.input is not None and product.input.scale is not None
    scale = np.asarray(product.input.scale, np.float32).reshape(-1)
    if not product.outliers:
        return scale
    scale = np.broadcast_to(scale, columns).copy()
    scale[list(product.outliers)] = _ZEROING_SCALE
    return scale


def _uniform_scale(product: Product, columns: int) -> tuple[np.float32, F32 | None]:
    """Return one scale for the product's input, and the factors of W's columns that make it one."""
    scale = input_scale(product, columns)
    if scale.size == 1:
        return scale[0], None
    rounded = np.delete(scale, list(product.outliers))
    largest = rounded.max() if rounded.size else np.float32(1)
    ratio = scale / largest
    ratio[list(product.outliers)] = 0
    return largest, ratio


def rotation(g: GraphBuilder, n: int, back: bool = False) -> list[str]:
    """Return the constants of the rotation of n values, or of its inverse; layers share them."""
    names = []
    for part, matrix in zip(("slow", "fast"), factors(n), strict=True):
        transposed = back and not np.array_equal(matrix, matrix.T)
        name = f"hadamard.{n}.{part}" + (".back" if transposed else "")
        if name not in g.initializers:
            g.constant(name, np.ascontiguousarray(matrix.T) if transposed else matrix)
        names.append(name)
    return names


def round_input(g: GraphBuilder, value: str, product: Product, columns: int) -> ProductInput:
    """Return `value`, fp32 [..., K], with its int8 form if the product reads int8."""
    how = product.input
    if how is None:
        return ProductInput(value)
    if how.scale is None:
        x = value
        if how.rotate:
            x = g.call("Hadamard", [value, *rotation(g, columns)], [f"{value}.rotated"])[0]
        names = [f"{value}.q", f"{value}.q_scale"]
        if how.threshold is None:
            return ProductInput(value, *g.call("QuantizeRows", [x], names))
        names.append(f"{value}.outliers")
        outputs = g.call("SplitQuantizeRows", [x], names, threshold=how.threshold)
        return ProductInput(value, *outputs)
    scale = scale_of(g, f"{value}.scale", input_scale(product, columns))
    if how.rotate:
        inputs = [value, *rotation(g, columns), scale]
        return ProductInput(value, g.call("HadamardQuantize", inputs, [f"{value}.q"])[0])
    return ProductInput(value, g.call("Quantize", [value, scale], [f"{value}.q"])[0])


def fake_round(g: GraphBuilder, value: str, how: Rounding | None, columns: int) -> str:
    """Return `value` rounded to int8 and converted back to fp32."""
    if how is None:
        return value
    x, output = value, f"{value}.rounded"
    if how.rotate:
        x = g.call("Hadamard", [value, *rotation(g, columns)], [f"{value}.turned"])[0]
        output = f"{value}.turned_rounded"
    if how.scale is None:
        x = g.call("FakeQuantizeRows", [x], [output])[0]
    else:
        x = g.call("FakeQuantize", [x, scale_of(g, f"{output}.scale", how.scale)], [output])[0]
    if how.rotate:
        inputs = [x, *rotation(g, columns, back=True)]
        x = g.call("Hadamard", inputs, [f"{value}.rounded"])[0]
    return x


def store(
    g: GraphBuilder, name: str, product: Product, make: Make | None = None
) -> tuple[int, int]:
    """Store the weight `name` once, as `product` reads it, and return (N, K).

    The weight is [N, K], or [E, N, K] for experts. It is the tensor `name`, or what `make` returns.
    """
    if name in g.stored:
        existing, shape = g.stored[name]
        if replace(existing, block=product.weight.block) != product.weight or _transforms(product):
            raise ExportError(f"is needed as {product} but stored as {existing}", field=name)
        return shape
    array = g.tensor(name) if make is None else make()
    *lead, rows, columns = array.shape
    original = array.reshape(-1, columns)
    array, storage = _prepare(g, name, product, original), product.weight
    if storage.block is not None and columns % GRID_BLOCK == 0:
        # restore outlier columns, which read zeros here: without them a block may leave its grid
        restored = array
        if product.outliers:
            restored = array.copy()
            restored[:, list(product.outliers)] = original[:, list(product.outliers)]
        if _on_grid(restored, storage):
            array, storage = restored, replace(storage, block=GRID_BLOCK)
    g.stored[name] = (storage, (rows, columns))
    if storage.block is not None:
        arrays = _blocks(g, name, array, storage, storage.block)
        for part, blocks in zip(_PARTS, arrays, strict=False):
            g.raw(f"{name}.{part}", blocks.reshape(*lead, rows, *blocks.shape[1:]))
    elif storage.int8:
        quants, scale = quantize_int8(array, storage.rows)
        g.raw(name, quants.reshape(*lead, rows, columns))
        scale_of(g, f"{name}.scale", scale, (*lead, -1))
    elif storage.bits == 16:
        g.raw(name, _to_half(name, array).reshape(*lead, rows, columns))
    else:
        g.constant(name, array.reshape(*lead, rows, columns))
    return rows, columns


def _on_grid(array: F32, storage: Storage) -> bool:
    """Return whether blocks of GRID_BLOCK columns keep a matrix as its file has it."""
    if storage.minimum:
        return on_a_grid(array)
    return storage.bits == 8 and on_an_8_bit_grid(array)


def _blocks(
    g: GraphBuilder, name: str, array: F32, storage: Storage, block: int
) -> tuple[NDArray[Any], ...]:
    """Quantize in blocks: by GPTQ if the Hessian of a 4-bit matrix is known, per expert."""
    hessian = g.hessian(name) if storage.bits == 4 and g.hessian is not None else None
    if hessian is not None:
        hessians = hessian.reshape(-1, *hessian.shape[-2:])
        pairs = zip(np.split(array, len(hessians)), hessians, strict=True)
        results = [
            quantize_gptq(matrix, matrix_hessian, block, storage.minimum)
            for matrix, matrix_hessian in pairs
        ]
        return tuple(np.concatenate(parts) for parts in zip(*results, strict=True))
    if storage.minimum:
        return quantize_minimum(array, block)
    return quantize_blocks(array, storage.bits, block)


def _transforms(product: Product) -> bool:
    """Return whether the weight is transformed before storage, and so cannot also be a table."""
    how = product.input
    per_column = how is not None and how.scale is not None and how.scale.size > 1
    return per_column or product.apart or (how is not None and how.rotate)


def _prepare(g: GraphBuilder, name: str, product: Product, array: F32) -> F32:
    """Return W adapted to an input that is rotated or has a scale per column."""
    how = product.input
    if how is None:
        return array
    if how.rotate:
        array = rotate(array)
    if product.apart:
        columns = list(product.outliers) or slice(None)
        g.raw(f"{name}.outliers", _to_half(name, array[:, columns]))
    if how.scale is not None:
        _, ratio = _uniform_scale(product, array.shape[1])
        array = array if ratio is None else array * ratio
    return array


def embed(g: GraphBuilder, tokens: str, name: str, storage: Storage, output: str) -> str:
    """Look up the tokens' rows in the table `name`, fp32 [T, B, D]."""
    store(g, name, Product(storage))
    if storage.block is not None:
        inputs = [tokens, f"{name}.packed", f"{name}.scales"]
        return g.call("EmbedBits", inputs, [output], **_block_attributes(g, name))[0]
    if storage.int8:
        return g.call("EmbedInt8", [tokens, name, f"{name}.scale"], [output])[0]
    return g.call("Embed", [tokens, name], [output])[0]


def linear(
    g: GraphBuilder,
    x: ProductInput,
    name: str,
    output: str,
    product: Product,
    *,
    bias: str | None = None,
    make: Make | None = None,
) -> str:
    """Add x · weightᵀ (+ bias), fp32."""
    _, columns = store(g, name, product, make)
    exact = f"{output}.int8" if product.apart else output
    result = f"{output}.unbiased" if bias is not None else output
    _add_product(g, x, name, product, columns, exact if product.apart else result)
    if product.apart:
        _add_outliers(g, x, name, product, exact, result)
    return result if bias is None else g.node("Add", [result, bias], output)


def experts(
    g: GraphBuilder,
    x: str,
    routed: tuple[str, str],
    name: str,
    output: str,
    product: Product,
    parts: int,
    make: Make,
) -> str:
    """Add x · weightᵀ of the chosen experts, fp32; each expert stacks `parts` matrices by rows.

    If the input is rounded, the op finds a scale for each of its rows.
    """
    store(g, name, product, make)
    op, weights = ("ExpertLinear", [name]) if product.input is None else (
        "ExpertLinearInt8", [name, f"{name}.scale"]
    )  # fmt: skip
    if product.weight.block is None:
        return g.call(op, [x, *routed, *weights], [output], parts=parts)[0]
    minimum = product.weight.minimum
    op = "ExpertLinearBits" if product.input is None else "ExpertLinearInt4"
    inputs = [x, *routed, *_part_names(name, minimum)]
    return g.call(
        f"{op}{'Minimum' * minimum}", inputs, [output], parts=parts, **_block_attributes(g, name)
    )[0]


def linear_to_int8(
    g: GraphBuilder, x: ProductInput, name: str, output: str, product: Product, scale: str
) -> str:
    """Add x · weightᵀ, rounded to int8 by `scale`, for an input rounded by known scales."""
    _, columns = store(g, name, product)
    assert product.weight.bits <= 8 and x.rounded and not x.rows and not product.apart
    inputs = [x.rounded, _x_scale(g, x, product, columns)]
    if product.weight.block is None:
        inputs += [name, f"{name}.scale", scale]
        return g.call("LinearInt8Quantize", inputs, [output])[0]
    minimum = product.weight.minimum
    op = f"LinearInt4{'Minimum' * minimum}Quantize"
    return g.call(
        op, [*inputs, *_part_names(name, minimum), scale], [output], **_block_attributes(g, name)
    )[0]


def _part_names(name: str, minimum: bool) -> list[str]:
    """Return the names of the initializers of a matrix in blocks."""
    return [f"{name}.{part}" for part in _PARTS[: 2 + minimum]]


def _add_product(
    g: GraphBuilder, x: ProductInput, name: str, product: Product, columns: int, output: str
) -> None:
    minimum = product.weight.minimum
    if product.input is None:
        if product.weight.block is None:
            g.call("Linear", [x.value, name], [output])
        else:
            op = f"LinearBits{'Minimum' * minimum}"
            g.call(
                op, [x.value, *_part_names(name, minimum)], [output], **_block_attributes(g, name)
            )
    elif product.weight.block is not None:
        inputs = [x.rounded, _x_scale(g, x, product, columns), *_part_names(name, minimum)]
        g.call(f"LinearInt4{'Minimum' * minimum}", inputs, [output], **_block_attributes(g, name))
    elif x.rows:
        g.call("LinearInt8Rows", [x.rounded, x.rows, name, f"{name}.scale"], [output])
    else:
        scale = _x_scale(g, x, product, columns)
        g.call("LinearInt8", [x.rounded, scale, name, f"{name}.scale"], [output])


def _add_outliers(
    g: GraphBuilder, x: ProductInput, name: str, product: Product, exact: str, output: str
) -> None:
    """Add the product of the columns that stay floating."""
    inputs = x.outliers
    if product.outliers:
        columns = g.integers(product.outliers)
        inputs = g.node("Gather", [x.value, columns], f"{output}.outlier_inputs", axis=-1)
    outlier_product = g.call("Linear", [inputs, f"{name}.outliers"], [f"{output}.outliers"])[0]
    g.node("Add", [exact, outlier_product], output)


def _x_scale(g: GraphBuilder, x: ProductInput, product: Product, columns: int) -> str:
    largest, _ = _uniform_scale(product, columns)
    name = f"{x.rounded}.x_scale"
    return scale_of(g, name, np.full(1, largest, np.float32))


def _block_attributes(g: GraphBuilder, name: str) -> dict[str, int]:
    storage, (rows, columns) = g.stored[name]
    assert storage.block is not None
    return {"K": columns, "N": rows, "bits": storage.bits, "block_size": storage.block}


def _to_half(name: str, array: F32) -> NDArray[np.float16]:
    if not np.isfinite(array).all() or np.abs(array).max(initial=0) > np.finfo(np.float16).max:
        raise ExportError("does not fit fp16", field=name, remedy="export with --quant fp32 or w8")
    return array.astype(np.float16)
