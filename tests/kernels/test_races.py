"""No launch has a race: a case of every kernel, with several programs, in a shuffled order.

Results are compared as in each kernel's own tests.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.launch import Variant
from edge.plugins import catalogue
from edge.plugins.compiler.interpreter import InterpretDevice
from tests.kernels import (
    test_attention,
    test_conv,
    test_embed,
    test_gated_norm,
    test_gelu,
    test_hadamard,
    test_linear,
    test_linear_bits,
    test_linear_conv,
    test_linear_int4,
    test_linear_int8,
    test_norm,
    test_pick,
    test_rope,
    test_rounding,
    test_rows,
    test_scan,
    test_scan_chunked,
    test_scan_heads,
)
from tests.kernels.races import Launch, Race, watched
from tests.kernels.recurrent_inputs import LAST, Run
from tests.kernels.rowwise import CHAIN, MANY

pytestmark = pytest.mark.without_gpu

Cases = tuple[Callable[[], object], ...]


def scans() -> Cases:
    """Return cases with several channel blocks, sequences, pending and new tokens, and trees."""

    def run(kind: str, store: int = LAST, parents: list[int] | None = None) -> None:
        feeds = test_scan.feeds_of(kind, 8, 2, True, e=150)
        test_scan.check(feeds, Run(range(3), range(3, 8), 2, store, parents=parents))

    return (
        lambda: run("fp32"), lambda: run("8"), lambda: run("16", 0, [-1, 0, 0, 2, 1]),
        lambda: test_scan.test_makes_dt_of_floating_values(True),
        lambda: test_scan.test_chains("32", 2, 33, 2, False),
        lambda: test_scan.test_parts_of_a_prompt("fp32", 2, 67, 2, 99, LAST),
    )  # fmt: skip


def scans_of_heads() -> Cases:
    form = test_scan_heads.FORMS["channels-i8"]
    return (
        lambda: test_scan_heads.test_chain_agrees_with_the_reference(form, 5),
        lambda: test_scan_heads.test_replay_gives_the_bits_of_the_tokens_run_before(form),
        lambda: test_scan_heads.test_each_path_of_a_tree_is_a_chain(test_scan_heads.FLOAT),
        lambda: test_scan_heads.test_new_tokens_are_kept_in_their_slots_and_nothing_else_is(
            test_scan_heads.FORMS["delta"]
        ),
        lambda: test_scan_chunked.test_groups_and_odd_sizes(2, True),
        lambda: test_scan_chunked.test_prefill_agrees_with_the_sequential_reference(
            test_scan_chunked.FLOAT, 130
        ),
        lambda: test_scan_chunked.test_tokens_with_a_slot_are_kept_and_nothing_else_is_written(
            test_scan_chunked.FORMS["channels"]
        ),
    )


def convolutions() -> Cases:
    run, batch = test_linear_conv.RUNS[1]
    return (
        lambda: test_conv.test_chains("many scales", 4, 5, 7, 2),
        lambda: test_conv.test_chains("float", 4, 2, 17, 1),
        lambda: test_linear_conv.test_one_launch_is_the_two("int8", run, batch),
        lambda: test_linear_conv.test_one_launch_is_the_two("half", run, batch),
    )


def attentions() -> Cases:
    return (
        lambda: test_attention.test_steps(5, 3, 3, 1, 24, 130),
        lambda: test_attention.test_one_token(5, 5, 40, 63),
        lambda: test_attention.test_trees(2, 1, 4, 1, 64, 63),
        lambda: test_attention.test_long_chunks(40, 3, 3, 1, 8, 77),
        lambda: test_rope.test_rotate_and_append(5, 3, 4, 2, 24, 16, True),
        lambda: test_rope.test_rotate_and_append(2, 2, 30, 30, 128, 64, False),
    )


def products() -> Cases:
    few, many = (CHAIN, 5, 3, 160, 100), (MANY, 21, 3, 100, 130)
    one = (test_linear_bits.ONE, 1, 1, 160, 100)
    half = torch.float16
    return (
        lambda: test_linear.test_products_are_the_references(*few, half),
        lambda: test_linear.test_products_are_the_references(*many, half),
        lambda: test_linear_bits.test_products_are_the_references(*one, 32, 4, 0),
        lambda: test_linear_bits.test_products_are_the_references(*few, 32, 4, 0),
        lambda: test_linear_bits.test_products_are_the_references(*many, 20, 4, 1),
        lambda: test_linear_int4.test_products_are_the_references(*one, 32, 0, half),
        lambda: test_linear_int4.test_products_are_the_references(*few, 32, 0, half),
        lambda: test_linear_int4.test_products_are_the_references(*many, 20, 1, None),
        lambda: test_linear_int8.test_products_are_exact_until_they_are_scaled(*few, True),
        lambda: test_linear_int8.test_products_are_exact_until_they_are_scaled(*many, True),
    )


def of_rows() -> Cases:
    return (
        lambda: test_norm.test_norms_are_the_references("AddLayerNorm", 80, 5, 3),
        lambda: test_norm.test_rounded_norms_are_the_references(
            "AddRMSNormQuantize", False, 96, 17, 2
        ),
        lambda: test_gated_norm.test_gate_in_int8(192, 8, 2, 2, False),
        lambda: test_gated_norm.test_rotated_and_rounded(*test_gated_norm.ROTATED[1], False),
        lambda: test_gated_norm.test_gates_alone_are_the_references("SiluGate", F.silu, 1300, 7, 2),
        lambda: test_hadamard.test_rounded_rotation(512, 2, 3, False),
        lambda: test_hadamard.test_rotation(1792, 17, 1),
        lambda: test_rounding.test_known_scales(2, 3, 1537, False),
        lambda: test_rounding.test_dequantize(2, 3, 1537, False),
        lambda: test_rounding.test_scales_of_rows(2, 3, 1537),
        lambda: test_gelu.test_gelu_of_columns("Gelu", "none", 700, 2, 1),
    )


def exact() -> Cases:
    return (
        lambda: test_rows.test_sums(17, 1, 1025),
        lambda: test_rows.test_picked_columns(3, 2, 40),
        lambda: test_rows.test_wanted_rows(17, 1, 1025),
        lambda: test_rows.test_joined_rows(3, 2, 40, torch.int8),
        lambda: test_embed.test_int8_tables(7, 3, 33, test_embed.VOCABULARY),
        lambda: test_embed.test_tables_of_blocks(5, 1160, 40, 4),
        lambda: test_pick.test_the_largest(2100),
        lambda: test_pick.test_they_are_in_order_and_the_lowest_token_is_first_among_equals(
            2100, 3
        ),
    )


def of_other_files() -> Cases:
    """Return `RACES` of the neighbouring test files."""
    names = sorted(file.stem for file in Path(__file__).parent.glob("test_*.py"))
    modules = [importlib.import_module(f"tests.kernels.{name}") for name in names]
    return tuple(case for module in modules for case in getattr(module, "RACES", ()))


GROUPS = (scans, scans_of_heads, convolutions, attentions, products, of_rows, exact, of_other_files)


def every_kernel() -> set[str]:
    """Return the kernels that are launched: compiled functions that no other one calls."""
    trees = {
        file.stem.removeprefix("triton_"): ast.parse(file.read_text())
        for pattern in ("*/triton_*.py", "kernels/*.py")
        for file in catalogue.FOLDER.glob(pattern)
    }
    calls = (
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)
    )
    called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    return {
        f"{stem}.{node.name}"
        for stem, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
        and node.name not in called
    }


def test_no_launch_has_a_race() -> None:
    with watched() as most:
        for case in (case for group in GROUPS for case in group()):
            case()
    assert set(most) == every_kernel()
    alone = [kernel for kernel, programs in most.items() if programs < 2]
    assert not alone, "one program cannot race: take a wider shape"


PROGRAMS, WIDTH = 6, 16


def race(name: str, **constants: bool) -> NDArray[np.float32]:
    """Launch a kernel of `racing`; return its y."""
    device = InterpretDevice("tests.kernels")
    variant = Variant(
        kernel=f"racing.{name}", arguments=("x", "y"), types=("*fp32", "*fp32"),
        constants={"WIDTH": WIDTH, **constants},
    )  # fmt: skip
    x, y = (device.allocate(4 * WIDTH * (2 * PROGRAMS + 1)) for _ in range(2))
    kernel = device.load(variant, None, b"")
    device.launch(kernel, (PROGRAMS, 1, 1), [x.address, y.address])
    return y.data.view(np.float32)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("overlapping", "programs write"),
        ("neighbours", "a program reads 4 bytes that another writes"),
        ("twice", "one store writes a byte twice"),
        ("unordered", "without a barrier"),
    ],
)
def test_a_race_is_found(name: str, said: str) -> None:
    constants = {"BARRIER": False} if name == "unordered" else {}
    race(name, **constants)  # it runs, and the race goes unnoticed
    with watched(), pytest.raises((Race, EngineError), match=said):
        race(name, **constants)


def test_what_is_none_passes() -> None:
    with watched() as most:
        y = race("apart")
        race("unordered", BARRIER=True)
    assert most == {"racing.apart": PROGRAMS, "racing.unordered": PROGRAMS}
    count = PROGRAMS * WIDTH
    assert y[: count + 1].tolist() == [1.0] * count + [7.0]


def test_programs_run_in_another_order_and_masked_loads_are_poison() -> None:
    orders = []
    for seed in range(3):
        launch = Launch("k", (2, 3, 2), np.random.default_rng(seed))
        places = list(np.ndindex(2, 3, 2))
        orders.append([launch.begin(*place) for place in places])
        assert sorted(orders[-1]) == places != orders[-1]
    assert orders[0] != orders[1] != orders[2]
    with watched():
        assert np.isnan(race("careless")[:PROGRAMS]).all()
