"""The runs of a state: their sizes, their memory and the placement of their values.

A program's launches run in order, so a value lives from the first launch that names it to the last.
Values are placed largest first, each at the lowest offset that is free for its whole lifetime:
"greedy by size" of Pisarchyk and Lee, Efficient memory management for deep neural net inference,
arXiv 2001.03288, section 5.
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

# Chains and trees of at most this many tokens are recorded: decoding and drafting use them. Longer
# runs take milliseconds, compared with which issuing their launches costs little.
RECORDED = 16


class RunKey(NamedTuple):
    """Identifies a run: program index, T, L, and whether it ends in picked token ids."""

    program: int
    tokens: int
    rows: int
    picked: bool = False


@dataclass(frozen=True)
class StateRuns:
    """The possible runs of a state.

    Attributes:
        plan: launch plan with the programs.
        executor: runs the programs.
        chunk: maximum number of tokens of a committing run.
        layout, window: layout and window of the state.
        width: number of values per row of a run's result.
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
        """Return the values of the symbols of `edge.launch`."""
        return {
            "T": key.tokens,
            "B": self.batch,
            "L": key.rows,
            "C": self.layout.capacity,
            "S": log_slots(self.window),
            SLOTS: self.layout.capacity if self.layout.slots is None else self.layout.slots,
        }

    def key(self, kind: str, tokens: int, rows: int, picked: bool = False) -> RunKey:
        """Return the key of a run. Raises InputError if no program takes this many rows, or for a
        tree if the executor does not support trees.
        """
        if kind == "tree" and not self.executor.trees:
            raise InputError(
                "an engine without plugins (TensorRT for RTX) runs only chains",
                field="parents",
                remedy="draft chains, or build the engine with TensorRT",
            )
        program = choose_program(self.plan, kind, tokens * self.batch)
        if program is None:
            maximum = max(
                (p.max_rows or 0 for p in self.plan.programs if p.kind == kind), default=0
            )
            raise InputError(
                f"{tokens} tokens for {self.batch} sequences are too many for a {kind}: "
                f"tokens · sequences must be at most {maximum}",
                field="parents",
                remedy="draft fewer tokens",
            )
        return RunKey(program, tokens, rows, picked)

    def recorded(self) -> list[RunKey]:
        """Return the runs to record: those of decoding, drafting and prefill."""
        keys = []
        for count in range(1, min(self.window, RECORDED) + 1):
            keys += [self.key("chain", count, 1), self.key("chain", count, count)]
            has_tree = choose_program(self.plan, "tree", count * self.batch) is not None
            if has_tree and self.executor.trees:
                keys.append(self.key("tree", count, count))
        step = self.key("chain", 1, 1, True)
        if self.plan.programs[step.program].picks:
            keys.append(step)
        keys += [self.key("chain", self.chunk, 1), self.key("settle", 0, 0)]
        # a run that the KV caches have no room for never happens
        room = self.layout.capacity if self.layout.caches else self.chunk + self.window
        programs = self.plan.programs
        return [
            key
            for key in dict.fromkeys(keys)
            if programs[key.program].launches and key.tokens <= room
        ]

    def spacious(self, key: RunKey) -> RunKey:
        """Return the run whose input and value layout `key` shares: the largest of its program.

        Addresses are thus resolved once per program, whatever the prompt lengths. All logits of a
        chunk take many megabytes and have a layout of their own.
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
        """Return the layout of the values of a spacious run."""
        if key not in self._arenas:
            self._arenas[key] = self.executor.values(self, key)
        return self._arenas[key]

    def block(self, key: RunKey) -> InputBlock:
        """Return the layout of the inputs of a spacious run."""
        if key not in self._blocks:
            self._blocks[key] = InputBlock(self.executor.inputs(key.program), self.sizes(key))
        return self._blocks[key]

    @property
    def values_bytes(self) -> int:
        """Bytes of the values of any run, except those with more logits than a window's."""
        return max(self.arena(key).total for key in self._spacious(1))

    @property
    def inputs_bytes(self) -> int:
        """Bytes of the inputs of any run."""
        rows = max(self.chunk, self.window)
        return max(1, *(self.block(key).nbytes for key in self._spacious(rows)))

    def _spacious(self, rows: int) -> list[RunKey]:
        """Return the spacious runs of all programs for logits of at most `rows` tokens."""
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
        """Dtype of a run's result: f32 for logits."""
        return self.plan.values[LOGITS].dtype

    def logits_bytes(self, rows: int) -> int:
        return ITEM_SIZE[self.out] * rows * self.batch * self.width


def choose_program(plan: LaunchPlan, kind: str, rows: int) -> int | None:
    """Return the index of the first program for `rows` = T·B rows; None if there is none."""
    for index, program in enumerate(plan.programs):
        if program.kind == kind and (program.max_rows is None or rows <= program.max_rows):
            return index
    return None


class Arena(NamedTuple):
    """Layout of values: byte offsets by name, multiples of 256, and the total size."""

    offsets: dict[str, int]
    total: int


class _Lifetime(NamedTuple):
    name: str
    first: int
    last: int
    size: int


def place(
    program: Program, plan: LaunchPlan, sizes: Sizes, kept: Collection[str] = (LOGITS, PICKED)
) -> Arena:
    """Place the values of one program at these sizes; `kept` values are read after the run."""
    lifetimes = _lifetimes(program, plan, sizes, kept)
    # (start, end) of the values alive during each launch
    occupied: list[list[tuple[int, int]]] = [[] for _ in program.order]
    offsets: dict[str, int] = {}
    total = 0
    for lifetime in sorted(
        lifetimes, key=lambda lifetime: (-lifetime.size, lifetime.first, lifetime.name)
    ):
        during = occupied[lifetime.first : lifetime.last + 1]
        start = _lowest_free(sorted({span for spans in during for span in spans}), lifetime.size)
        offsets[lifetime.name] = start
        total = max(total, start + lifetime.size)
        if lifetime.size:
            for spans in during:
                spans.append((start, start + lifetime.size))
    return Arena(offsets, total)


def _lifetimes(
    program: Program, plan: LaunchPlan, sizes: Sizes, kept: Collection[str]
) -> list[_Lifetime]:
    spans: dict[str, tuple[int, int]] = {}
    for step, index in enumerate(program.order):
        for argument in plan.launches[index].arguments:
            if isinstance(argument, Pointer) and argument.space == "value":
                spans[argument.name] = (spans.get(argument.name, (step, step))[0], step)
    end = len(program.order) - 1
    return [
        _Lifetime(name, first, end if name in kept else last, _aligned_bytes(plan, name, sizes))
        for name, (first, last) in spans.items()
    ]


def _aligned_bytes(plan: LaunchPlan, name: str, sizes: Sizes) -> int:
    buffer = plan.values[name]
    size = buffer.elements.value(sizes) * ITEM_SIZE[buffer.dtype]
    return -(-size // ALIGNMENT) * ALIGNMENT


def _lowest_free(occupied: list[tuple[int, int]], size: int) -> int:
    """Return the lowest start of `size` free bytes; `occupied` is sorted and may overlap."""
    start = 0
    for begin, end in occupied:
        if begin - start >= size:
            break
        start = max(start, end)
    return start
