"""Checks of a launch plan before any of it runs: a plan may come from anywhere.

`check_plan` checks everything that does not depend on a run's sizes, `check_sizes` one program with
given sizes. They check which memory is named, its dtype, and the sizes of grids and buffers. How
far a kernel reads beyond its pointers follows from its constants and cannot be checked here: like
the compiled kernels, it is only as trustworthy as the source of the bundle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from edge.config import ModelConfig
from edge.errors import BundleError, Faults
from edge.launch import (
    ITEM_SIZE,
    LOGITS,
    PICKED,
    Argument,
    Buffer,
    DType,
    LaunchPlan,
    Log,
    Pointer,
    Program,
    Size,
    Sizes,
    elements,
    host_inputs,
)
from edge.rope import inverse_frequencies
from edge.tensors import kv_cache_shapes, kv_windows, padded_head_dim, recurrent_state_shapes

REMEDY = "export the model again with this version, or update mamba-edge"
# CUDA's grid limits, the same for every compute capability.
GRID = (2**31 - 1, 65535, 65535)
_INT32 = 2**31 - 1
# Far beyond the memory of any device.
_MAX_BYTES = 1 << 42
_MAX_ENTRIES = {"variants": 1 << 12, "launches": 1 << 18, "programs": 64}
_MAX_PROGRAM_LAUNCHES = 1 << 16
_MAX_PARAMETERS = 128
_TRITON: Mapping[str, DType] = {
    "fp32": "f32", "fp16": "f16", "i8": "i8", "u8": "u8", "i32": "i32", "i64": "i64",
}  # fmt: skip
_STATES: Mapping[str, DType] = {"int8": "i8", "float16": "f16"}


def check_plan(
    plan: LaunchPlan,
    config: ModelConfig,
    *,
    weight_bytes: int,
    state_dtypes: Mapping[str, str] | None = None,
) -> None:
    """Raise BundleError with every fault of a plan that does not fit the model.

    `field` locates the first fault. `weight_bytes` is the size of weights.bin; `state_dtypes` come
    from the manifest.
    """
    faults = Faults()
    for name, limit in _MAX_ENTRIES.items():
        if len(getattr(plan, name)) > limit:
            faults.add(name, f"has more than {limit} entries")
    faults.refuse(BundleError, remedy=REMEDY)  # the rest would take forever
    _check_variants(plan, faults)
    _check_constants(plan, weight_bytes, faults)
    _check_inputs(plan, config, faults)
    _check_logs(plan, config, faults)
    _check_programs(plan, config, faults)
    _check_windows(plan, config, faults)
    memory = _Memory(plan, config, state_dtypes or {}, faults)
    for number, launch in enumerate(plan.launches):
        variant = plan.variants[launch.variant]
        for name, kind, argument in zip(
            variant.arguments, variant.types, launch.arguments, strict=True
        ):
            memory.check(f"launches.{number}.{name}", kind, argument)
    faults.refuse(BundleError, remedy=REMEDY)


def check_sizes(plan: LaunchPlan, program: Program, sizes: Sizes) -> None:
    """Raise BundleError with every fault if a program's launches cannot take these sizes.

    Grids must stay within CUDA's limits, integers within i32, pointers within their buffers.
    """
    faults = Faults()
    for number in dict.fromkeys(program.order):
        launch = plan.launches[number]
        for axis, size, limit in zip("xyz", launch.grid, GRID, strict=True):
            if size.value(sizes) > limit:
                faults.add(
                    f"launches.{number}.grid.{axis}", f"is {size.value(sizes)}, over {limit}"
                )
        names = plan.variants[launch.variant].arguments
        for name, argument in zip(names, launch.arguments, strict=True):
            where = f"launches.{number}.{name}"
            if isinstance(argument, Size) and argument.value(sizes) > _INT32:
                faults.add(where, f"is {argument.value(sizes)}, beyond 32 bits")
            if isinstance(argument, Pointer) and argument.space in ("value", "input"):
                buffers = plan.values if argument.space == "value" else plan.inputs
                elements = buffers[argument.name].elements.value(sizes)
                _check_start(where, argument, elements, faults)
    for kind, buffers in (("values", plan.values), ("inputs", plan.inputs)):
        for name, buffer in buffers.items():
            if buffer.elements.value(sizes) * ITEM_SIZE[buffer.dtype] > _MAX_BYTES:
                faults.add(f"{kind}.{name}", f"has {buffer.elements.value(sizes)} elements")
    faults.refuse(BundleError, remedy=REMEDY)


def _check_start(where: str, pointer: Pointer, elements: int, faults: Faults) -> None:
    """Check that a pointer starts inside its buffer; nothing is read from an empty one."""
    if 0 < elements <= pointer.at:
        faults.add(where, f"points to element {pointer.at} of {elements} of {pointer.name!r}")


# -- contents of the plan ----------------------------------------------------------------------


def _check_variants(plan: LaunchPlan, faults: Faults) -> None:
    """Reject variants that would keep a compiler busy forever or that no kernel could take."""
    for number, variant in enumerate(plan.variants):
        names = (*variant.arguments, *variant.constants)
        if len(names) > _MAX_PARAMETERS or len(set(names)) < len(names):
            faults.add(f"variants.{number}", "has too many parameters, or one twice")
        for name, value in variant.constants.items():
            large = isinstance(value, int) and abs(value) > _INT32
            if large or (isinstance(value, str) and len(value) > _MAX_PARAMETERS):
                faults.add(f"variants.{number}.constants.{name}", "is too large")


def _check_constants(plan: LaunchPlan, weight_bytes: int, faults: Faults) -> None:
    for name, weight in plan.weights.items():
        item = ITEM_SIZE[weight.dtype]
        end = weight.offset + weight.elements * item
        if end > weight_bytes or weight.offset % item:
            faults.add(
                f"weights.{name}", f"does not lie in the {weight_bytes} bytes of weights.bin"
            )
    for name, inline in plan.inline.items():
        if len(inline.data) % (2 * ITEM_SIZE[inline.dtype]):
            faults.add(f"inline.{name}", f"is not a number of {inline.dtype}")


def _check_inputs(plan: LaunchPlan, config: ModelConfig, faults: Faults) -> None:
    """Check that inputs have forms a host writes, for the model's convolutions and rotations."""
    if not set(config.conv_widths).issuperset(plan.taps):
        faults.add("taps", f"has other widths than the model's {config.conv_widths}")
    _check_rotations(plan, config, faults)
    forms = _input_forms(plan)
    for name, buffer in plan.inputs.items():
        if buffer not in forms.get(name, ()):
            faults.add(f"inputs.{name}", "is not an input that this version makes")


