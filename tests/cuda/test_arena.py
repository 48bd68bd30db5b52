"""Placement of values in the arena: live values do not overlap, and little memory is wasted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.config import Mamba1Config, ModelConfig
from edge.export.graph import build_graph
from edge.launch import ITEM_SIZE, Buffer, Launch, LaunchPlan, Pointer, Program, Size, Variant
from edge.plugins.lowering.plan import lower
from edge.runtime.cuda.device import ALIGNMENT
from edge.runtime.cuda.runs import Arena, place
from tests.int8_models import int8_plan, random_tensors
from tests.test_launch_plan import program

pytestmark = pytest.mark.without_gpu

ONE = Size()


def plan_of(elements: dict[str, Size], uses: list[list[str]]) -> LaunchPlan:
    """Return launches that use the listed values."""
    arguments = {len(names) for names in uses}
    variants = {
        n: Variant(
            kernel="a.b", arguments=tuple(f"v{i}" for i in range(n)), types=("*fp32",) * n,
            constants={},
        )
        for n in sorted(arguments)
    }  # fmt: skip
    number = {n: i for i, n in enumerate(variants)}
    return LaunchPlan(
        variants=tuple(variants.values()),
        launches=tuple(
            Launch(
                variant=number[len(names)],
                grid=(ONE, ONE, ONE),
                arguments=tuple(Pointer(space="value", name=name) for name in names),
            )
            for names in uses
        ),
        programs=(Program(kind="chain", max_rows=None, launches=tuple(range(len(uses)))),),
        values={name: Buffer(dtype="f32", elements=size) for name, size in elements.items()},
        inputs={},
        weights={},
    )


def check(plan: LaunchPlan, which: Program, sizes: dict[str, int], arena: Arena) -> int:
    """Check the placement; return the peak of live bytes."""
    spans = {}
    for name, start in arena.offsets.items():
        buffer = plan.values[name]
        size = buffer.elements.value(sizes) * ITEM_SIZE[buffer.dtype]
        assert start % ALIGNMENT == 0 and start + size <= arena.total
        spans[name] = (start, start + size)
    uses = [
        {a.name for a in plan.launches[i].arguments if isinstance(a, Pointer) if a.space == "value"}
        for i in which.launches
    ]
    most = 0
    for step in range(len(uses)):
        before, after = set().union(*uses[: step + 1]), set().union(*uses[step:])
        alive = {n for n in before if n in after or n == "logits"}
        placed = sorted(span for name, span in spans.items() if name in alive and span[0] < span[1])
        for (_, end), (start, _) in pairwise(placed):
            assert end <= start
        most = max(most, sum(end - start for start, end in placed))
    return most


@given(
    elements=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    uses=st.lists(st.lists(st.integers(0, 11), max_size=4, unique=True), min_size=1, max_size=15),
    t=st.integers(0, 3),
)
def test_values_that_live_together_lie_apart(
    elements: list[int], uses: list[list[int]], t: int
) -> None:
    names = [f"v{i}" for i in range(len(elements) - 1)] + ["logits"]
    made = {n: Size(times=e, of="T") for n, e in zip(names, elements, strict=True)}
    plan = plan_of(made, [[names[i] for i in use if i < len(names)] for use in uses])
    arena = place(plan.programs[0], plan, {"T": t})
    assert set(arena.offsets) == {names[i] for use in uses for i in use if i < len(names)}
    check(plan, plan.programs[0], {"T": t}, arena)


def test_memory_is_used_again() -> None:
    elements = {name: Size(times=64) for name in "abcd"}
    plan = plan_of(elements, [["a", "b"], ["b", "c"], ["c", "d"]])
    arena = place(plan.programs[0], plan, {})
    assert arena.total == 2 * 256
    assert arena.offsets["a"] == arena.offsets["c"] != arena.offsets["b"]


def test_logits_are_not_used_again_and_what_else_is_kept() -> None:
    elements = {name: Size(times=64) for name in ("a", "logits", "b", "c")}
    uses = [["a", "logits"], ["b"], ["c"]]
    plan = plan_of(elements, uses)
    arena = place(plan.programs[0], plan, {})
    assert arena.offsets["logits"] not in {arena.offsets["b"], arena.offsets["c"]}
    kept = place(plan.programs[0], plan, {}, kept=("logits", "a"))
    assert len({kept.offsets[n] for n in ("a", "logits", "b")}) == 3


def test_one_value_named_twice_by_a_launch_is_one() -> None:
    plan = plan_of({"a": Size(times=1)}, [["a", "a"]])
    assert place(plan.programs[0], plan, {}) == Arena({"a": 0}, 256)


@pytest.mark.parametrize("tokens, rows", [(1, 1), (16, 16), (1024, None)])
def test_hardly_more_is_taken_than_is_alive_at_once(
    tmp_path: Path, tokens: int, rows: int | None
) -> None:
    """Check at an eighth of Mamba-2.8B's widths, where 1024 tokens take 65 MB."""
    layer = Mamba1Config(d_inner=640, d_state=16, dt_rank=20)
    config = ModelConfig(family="test", vocab_size=6285, d_model=320, layers=(layer,) * 3)
    build_graph(config, random_tensors(config), tmp_path, int8_plan(config, ("fp32",) * 3))
    plan = lower((tmp_path / "graphs/ort.onnx").read_bytes(), tmp_path)
    which = program(plan, "chain", rows)
    sizes = {"T": tokens, "B": 1, "L": 1, "C": 0, "S": 16}
    arena = place(which, plan, sizes)
    most = check(plan, which, sizes, arena)
    assert arena.total <= 1.05 * most + ALIGNMENT * len(arena.offsets)
    if tokens == 1024:
        assert 64e6 < 8 * arena.total < 65e6
