"""The launch plan: a model's graph as lists of kernel launches over named memory.

The exporter writes it beside the graph (`graphs/cuda.json`), the runtime reads it. It knows nothing
of a device: the compiled kernels are found by `Variant.key`.

A model has one program for each way it can be run. A program is a list of launches, in order. All
values are rows of channels: T·B rows (or L·B, for what only the wanted tokens need), time first,
row t·B+b. A launch's sizes are products of the run's symbols, known before it starts:

    T tokens of the run · B sequences · L wanted rows · C capacity of the KV caches · S log slots

Everything else that differs from run to run lies in device memory (`RUN_FIELDS`, token ids, index
lists), so that one recorded graph of launches serves every run of its sizes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1

# Compute capabilities that kernels are compiled for: 87 is 8.7, sm_87.
ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 120)

# Fields of the input `run`, i32. A run starts from recurrent state slot SOURCE, replays the first
# PENDING tokens that the list `replay` names from the logs, then runs T new ones. STORE says which
# state goes to slot TARGET: 0 none, 1 the one after ADVANCE replayed tokens, 2 the last one. The
# device runs about PROGRAMS programs side by side; 0 is not known.
RUN_FIELDS = ("PENDING", "ADVANCE", "SOURCE", "TARGET", "STORE", "PAST", "PROGRAMS")
PENDING, ADVANCE, SOURCE, TARGET, STORE, PAST, PROGRAMS = range(len(RUN_FIELDS))

# values of the arena that a run yields
LOGITS, PICKED = "logits", "picked"

DType = Literal["f32", "f16", "i8", "u8", "i32", "i64"]
ITEM_SIZE: Mapping[str, int] = {"f32": 4, "f16": 2, "i8": 1, "u8": 1, "i32": 4, "i64": 8}
Sizes = Mapping[str, int]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Count = Annotated[int, Field(ge=0, le=1 << 48)]
_Constant = bool | int | float | str | None


# faults of a plan that are listed; the others are counted
_LISTED = 8


def _whole(value: object) -> object:
    if type(value) is not int:
        raise ValueError("Input should be a valid integer")
    return value


# Before a choice of numbers, where 8.0 equals 8 and true 1.
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
    """One kernel as it is compiled.

    Attributes:
        kernel: `file.function`, of `triton_{file}.py` in an op's folder under `edge.plugins`.
        arguments: names of the run-time parameters, in the kernel's order.
        types: Triton types of them: `*fp32`, `*i8`, `i32`, `fp32`; `:16` after a pointer says that
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
        """Names the compiled kernel: equal variants, and only those, have equal keys."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return f"{self.kernel}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Pointer(_Strict):
    """Memory handed to a kernel; `at` counts elements from where `name` starts.

    Attributes:
        space: `value` of the arena (`logits` among them), `weight` or `inline` constant, `input`
            the host writes before a run, recurrent `state` [2 slots, …], `log` [S, B, width] of
            what replays need, `cache` of keys or values.
    """

    space: Literal["value", "weight", "inline", "input", "state", "log", "cache"]
    name: _Name
    at: _Count = 0


Argument = Pointer | Size | float


class Launch(_Strict):
    """One kernel launch. A grid dimension that comes out as 0 counts as 1.

    Attributes:
        variant: index into the plan's variants.
        settles: it must be run, with T = 0, to advance the recurrent state alone.
    """

    variant: Annotated[int, Field(ge=0)]
    grid: tuple[Size, Size, Size]
    arguments: tuple[Argument, ...]
    settles: bool = False


class Program(_Strict):
    """The launches of one way to run the model.

    Attributes:
        kind: `chain`, `tree`, or `settle`: no new token, the state catches up with its log.
        max_rows: most rows T·B it is made for; None is any number.
        launches: indices into the plan's launches.
        picks: more of them, for runs that want the best token of each row instead of its logits:
            value `picked` i32 [L·B], -1 where a logit is NaN.
    """

    kind: Literal["chain", "tree", "settle"]
    max_rows: Annotated[int, Field(gt=0)] | None
    launches: tuple[Annotated[int, Field(ge=0)], ...]
    picks: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """Everything that may be launched, in order."""
        return (*self.launches, *self.picks)


class Buffer(_Strict):
    """A value of the arena or an input: its type and how many elements it has."""

    dtype: DType
    elements: Size


class Weight(_Strict):
    """A tensor of weights.bin."""

    dtype: DType
    offset: _Count
    elements: _Count


class Inline(_Strict):
    """A small constant the graph holds itself; `data` is little-endian, in hexadecimal."""

    dtype: DType
    data: Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=1 << 17)]


class Log(_Strict):
    """What a replay reads again: `width` channels a token and sequence."""

    dtype: DType
    width: Annotated[int, Field(gt=0)]


class LaunchPlan(_Strict):
    """See the module. Programs are in the order to try: the first that fits a run is used.

    Attributes:
        taps: widths K of the convolutions; for each the inputs `taps{K}` i32[T,K] and
            `state_taps{K}` i32[K-1] index the rows [state (K-1) | log slots (S) | new tokens (T)].
        rotations: rope tables `rope{i}.cos`, `rope{i}.sin` f32[T, dim/2]: (theta, dim) of each.
            theta is 0 where the frequencies are no powers of one: `inverses` has them by `rope{i}`.
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
    def _refers_to_what_it_has(self) -> LaunchPlan:
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
                faults.append(f"launches[{number}]: not the arguments of {variant.kernel}")
            for argument in launch.arguments:
                if not isinstance(argument, Pointer) or argument.space not in spaces:
                    continue
                if argument.name not in spaces[argument.space]:
                    faults.append(f"launches[{number}]: no {argument.space} {argument.name!r}")
        for number, program in enumerate(self.programs):
            if any(index >= len(self.launches) for index in program.order):
                faults.append(f"programs[{number}]: names a launch that is not there")
        if faults:
            left = f"; and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
            raise ValueError("; ".join(faults[:_LISTED]) + left)
        return self

    def to_json(self) -> bytes:
        """The one byte form."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        return (json.dumps(data, sort_keys=True, separators=(",", ":")) + "\n").encode()


Dims = tuple[int | str, ...]


def host_inputs(
    taps: Iterable[int], rotations: Sequence[tuple[float, int]]
) -> dict[str, tuple[DType, Dims]]:
    """What the host may write before a run of a plan: types and dimensions.

    T tokens · B sequences · L wanted rows · P entries of `replay` · A T for a tree, 1 for a chain
    """
    found: dict[str, tuple[DType, Dims]] = {
        "run": ("i32", (8,)),
        "tokens": ("i32", ("T", "B")),
        "rows": ("i32", ("L",)),
        "replay": ("i32", ("P",)),
        "slots": ("i32", ("T",)),
        "positions": ("i32", ("T",)),
        "ancestors": ("i32", ("A", "A")),
    }
    for width in taps:
        found[f"taps{width}"] = ("i32", ("T", width))
        found[f"state_taps{width}"] = ("i32", (width - 1,))
    for index, (_, dim) in enumerate(rotations):
        for part in ("cos", "sin"):
            found[f"rope{index}.{part}"] = ("f32", ("T", dim // 2))
    return found


def elements(dims: Dims, *, tree: bool) -> Size:
    """How many there are of these dimensions: `replay` has an entry for each of the log's slots."""
    of = {"P": "S", "A": "T" if tree else ""}
    return Size(
        times=math.prod(dim for dim in dims if isinstance(dim, int)),
        of="".join(of.get(dim, dim) for dim in dims if isinstance(dim, str)),
    )


class CompiledKernel(_Strict):
    """One variant compiled for one architecture.

    Attributes:
        file: the cubin, beside the index; its hash is in the bundle's manifest.
        symbol: the kernel's name in it.
        shared_bytes: dynamic shared memory it must be launched with.
        scratch: trailing pointer parameters that Triton adds; null is passed for each.
        registers, local_bytes: what a thread uses; local memory means that registers ran out.
    """

    file: _Name
    symbol: _Name
    shared_bytes: Annotated[int, Field(ge=0, le=1 << 20)]
    scratch: Annotated[int, Field(ge=0, le=8)]
    registers: _Count = 0
    local_bytes: _Count = 0


class KernelIndex(_Strict):
    """`kernels/sm_XX/kernels.json`: what a plan's variants were compiled to.

    Attributes:
        sm: 87 for sm_87.
        triton, ptxas: versions that made them.
        kernels: by `Variant.key`.
    """

    schema_version: Literal[1] = 1
    sm: Annotated[int, Field(ge=70, le=199)]
    triton: str
    ptxas: str
    kernels: dict[_Name, CompiledKernel]

    def to_json(self) -> bytes:
        return (json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n").encode()
