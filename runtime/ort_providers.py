"""Choosing and starting ONNX Runtime's execution provider, and checking that it really runs.

ONNX Runtime takes a list of providers and ignores those that it cannot start, at most with a line
in its log. Here a requested provider either runs or raises an error.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge.errors import EngineError

if TYPE_CHECKING:
    import onnxruntime  # type: ignore[import-untyped, unused-ignore]

CPU = "cpu"
# this project's names → ONNX Runtime's names
PROVIDERS: Mapping[str, str] = {
    CPU: "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
VARIABLE = "EDGE_ORT_PROVIDERS"
# keep fp32 products in fp32: the CUDA provider's default is TF32, with 10 mantissa bits
_OPTIONS: Mapping[str, Mapping[str, str]] = {"cuda": {"use_tf32": "0"}}
_NAMES = "cpu, cuda or tensorrt"
HELP = f"ONNX Runtime's, with --engine ort: {_NAMES}; else what {VARIABLE} lists."

# creates a session with exactly these providers, in this order
Providers = Sequence[tuple[str, dict[str, str]]]
Make = Callable[[Providers], "onnxruntime.InferenceSession"]


@dataclass(frozen=True)
class Choice:
    """The requested providers.

    Attributes:
        names: keys of `PROVIDERS`, tried in turn.
        field: source of the request, for errors.
    """

    names: tuple[str, ...]
    field: str


def choose(provider: str | None = None) -> Choice:
    """Return the given provider, or those EDGE_ORT_PROVIDERS lists, or the CPU's.

    Raises EngineError for an unknown name.
    """
    if provider is not None:
        return Choice((_checked_name(provider, "provider"),), "provider")
    return Choice(listed() or (CPU,), VARIABLE)


def listed() -> tuple[str, ...]:
    """Return the names in EDGE_ORT_PROVIDERS. Raises EngineError for an unknown name."""
    names = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    return tuple(dict.fromkeys(_checked_name(name, VARIABLE) for name in names if name))


def _checked_name(name: str, field: str) -> str:
    if name not in PROVIDERS:
        raise EngineError(f"unknown provider {name!r:.60}", field=field, remedy=_NAMES)
    return name


def available() -> tuple[str, ...]:
    """Return the providers in the installed ONNX Runtime, by its own names.

    Raises EngineError if it is not installed.
    """
    from edge.onnx_runtime import onnxruntime

    return tuple(onnxruntime.get_available_providers())


def device(provider: str) -> Any:
    """Return the device, an OrtDevice, whose memory a provider's runs work in; None for the CPU's.

    None too where ONNX Runtime cannot take parts of a tensor on a device: it then copies states.
    """
    if provider == CPU:
        return None
    # imported late: `edge.runtime.engines` needs this module where ONNX Runtime is not installed
    from onnxruntime.capi.onnxruntime_pybind11_state import (  # type: ignore[import-untyped]
        OrtDevice,
        OrtValue,
    )

    if not hasattr(OrtValue, "from_dlpack"):
        return None
    return OrtDevice(OrtDevice.cuda(), OrtDevice.default_memory(), 0)


@functools.cache
def packages() -> tuple[str, ...]:
    """Return the installed packages that provide the module; several overwrite each other."""
    # called late and once: reads the list of files of every package
    from importlib.metadata import packages_distributions

    return tuple(sorted(set(packages_distributions().get("onnxruntime", ()))))


def start(choice: Choice, make: Make) -> tuple[onnxruntime.InferenceSession, str]:
    """Return a session on the first provider of the choice that runs here, and the provider's name.

    Each falls back to the CPU's for nodes it has no kernels for. Raises EngineError if none runs.
    Exceptions that `make` raises for the CPU's are faults of the graph and pass through.
    """
    problems = []
    for name in choice.names:
        try:
            return _start_provider(name, make), name
        except EngineError as problem:
            problems.append(problem)
    if len(problems) == 1:
        raise problems[0]
    raise EngineError(
        "; ".join(f"{problem.field}: {problem.message}" for problem in problems),
        field=choice.field,
        remedy="end the list with cpu, or: " + str(problems[0].remedy),
    )


def _start_provider(name: str, make: Make) -> onnxruntime.InferenceSession:
    if name == CPU:
        return make([(PROVIDERS[CPU], {})])
    _load_libraries()
    included = available()
    if PROVIDERS[name] not in included:
        raise EngineError(
            f"the installed ONNX Runtime is built without {PROVIDERS[name]}: it has "
            + ", ".join(included),
            field=f"provider {name}",
            remedy=_install_remedy(),
        )
    # CUDA may run nodes that TensorRT does not support
    accelerated = [provider for provider in ("tensorrt", "cuda") if PROVIDERS[provider] in included]
    names = [*accelerated[accelerated.index(name) :], CPU]
    try:
        session = make(
            [(PROVIDERS[provider], dict(_OPTIONS.get(provider, {}))) for provider in names]
        )
    except Exception as problem:
        raise _start_error(name, f": {str(problem).strip()}") from problem
    if PROVIDERS[name] not in session.get_providers():
        raise _start_error(name, ", and would run on " + ", ".join(session.get_providers()))
    return session


def _start_error(name: str, reason: str) -> EngineError:
    needed = "CUDA and cuDNN" if name == "cuda" else "CUDA, cuDNN and TensorRT"
    return EngineError(
        f"ONNX Runtime cannot start {PROVIDERS[name]}{reason}",
        field=f"provider {name}",
        remedy=f"install an NVIDIA driver and the {needed} that this build needs, on the library "
        "path; ONNX Runtime's messages on standard error name what is missing; "
        'pip install "mamba-edge[ort-gpu]" brings CUDA and cuDNN',
    )


def _install_remedy() -> str:
    """Return what to install. A CPU build must be removed first, or it shadows the GPU build."""
    remove = f"pip uninstall -y {' '.join(packages()) or 'onnxruntime'}, then "
    return (
        f'{remove}pip install "mamba-edge[ort-gpu]"; on a Jetson a wheel for its JetPack: '
        "docs/use/onnx-runtime.md"
    )


def _load_libraries() -> None:
    """Load CUDA and cuDNN from pip's packages, where the dynamic linker does not look."""
    from edge.onnx_runtime import onnxruntime

    load: Any = getattr(onnxruntime, "preload_dlls", None)
    if load is not None:
        # it reports missing libraries on standard output, which is reserved for the answer
        with redirect_stdout(sys.stderr):
            load()
