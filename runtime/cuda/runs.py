"""Which runs a state can ask for, how much memory each needs, and where its values lie in it.

A program's launches run one after the other, so a value lives from the first launch that names it
to the last. Largest first, each value takes the lowest place that is free all its life; "greedy by
size" of Pisarchyk and Lee, Efficient memory management for deep neural net inference, arXiv
2001.03288, section 5.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from edge.errors import InputError
from edge.launch import ITEM_SIZE, LOGITS, PICKED, DType, LaunchPlan, Pointer, Program, Sizes
from edge.runtime.cuda.device import ALIGNMENT
from edge.runtime.cuda.executor import Executor
from edge.runtime.cuda.inputs import InputBlock
from edge.runtime.cuda.sliding import SLOTS
from edge.runtime.cuda.state import blocks
from edge.runtime.layout import StateLayout
from edge.runtime.ledger import log_slots

# Chains and trees of at most so many tokens are recorded when a state is made: what decoding and
# drafting use. Longer runs take milliseconds, beside which issuing their launches is little.
RECORDED = 16


class RunKey(NamedTuple):
    """What tells one run from another: the program, T, L, and whether it ends in picks."""

    program: int
    tokens: int
    rows: int
    picked: bool = False


@dataclass(frozen=True)
class StateRuns:
    """The runs of one state.

    Attributes:
        plan: its programs; `executor` does what they say.
        chunk: most tokens of a committing run.
        layout, window: of the state.
        width: values of a row of what runs give.
    """

    plan: LaunchPlan
    executor: Executor
    chunk: int
    layout: StateLayout
    window: int
    width: int
    _arenas: dict[RunKey, Arena] = field(default_factory=dict, repr=False, compare=False)
    _blocks: dict[RunKey, InputBlock] = field(default_factory=dict, repr=False, compare=False)

    @property
    def batch(self) -> int:
        return self.layout.batch

    def sizes(self, key: RunKey) -> Sizes:
        """The symbols of `edge.launch`."""
        return {
            "T": key.tokens,
            "B": self.batch,
            "L": key.rows,
            "C": self.layout.capacity,
            "S": log_slots(self.window),
            SLOTS: self.layout.capacity if self.layout.slots is None else self.layout.slots,
        }

    def key(self, kind: str, tokens: int, rows: int, picked: bool = False) -> RunKey:
        """Raises InputError when no program takes this many rows, or none runs trees."""
        if kind == "tree" and not self.executor.trees:
            raise InputError(
                "an engine without plugins (TensorRT for RTX) runs chains alone",
                field="parents",
                remedy="draft chains, or build the engine with TensorRT",
            )
        found = choose_program(self.plan, kind, tokens * self.batch)
        if found is None:
            most = max((p.max_rows or 0 for p in self.plan.programs if p.kind == kind), default=0)
            raise InputError(
                f"{tokens} tokens for {self.batch} sequences are too many for a {kind}: "
                f"tokens · sequences must be at most {most}",
                field="parents",
                remedy="draft fewer tokens",
            )
        return RunKey(found, tokens, rows, picked)

    def recorded(self) -> list[RunKey]:
        """What decoding, drafting and reading prompts use."""
        keys = []
        for count in range(1, min(self.window, RECORDED) + 1):
            keys += [self.key("chain", count, 1), self.key("chain", count, count)]
            tree = choose_program(self.plan, "tree", count * self.batch) is not None
            if tree and self.executor.trees:
                keys.append(self.key("tree", count, count))
        step = self.key("chain", 1, 1, True)
        if self.plan.programs[step.program].picks:
            keys.append(step)
        keys += [self.key("chain", self.chunk, 1), self.key("settle", 0, 0)]
        # runs that the KV caches have no room for are never asked for
        room = self.layout.capacity if self.layout.caches else self.chunk + self.window
        programs = self.plan.programs
        return [
            key
            for key in dict.fromkeys(keys)
            if programs[key.program].launches and key.tokens <= room
        ]

    def spacious(self, key: RunKey) -> RunKey:
        """The run whose layout of inputs and values serves `key`: the largest of its program.

        So addresses are filled into a program's launches once, whatever the lengths of prompts.
        All logits of a chunk are many megabytes, and have a layout of their own.
        """
        program = self.plan.programs[key.program]
        if program.kind == "settle":
            return key
        longest = max(self.chunk, self.window)
        if program.max_rows is not None:
            tokens = min(longest, max(1, program.max_rows // self.batch))
            return RunKey(key.program, tokens, tokens)
        rows = self.window if key.rows <= self.window else longest
        return RunKey(key.program, longest, min(rows, longest))

    def arena(self, key: RunKey) -> Arena:
        """Places of the values of a spacious run."""
        if key not in self._arenas:
            self._arenas[key] = self.executor.values(self, key)
        return self._arenas[key]

    def block(self, key: RunKey) -> InputBlock:
        """Places of the inputs of a spacious run."""
        if key not in self._blocks:
            self._blocks[key] = InputBlock(self.executor.inputs(key.program), self.sizes(key))
        return self._blocks[key]

    @property
    def values_bytes(self) -> int:
        """Bytes of the values of all runs but those that want more logits than a window's."""
        return max(self.arena(key).total for key in self._spacious(1))

    @property
    def inputs_bytes(self) -> int:
        """Bytes of the inputs of any run."""
        rows = max(self.chunk, self.window)
        return max(1, *(self.block(key).nbytes for key in self._spacious(rows)))

    def _spacious(self, rows: int) -> list[RunKey]:
        """The layouts for runs that want logits of at most `rows` tokens."""
        return [self.spacious(RunKey(index, 0, rows)) for index in range(len(self.plan.programs))]

    def memory_plan(self) -> dict[str, int]:
        recurrent, caches = blocks(self.layout, self.window, self.executor.state_slots(self.window))
        out = {
            "weights": self.executor.weights_bytes,
            "state_ring": recurrent.nbytes,
            "kv_cache": caches.nbytes,
            "logits": self.logits_bytes(self.window),
            "workspace": self.values_bytes + self.inputs_bytes + self.executor.scratch_bytes,
        }
        out["total"] = sum(out.values())
        out["state"] = self.layout.slot_bytes
        out["snapshot"] = self.layout.slot_bytes + self.layout.cache_bytes
        return out

    def picked_bytes(self, rows: int) -> int:
        return ITEM_SIZE["i32"] * rows * self.batch

    @property
    def out(self) -> DType:
        """The type of what runs give: of logits f32."""
        return self.plan.values[LOGITS].dtype

    def logits_bytes(self, rows: int) -> int:
        return ITEM_SIZE[self.out] * rows * self.batch * self.width


def choose_program(plan: LaunchPlan, kind: str, rows: int) -> int | None:
    """The first program for `rows` = T·B rows, as an index; None where there is none."""
    for index, program in enumerate(plan.programs):
        if program.kind == kind and (program.max_rows is None or rows <= program.max_rows):
            return index
    return None


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
