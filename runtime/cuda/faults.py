"""Driver errors as typed errors: a single failed call, or a lost device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from edge.errors import EngineError

# After one of these the context is corrupt: the driver repeats the error at every call until the
# process ends (CUDA Driver API, CUresult: "leaves the process in an inconsistent state"). Listed by
# name because older bindings lack some of them.
STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "DEINITIALIZED", "DEVICE_UNAVAILABLE", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE",
        "CONTAINED", "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "CONTEXT_IS_DESTROYED", "ASSERT",
        "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "TENSOR_MEMORY_LEAK",
        "MPS_CLIENT_TERMINATED", "EXTERNAL_DEVICE", "UNKNOWN",
    )
)  # fmt: skip
NEW_PROCESS = "start a new process"
_REMEDY = {
    "CUDA_ERROR_NO_DEVICE": "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA does not outlive a fork: start the process with spawn",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "compile for this GPU: edge export --target",
    "CUDA_ERROR_INVALID_IMAGE": "compile again: edge export --target",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart the machine after the driver's update",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "compile again for this GPU: edge export --target",
    "CUDA_ERROR_OUT_OF_MEMORY": "use a smaller model, window or capacity, or stop other programs",
}


class DriverFaults:
    """Translates the driver errors of one device.

    Attributes:
        lost: why the device can no longer be used; None while it can.
    """

    def __init__(self, api: ModuleType) -> None:
        self.lost: str | None = None
        self._api = api

    def refuse_lost(self) -> None:
        """Raise EngineError if an earlier error lost the device."""
        if self.lost is not None:
            raise EngineError(f"the device is lost: {self.lost}", remedy=NEW_PROCESS)

    def check(self, answer: tuple[Any, ...], doing: str) -> Any:
        """Return the value from a bindings call's answer. Raises EngineError for an error code."""
        if int(answer[0]):
            code = answer[0]
            name = str(getattr(code, "name", f"CUDA error {int(code)}"))
            raise self.error(name, doing, self._text(code))
        return answer[1] if len(answer) > 1 else None

    @contextmanager
    def of(self, doing: str) -> Iterator[None]:
        """Translate exceptions from cuda-core and the bindings into EngineError."""
        try:
            yield
        except Exception as fault:
            translated = self.translated(fault, doing)
            if translated is fault:
                raise
            raise translated from fault

    def translated(self, fault: Exception, doing: str) -> Exception:
        """Return the EngineError for a cuda-core or bindings exception; any other unchanged."""
        if isinstance(fault, EngineError):
            return fault
        match = re.match(r"(CUDA_ERROR_\w+)(?:: (.*))?", str(fault), re.DOTALL)
        if match:
            return self.error(match[1], doing, match[2] or "")
        # a driver too old for a call, an error too new for the bindings, a size out of range
        if isinstance(fault, RuntimeError | ValueError | OverflowError | TypeError):
            return EngineError(f"{doing} failed: {fault}")
        return fault

    def error(self, name: str, doing: str, text: str = "") -> EngineError:
        """Return the error to raise for the CUDA error `name`; a sticky one loses the device."""
        # only the first sentence: the rest addresses kernel authors
        sentence = re.split(r"\.\s", " ".join(text.split()).rstrip("."))[0]
        message = f"{doing} failed: {name}" + (f" ({sentence})" if sentence else "")
        if name in STICKY:
            self.lose(f"{name} while {doing}")
            return EngineError(f"{message}; the device is lost", remedy=NEW_PROCESS)
        return EngineError(message, remedy=_REMEDY.get(name))

    def lose(self, reason: str) -> None:
        """Mark the device as lost: the driver is not called from now on."""
        self.lost = self.lost or reason

    def _text(self, code: Any) -> str:
        try:
            failed, text = self._api.cuGetErrorString(code)
        except (RuntimeError, ValueError, TypeError):
            return ""
        return "" if int(failed) or text is None else str(text.decode())
