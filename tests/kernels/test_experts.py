"""Experts against plain PyTorch: the router, the order, every kind of product, and the weighted
sum.

With odd sizes, views of wider rows, and experts that nobody chose; on Triton's kernels, those for
CPUs and the ONNX functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edge.export.quantize.weights import quantize_blocks, quantize_int8, quantize_minimum
from edge.plugins.catalogue import OPS
from edge.plugins.experts import reference
from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.onnx import FLAVOURS
from tests.kernels.rowwise import CHAIN, MANY, Workbench
from tests.onnx_ops import run_op

EXPERTS, SLOTS, OUTPUTS, COLUMNS = 7, 3, 10, 96
ROUTES: dict[str, dict[str, Any]] = {
    "softmax": {"sigmoid": 0, "normalise": 1, "scale": 1.0, "groups": 1, "top_groups": 1},
    "plain": {"sigmoid": 0, "normalise": 0, "scale": 0.5, "groups": 1, "top_groups": 1},
    "sigmoid": {"sigmoid": 1, "normalise": 1, "scale": 2.5, "groups": 4, "top_groups": 2},
    "lone": {"sigmoid": 1, "normalise": 0, "scale": 1.0, "groups": 12, "top_groups": 5},
}
FORMS = ("f32", "f16", "8", "4", "4 min", "int8", "int4", "int4 min")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("form", ROUTES)
def test_the_router_chooses_as_the_reference(form: str) -> None:
    attributes = {"k": 4, **ROUTES[form]}
    logits, bias = normal(6, 12), 0.3 * normal(12)
    logits[1] = 0.5  # ties go to the first
    chosen, gates = reference.route(logits, bias, **attributes)
    bench = Workbench(CHAIN, T=3, B=2)
    bench.value("logits", logits, stride=15, start=2)
    bench.constant("bias", bias)
    bench.lower(LOWER, "Route", ("logits", "bias"), ("chosen", "gates"), **attributes)
    bench.run()
    assert torch.equal(bench.read("chosen"), chosen)
    torch.testing.assert_close(bench.read("gates"), gates)
    name = OPS["Route"].function(attributes)
    given = {"logits": logits.reshape(3, 2, 12).numpy(), "bias": bias.numpy()}
    for flavour in FLAVOURS:
        found = run_op(name, flavour, given, **attributes)
        assert np.array_equal(found["chosen"].reshape(6, 4), chosen.numpy())
        np.testing.assert_allclose(found["gates"].reshape(6, 4), gates.numpy(), rtol=1e-5)


def chosen_of(rows: int) -> Tensor:
    """Return distinct experts per row, never the second."""
    generator = torch.Generator().manual_seed(rows)
    others = torch.tensor([e for e in range(EXPERTS) if e != 1], dtype=torch.int32)
    orders = [torch.randperm(6, generator=generator)[:SLOTS] for _ in range(rows)]
    return torch.stack([others[order] for order in orders])


def weights_of(form: str) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Return the op, weights by name, and attributes."""
    whole = normal(EXPERTS * OUTPUTS, COLUMNS)
    lead = (EXPERTS, OUTPUTS)
    if form in ("f32", "f16"):
        kept = whole.reshape(*lead, COLUMNS)
        return "ExpertLinear", {"weight": kept.half() if form == "f16" else kept}, {}
    if form == "int8":
        quants, scale = map(torch.from_numpy, quantize_int8(whole.numpy(), rows=True))
        stored = {"weight": quants.reshape(*lead, -1), "weight_scale": scale.reshape(lead)}
        return "ExpertLinearInt8", stored, {}
    if form.endswith("min"):
        # nonzero minimums, too small for fp16 where activations are int8
        moved = (whole + 0.4) * (1e-5 if form == "int4 min" else 1)
        parts = map(torch.from_numpy, quantize_minimum(moved.numpy(), 32))
        names = ("packed", "scales", "minimums")
        stored = {name: part.unflatten(0, lead) for name, part in zip(names, parts, strict=True)}
        op = "ExpertLinearInt4Minimum" if form == "int4 min" else "ExpertLinearBitsMinimum"
        return op, stored, {"K": COLUMNS, "N": OUTPUTS, "bits": 4, "block_size": 32}
    bits = 8 if form == "8" else 4
    packed, scales = map(torch.from_numpy, quantize_blocks(whole.numpy(), bits, 32))
    stored = {"packed": packed.reshape(*lead, 3, -1), "scales": scales.reshape(*lead, 3)}
    name = "ExpertLinearInt4" if form == "int4" else "ExpertLinearBits"
    return name, stored, {"K": COLUMNS, "N": OUTPUTS, "bits": bits, "block_size": 32}


