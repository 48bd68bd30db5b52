"""The launch plan: a model's graph as lists of kernel launches over named memory.

The exporter writes it beside the graph (`graphs/cuda.json`), and the runtime reads it. A plan is
independent of the device: compiled kernels are looked up by `Variant.key`.

A model has one program for each way to run it. A program is an ordered list of launches. All values
are rows of channels: T·B rows (L·B for values that only the wanted tokens need), time-major, row
t·B+b. Launch sizes are products of the run's symbols, which are known before the run starts:

    T tokens of the run · B sequences · L wanted rows · C capacity of the KV caches · S log slots

Everything else that differs between runs is in device memory (`RUN_FIELDS`, token ids, index
lists), so one recorded graph of launches serves all runs of the same sizes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1

# Compute capabilities that kernels are compiled for: 87 means 8.7, sm_87.
ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 120)

# Fields of the i32 input `run`. A run starts from recurrent state slot SOURCE, replays the first
# PENDING log rows listed in `replay`, then runs T new tokens. STORE selects the state written to
# slot TARGET: 0 none, 1 the state after ADVANCE replayed tokens, 2 the last state. PROGRAMS is
# about how many Triton programs the device runs side by side; 0 means unknown.
RUN_FIELDS = ("PENDING", "ADVANCE", "SOURCE", "TARGET", "STORE", "PAST", "PROGRAMS")
PENDING, ADVANCE, SOURCE, TARGET, STORE, PAST, PROGRAMS = range(len(RUN_FIELDS))

# arena values that a run returns
LOGITS, PICKED = "logits", "picked"

DType = Literal["f32", "f16", "i8", "u8", "i32", "i64"]
ITEM_SIZE: Mapping[str, int] = {"f32": 4, "f16": 2, "i8": 1, "u8": 1, "i32": 4, "i64": 8}
Sizes = Mapping[str, int]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Count = Annotated[int, Field(ge=0, le=1 << 48)]
_Constant = bool | int | float | str | None


# maximum number of faults listed; the others are counted
_MAX_LISTED = 8


def _whole(value: object) -> object:
    if type(value) is not int:
        raise ValueError("Input should be a valid integer")
    return value


# Precedes a `Literal` of numbers, which alone would accept 8.0 as 8 and true as 1.
WHOLE = BeforeValidator(_whole)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Size(_Strict):
    """ceil(times · product of symbols / per): `Size(times=3, of="TB")` is 3·T·B."""

    times: _Count = 1
    of: Annotated[str, Field(pattern=r"^[TBLCS]{0,4}$")] = ""
    per: Annotated[int, Field(ge=1, le=1 << 31)] = 1

    def value(self, sizes: Sizes) -> int:
        return -(-self.times * math.prod(sizes[symbol] for symbol in self.of) // self.per)


class Variant(_Strict):
    """One kernel with the types and constants it is compiled for.

    Attributes:
        kernel: `file.function`, in `triton_{file}.py` of an op's folder under `edge.plugins`.
        arguments: names of the run-time parameters, in the kernel's order.
        types: their Triton types: `*fp32`, `*i8`, `i32`, `fp32`; `:16` after a pointer means that
            it is a multiple of 16.
        constants: compile-time parameters by name.
        warps, stages: `num_warps`, `num_stages`.
    """

    kernel: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$")]
    arguments: tuple[_Name, ...]
    types: tuple[Annotated[str, Field(pattern=r"^(\*?[a-z]+[0-9]*)(:16)?$")], ...]
    constants: dict[str, _Constant]
    warps: Annotated[Literal[1, 2, 4, 8, 16], WHOLE] = 4
    stages: Annotated[int, Field(ge=1, le=8)] = 2

    @property
    def key(self) -> str:
        """Key of the compiled kernel: equal variants, and only those, have equal keys."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return f"{self.kernel}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Pointer(_Strict):
    """Memory passed to a kernel. `at` is an offset in elements from the start of `name`.

    Attributes:
        space: arena `value` (`logits` among them), constant `weight` or `inline`, `input` that the
            host writes before a run, recurrent `state` [2 slots, …], `log` [S, B, width] of replay
            inputs, or `cache` of keys or values.
    """

    space: Literal["value", "weight", "inline", "input", "state", "log", "cache"]
    name: _Name
    at: _Count = 0


Argument = Pointer | Size | float


class Launch(_Strict):
    """One kernel launch. A grid dimension that evaluates to 0 counts as 1.

    Attributes:
        variant: index into the plan's variants.
        settles: whether it is needed, with T = 0, to advance the recurrent state alone.
    """

    variant: Annotated[int, Field(ge=0)]
    grid: tuple[Size, Size, Size]
    arguments: tuple[Argument, ...]
    settles: bool = False


