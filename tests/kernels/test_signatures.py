"""Plans pass to kernels exactly their parameters, in their order."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import triton.language as tl

from edge.export.quantize.plan import StateType
from edge.launch import Pointer, Size, Variant
from edge.plugins.catalogue import OPS, kernel_module
from edge.plugins.lowering.lowerings import LOWER
from tests.lowered_models import CASES, lowered

pytestmark = pytest.mark.without_gpu


def parameters(kernel: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of `file.function`; the interpreter's wrapper keeps the original as
    `fn`.
    """
    file, _, name = kernel.partition(".")
    function: Any = getattr(importlib.import_module(str(kernel_module(file))), name)
    return dict(inspect.signature(function.fn).parameters)


def is_constant(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (tl.constexpr, "tl.constexpr")


def check(variant: Variant) -> None:
    taken = parameters(variant.kernel)
    given, constants = variant.arguments, variant.constants
    # a parameter added later has a default, for older plans
    later = {name for name, one in taken.items() if one.default is not inspect.Parameter.empty}
    absent = later - set(given) - set(constants)
    assert tuple(name for name in taken if name not in {*constants, *absent}) == given
    assert set(constants) <= set(taken)
    for name, parameter in taken.items():
        if name in absent:
            continue
        if is_constant(parameter):
            assert name in constants, f"{name} must be a constant"
            assert name.isupper(), f"{name} is a constant in small letters"
        else:
            # a missing pointer is a constant too
            assert name not in constants or constants[name] is None, f"{name} is no constant"


@pytest.mark.parametrize("model, quant, state", CASES)
def test_kernels_take_what_plans_give(model: str, quant: str, state: StateType | None) -> None:
    for variant in lowered(model, quant, state).variants:
        check(variant)


@pytest.mark.parametrize("model, quant, state", CASES)
def test_arguments_are_of_the_types_that_variants_name(
    model: str, quant: str, state: StateType | None
) -> None:
    plan = lowered(model, quant, state)
    for launch in plan.launches:
        types = plan.variants[launch.variant].types
        for kind, argument in zip(types, launch.arguments, strict=True):
            wanted = Pointer if kind.startswith("*") else float if kind == "fp32" else Size
            assert isinstance(argument, wanted)


def test_every_op_has_a_kernel() -> None:
    # rotations are part of the launch that appends to the caches
    assert OPS.keys() - LOWER.keys() == {"Rope"} and "RotaryAttention" in LOWER
