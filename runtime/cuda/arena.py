"""Where the values of a program lie: memory is used again once nothing reads what was in it.

A program's launches run one after the other, so a value lives from the first launch that names it
to the last. Largest first, each value takes the lowest place that is free all its life; "greedy by
size" of Pisarchyk and Lee, Efficient memory management for deep neural net inference, arXiv
2001.03288, section 5.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from edge.launch import ITEM_SIZE, LOGITS, PICKED, LaunchPlan, Pointer, Program, Sizes
from edge.runtime.cuda.device import ALIGNMENT


class Arena(NamedTuple):
    """Byte offsets by value, multiples of 256, and the bytes there must be."""

    offsets: dict[str, int]
    total: int


class _Life(NamedTuple):
    name: str
    first: int
    last: int
    size: int


def place(
    program: Program, plan: LaunchPlan, sizes: Sizes, kept: Collection[str] = (LOGITS, PICKED)
) -> Arena:
    """Places for the values of one program at these sizes; `kept` are read after the run."""
    lives = _lives(program, plan, sizes, kept)
    # (start, end) of what is there during each launch
    taken: list[list[tuple[int, int]]] = [[] for _ in program.order]
    offsets: dict[str, int] = {}
    total = 0
    for life in sorted(lives, key=lambda life: (-life.size, life.first, life.name)):
        during = taken[life.first : life.last + 1]
        start = _lowest(sorted({span for spans in during for span in spans}), life.size)
        offsets[life.name] = start
        total = max(total, start + life.size)
        if life.size:
            for spans in during:
                spans.append((start, start + life.size))
    return Arena(offsets, total)


def _lives(program: Program, plan: LaunchPlan, sizes: Sizes, kept: Collection[str]) -> list[_Life]:
    spans: dict[str, tuple[int, int]] = {}
    for step, index in enumerate(program.order):
        for argument in plan.launches[index].arguments:
            if isinstance(argument, Pointer) and argument.space == "value":
                spans[argument.name] = (spans.get(argument.name, (step, step))[0], step)
    end = len(program.order) - 1
    return [
        _Life(name, first, end if name in kept else last, _bytes(plan, name, sizes))
        for name, (first, last) in spans.items()
    ]


def _bytes(plan: LaunchPlan, name: str, sizes: Sizes) -> int:
    buffer = plan.values[name]
    size = buffer.elements.value(sizes) * ITEM_SIZE[buffer.dtype]
    return -(-size // ALIGNMENT) * ALIGNMENT


def _lowest(taken: list[tuple[int, int]], size: int) -> int:
    """The lowest start of `size` free bytes; `taken` are in order and may overlap."""
    start = 0
    for begin, end in taken:
        if begin - start >= size:
            break
        start = max(start, end)
    return start