class Program(_Strict):
    """The launches of one way to run the model.

    Attributes:
        kind: `chain`, `tree`, or `settle` (no new token: the state catches up with its log).
        max_rows: maximum number of rows T·B; None means any.
        launches: indices into the plan's launches.
        picks: further launches for runs that want the best token of each row, not its logits:
            value `picked` i32 [L·B], -1 where a logit is NaN.
    """

    kind: Literal["chain", "tree", "settle"]
    max_rows: Annotated[int, Field(gt=0)] | None
    launches: tuple[Annotated[int, Field(ge=0)], ...]
    picks: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of all launches, in order."""
        return (*self.launches, *self.picks)


class Buffer(_Strict):
    """The dtype and number of elements of an arena value or an input."""

    dtype: DType
    elements: Size


class Weight(_Strict):
    """A tensor in weights.bin."""

    dtype: DType
    offset: _Count
    elements: _Count


class Inline(_Strict):
    """A small constant stored in the plan itself; `data` is little-endian hexadecimal."""

    dtype: DType
    data: Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=1 << 17)]


class Log(_Strict):
    """Values that a replay reads again: `width` channels per token and sequence."""

    dtype: DType
    width: Annotated[int, Field(gt=0)]


class LaunchPlan(_Strict):
    """A launch plan, as the module describes it. A run uses the first program that fits it.

    Attributes:
        taps: widths K of the convolutions. For each, the inputs `taps{K}` i32[T,K] and
            `state_taps{K}` i32[K-1] index the rows [state (K-1) | log slots (S) | new tokens (T)].
        rotations: (theta, dim) of each RoPE table `rope{i}.cos`, `rope{i}.sin` f32[T, dim/2].
            theta is 0 if the frequencies are not powers of one; `inverses` then has them.
        inverses: inverse frequencies by `rope{i}`.
    """

    schema_version: Literal[1] = 1
    variants: tuple[Variant, ...]
    launches: tuple[Launch, ...]
    programs: tuple[Program, ...]
    values: dict[_Name, Buffer]
    inputs: dict[_Name, Buffer]
    weights: dict[_Name, Weight]
    inline: dict[_Name, Inline] = {}
    logs: dict[_Name, Log] = {}
    taps: tuple[int, ...] = ()
    rotations: tuple[tuple[float, int], ...] = ()
    inverses: dict[_Name, tuple[float, ...]] = {}

    @model_validator(mode="after")
    def _references_exist(self) -> LaunchPlan:
        spaces: dict[str, Mapping[str, object]] = {
            "value": self.values,
            "weight": self.weights,
            "inline": self.inline,
            "input": self.inputs,
            "log": self.logs,
        }
        faults: list[str] = []
        for number, launch in enumerate(self.launches):
            if launch.variant >= len(self.variants):
                faults.append(f"launches[{number}]: unknown variant {launch.variant}")
                continue
            variant = self.variants[launch.variant]
            if not len(launch.arguments) == len(variant.arguments) == len(variant.types):
                faults.append(f"launches[{number}]: its arguments do not match {variant.kernel}")
            for argument in launch.arguments:
                if not isinstance(argument, Pointer) or argument.space not in spaces:
                    continue
                if argument.name not in spaces[argument.space]:
                    faults.append(f"launches[{number}]: no {argument.space} {argument.name!r}")
        for number, program in enumerate(self.programs):
            if any(index >= len(self.launches) for index in program.order):
                faults.append(f"programs[{number}]: names a launch that does not exist")
        if faults:
            left = f"; and {len(faults) - _MAX_LISTED} more" if len(faults) > _MAX_LISTED else ""
            raise ValueError("; ".join(faults[:_MAX_LISTED]) + left)
        return self

    def to_json(self) -> bytes:
        """Return the canonical byte form."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        return (json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n").encode()


Dims = tuple[int | str, ...]


def host_inputs(
    taps: Iterable[int], rotations: Sequence[tuple[float, int]]
) -> dict[str, tuple[DType, Dims]]:
    """Return the dtype and dimensions of each input the host may write before a run.

    T tokens · B sequences · L wanted rows · P entries of `replay` · A T for a tree, 1 for a chain
    """
    inputs: dict[str, tuple[DType, Dims]] = {
        "run": ("i32", (8,)),
        "tokens": ("i32", ("T", "B")),
        "rows": ("i32", ("L",)),
        "replay": ("i32", ("P",)),
        "slots": ("i32", ("T",)),
        "positions": ("i32", ("T",)),
        "ancestors": ("i32", ("A", "A")),
    }
    for width in taps:
        inputs[f"taps{width}"] = ("i32", ("T", width))
        inputs[f"state_taps{width}"] = ("i32", (width - 1,))
    for index, (_, dim) in enumerate(rotations):
        for part in ("cos", "sin"):
            inputs[f"rope{index}.{part}"] = ("f32", ("T", dim // 2))
    return inputs


def elements(dims: Dims, *, tree: bool) -> Size:
    """Return the number of elements of these dimensions; `replay` has one entry per log slot."""
    symbols = {"P": "S", "A": "T" if tree else ""}
    return Size(
        times=math.prod(dim for dim in dims if isinstance(dim, int)),
        of="".join(symbols.get(dim, dim) for dim in dims if isinstance(dim, str)),
    )


class CompiledKernel(_Strict):
    """One variant compiled for one architecture.

    Attributes:
        file: cubin, beside the index; its hash is in the bundle's manifest.
        symbol: name of the kernel in the cubin.
        shared_bytes: bytes of dynamic shared memory to launch it with.
        scratch: number of trailing pointer parameters that Triton adds; null is passed for each.
        registers, local_bytes: use per thread; local memory means that registers ran out.
    """

    file: _Name
    symbol: _Name
    shared_bytes: Annotated[int, Field(ge=0, le=1 << 20)]
    scratch: Annotated[int, Field(ge=0, le=8)]
    registers: _Count = 0
    local_bytes: _Count = 0


class KernelIndex(_Strict):
    """`kernels/sm_XX/kernels.json`: the compiled kernels of a plan's variants.

    Attributes:
        sm: architecture, 87 for sm_87.
        triton, ptxas: versions of the compilers.
        kernels: compiled kernels by `Variant.key`.
    """

    schema_version: Literal[1] = 1
    sm: Annotated[int, Field(ge=70, le=199)]
    triton: str
    ptxas: str
    kernels: dict[_Name, CompiledKernel]

    def to_json(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n").encode()