def _check_rotations(plan: LaunchPlan, config: ModelConfig, faults: Faults) -> None:
    """Check that every rotation, given by theta or by frequencies, is that of a layer."""
    ropes = [layer.rotation for layer in config.layers if layer.rotation]
    tabulated = {f"rope{index}" for index, (theta, _) in enumerate(plan.rotations) if theta == 0}
    if tabulated != plan.inverses.keys():
        faults.add("inverses", f"exist for {sorted(plan.inverses)}, not for {sorted(tabulated)}")
    for index, (theta, dim) in enumerate(plan.rotations):
        candidates = [rope for rope in ropes if rope.dim == dim]
        if theta == 0:
            frequencies = plan.inverses.get(f"rope{index}", ())
            fits = any(
                _all_near(frequencies, inverse_frequencies(rope).tolist()) for rope in candidates
            )
        else:
            unscaled = [rope for rope in candidates if rope.scaling is None]
            fits = any(dim == 2 or _near(rope.theta, theta) for rope in unscaled)
        if not fits:
            faults.add("rotations", f"the model has no rotation of theta {theta} and {dim} values")


def _all_near(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(map(_near, a, b))


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def _input_forms(plan: LaunchPlan) -> dict[str, tuple[Buffer, ...]]:
    """Return the allowed forms of each input: integers may have 32 or 64 bits."""
    return {
        name: tuple(
            Buffer(dtype=allowed, elements=elements(dims, tree=True))
            for allowed in ((dtype,) if dtype == "f32" else ("i32", "i64"))
        )
        for name, (dtype, dims) in host_inputs(plan.taps, plan.rotations).items()
    }


def _check_logs(plan: LaunchPlan, config: ModelConfig, faults: Faults) -> None:
    widths = dict(_log_widths(config))
    for name, log in plan.logs.items():
        if widths.get(name) != log.width:
            faults.add(
                f"logs.{name}", f"is {log.width} wide, the model keeps {widths.get(name, 0)}"
            )


def _log_widths(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield the name and width of each log that a replay reads (`Pointer` in edge.launch)."""
    for index, layer in enumerate(config.layers):
        for name, width in layer.log_widths().items():
            yield f"layers.{index}.{name}", width


def _check_programs(plan: LaunchPlan, config: ModelConfig, faults: Faults) -> None:
    logits = Buffer(dtype="f32", elements=Size(times=config.vocab_size, of="LB"))
    if plan.values.get(LOGITS) != logits:
        faults.add(
            f"values.{LOGITS}", f"are not fp32 of {config.vocab_size} tokens and wanted rows"
        )
    kinds = {(program.kind, program.max_rows) for program in plan.programs}
    if not kinds.issuperset({("chain", None), ("settle", None)}):
        faults.add(
            "programs", "lack one for runs of any length, or one that advances the state alone"
        )
    for number, program in enumerate(plan.programs):
        if len(program.order) > _MAX_PROGRAM_LAUNCHES:
            faults.add(f"programs.{number}", f"has more than {_MAX_PROGRAM_LAUNCHES} launches")
        named = (_values(plan.launches[index].arguments) for index in program.launches)
        if program.kind != "settle" and not any(LOGITS in names for names in named):
            faults.add(f"programs.{number}", "makes no logits")
    picked = plan.values.get(PICKED)
    if picked is not None and picked != Buffer(dtype="i32", elements=Size(of="LB")):
        faults.add(f"values.{PICKED}", "are not one i32 per wanted row")


def _check_windows(plan: LaunchPlan, config: ModelConfig, faults: Faults) -> None:
    """Check that attention looks back as far as the config says: states keep no more than that."""
    windows = kv_windows(config)
    for number, launch in enumerate(plan.launches):
        variant = plan.variants[launch.variant]
        if variant.kernel != "attention.attend":
            continue
        window = variant.constants.get("WINDOW", 0)
        for argument in launch.arguments:
            if isinstance(argument, Pointer) and argument.space == "cache":
                expected = windows.get(argument.name, 0)
                if window != expected:
                    fault = f"looks back {window} positions in {argument.name!r}, not {expected}"
                    faults.add(f"launches.{number}", f"{fault} as the model does (0: all)")


def _values(arguments: tuple[Argument, ...]) -> set[str]:
    return {a.name for a in arguments if isinstance(a, Pointer) and a.space == "value"}


# -- memory that arguments point to -------------------------------------------------------------


class _Memory:
    """Dtypes of all memory an argument may name, and sizes that do not depend on a run."""

    def __init__(
        self,
        plan: LaunchPlan,
        config: ModelConfig,
        state_dtypes: Mapping[str, str],
        faults: Faults,
    ) -> None:
        self._plan, self._faults = plan, faults
        self._states: dict[str, tuple[DType, int]] = {
            name: (_STATES.get(state_dtypes.get(name, ""), "f32"), 2 * math.prod(shape))
            for name, shape in recurrent_state_shapes(config).items()
        }
        self._caches: dict[str, tuple[DType, int]] = {
            name: (
                _STATES.get(state_dtypes.get(name, ""), "f32"),
                shape[1] * padded_head_dim(shape[3]),
            )
            for name, shape in kv_cache_shapes(config, 1).items()
        }

    def check(self, where: str, kind: str, argument: Argument) -> None:
        """Check an argument against its Triton type."""
        base, _, multiple = kind.partition(":")
        if not base.startswith("*"):
            expected = {"fp32": float, "i32": Size}.get(base)
            if expected is None or multiple or not isinstance(argument, expected):
                self._faults.add(where, f"is not of type {kind}")
            return
        if not isinstance(argument, Pointer):
            self._faults.add(where, f"is not of type {kind}")
            return
        memory = self._find(argument)
        if memory is None:
            self._faults.add(where, f"the model has no {argument.space} {argument.name!r}")
            return
        dtype, elements, offset = memory
        if _TRITON.get(base[1:]) != dtype:
            self._faults.add(where, f"reads {argument.name!r}, which is {dtype}, as {base}")
        if elements is not None:
            _check_start(where, argument, elements, self._faults)
        if multiple and (offset + argument.at * ITEM_SIZE[dtype]) % int(multiple):
            self._faults.add(
                where, f"reads {argument.name!r} where it is not a multiple of {multiple} bytes"
            )

    def _find(self, pointer: Pointer) -> tuple[DType, int | None, int] | None:
        """Return (dtype, minimum number of elements or None, offset in bytes from an address that
        is a multiple of 256), or None if the model lacks that memory.
        """
        plan, name = self._plan, pointer.name
        if pointer.space == "weight":
            weight = plan.weights[name]
            return weight.dtype, weight.elements, weight.offset
        if pointer.space == "inline":
            inline = plan.inline[name]
            return inline.dtype, len(inline.data) // (2 * ITEM_SIZE[inline.dtype]), 0
        if pointer.space == "value":
            return plan.values[name].dtype, None, 0
        if pointer.space == "input":
            return plan.inputs[name].dtype, None, 0
        if pointer.space == "log":
            log: Log = plan.logs[name]
            return log.dtype, log.width, 0
        known = self._states if pointer.space == "state" else self._caches
        return (*known[name], 0) if name in known else None