def expected(form: str, x: Tensor, chosen: Tensor, parts: int) -> Tensor:
    name, stored, attributes = weights_of(form)
    given: dict[str, Any] = dict(stored, x=x, chosen=chosen, parts=parts)
    if name == "ExpertLinear":
        return reference.expert_linear(**given)
    if name == "ExpertLinearInt8":
        return reference.expert_linear_int8(**given)
    if name == "ExpertLinearInt4":
        return reference.expert_linear_int4(**given, K=COLUMNS)
    if name == "ExpertLinearInt4Minimum":
        return reference.expert_linear_int4_minimum(**given, K=COLUMNS)
    if name == "ExpertLinearBitsMinimum":
        return reference.expert_linear_bits_minimum(**given, K=COLUMNS)
    return reference.expert_linear_bits(**given, K=COLUMNS, bits=attributes["bits"])


def on_the_bench(form: str, x: Tensor, chosen: Tensor, parts: int, steps: int) -> Tensor:
    op, stored, attributes = weights_of(form)
    bench = Workbench(MANY if steps > 16 else CHAIN, T=steps)
    bench.value("x", x, stride=x.shape[1] + 3, start=1)
    bench.value("chosen", chosen)
    for name, array in stored.items():
        bench.constant(name, array)
    bench.lower(LOWER, "ExpertOrder", ("chosen",), ("order",), experts=EXPERTS)
    inputs = ("x", "chosen", "order", *stored)
    bench.lower(LOWER, op, inputs, ("y",), parts=parts, **attributes)
    bench.run()
    assert torch.equal(bench.read("order"), reference.expert_order(chosen))
    return bench.read("y")


@pytest.mark.parametrize(("steps", "own"), [(1, False), (5, True), (45, False)])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_the_reference(form: str, steps: int, own: bool) -> None:
    chosen, parts = chosen_of(steps), 1 if own else 2
    x = normal(steps, COLUMNS * (SLOTS if own else 1))
    x[1:2, :COLUMNS] = 0
    wanted = expected(form, x, chosen, parts)
    found = on_the_bench(form, x, chosen, parts, steps)
    # x in fp16, or rounded to int8 per block, as the statements allow
    apart = 0.01 if form in ("8", "4", "4 min") else 2e-3 if form == "f16" else 1e-5
    assert (found - wanted).abs().max() < apart * wanted.abs().max()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_functions_are_the_reference(form: str, own: bool) -> None:
    chosen, parts = chosen_of(6), 2
    x = normal(6, COLUMNS * (SLOTS if own else 1))
    wanted = expected(form, x, chosen, parts).reshape(3, 2, -1).numpy()
    op, stored, attributes = weights_of(form)
    given = {"x": x.reshape(3, 2, -1).numpy(), "chosen": chosen.reshape(3, 2, -1).numpy()}
    given["order"] = reference.expert_order(chosen).reshape(3, 2, -1).numpy()
    given |= {name: array.numpy() for name, array in stored.items()}
    name = OPS[op].function(attributes | {"parts": parts})
    for flavour in FLAVOURS:
        y = run_op(name, flavour, given, constant=True, parts=parts, **attributes)["y"]
        assert np.abs(y - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_order_and_sum_are_the_reference() -> None:
    chosen, gates, x = chosen_of(4), normal(4, SLOTS), normal(4, SLOTS * OUTPUTS)
    wanted = reference.expert_sum(x, gates)
    bench = Workbench(MANY, T=2, B=2)
    bench.value("x", x, stride=SLOTS * OUTPUTS + 5, start=2)
    bench.value("gates", gates)
    bench.lower(LOWER, "ExpertSum", ("x", "gates"), ("y",))
    bench.run()
    torch.testing.assert_close(bench.read("y"), wanted)
    for flavour in FLAVOURS:
        order = run_op("ExpertOrder", flavour, {"chosen": chosen.numpy()}, experts=EXPERTS)
        assert np.array_equal(order["order"], reference.expert_order(chosen).numpy())
        given = {"x": x.numpy(), "gates": gates.numpy()}
        found = run_op("ExpertSum", flavour, given)["y"]
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)


RACES = (
    lambda: test_the_router_chooses_as_the_reference("sigmoid"),
    lambda: test_a_product_is_the_reference("f32", 1, False),
    lambda: test_a_product_is_the_reference("int8", 5, True),
    lambda: test_a_product_is_the_reference("4", 1, False),
    lambda: test_a_product_is_the_reference("4 min", 1, False),
    test_order_and_sum_are_the_reference,
)
