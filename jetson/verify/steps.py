"""The steps, from the simplest to the largest, so that each one fails for its own reasons."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge.bundle import open_bundle
from edge.errors import EdgeError
from edge.runtime.model import resolve
from jetson.verify import board

# exit code of a step's program that cannot run here; its last line has the reason
NOT_RUN = 3
# minimum Python of `mamba-edge[export]`; the runtime's is 3.10, JetPack 6's version
EXPORTER = (3, 11)

Need = Callable[[str], str | None]


@dataclass(frozen=True)
class VerifyStep:
    """One program that proves a claim.

    Attributes:
        claim: the claim that it proves.
        command: arguments of Python, with `{bundle}` and `{out}` (folder of the step's files).
        needs: names in NEEDS.
        limit_s: seconds after which it is killed.
        environment: additional environment variables.
    """

    name: str
    claim: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    limit_s: int = 600
    environment: Mapping[str, str] | None = None

    def line(self, bundle: str, out: Path) -> list[str]:
        """Return the command line."""
        return [
            sys.executable,
            *(part.format(bundle=bundle, out=out) for part in self.command),
        ]


def _ok(check: str) -> Need:
    """Need a check of `edge doctor` to be ok."""

    def need(_: str) -> str | None:
        finding = board.found(check)
        reason = finding.detail if finding.remedy is None else f"{finding.detail}: {finding.remedy}"
        return None if finding.status == "ok" else reason

    return need


def _kernels(bundle: str) -> str | None:
    """Need kernels for any GPU; loading them shows whether they fit this one."""
    try:
        with open_bundle(resolve(bundle)) as opened:
            has_kernels = bool(opened.manifest.kernels)
    except EdgeError as problem:
        return str(problem)
    if has_kernels or _importable("triton"):
        return None
    return (
        f"{bundle} has no kernels and Triton is not installed; on another machine: "
        f"edge export {bundle} -o BUNDLE --target orin-nano"
    )


def _exporter(_: str) -> str | None:
    """Need the packages that lower and compile kernels, which JetPack 6 cannot have."""
    if sys.version_info < EXPORTER:
        current, required = (
            ".".join(map(str, version[:2])) for version in (sys.version_info, EXPORTER)
        )
        return f"needs the exporter, which needs Python {required}; this is {current}"
    return _lacking("torch", "triton", "onnx")


def _lacking(*packages: str) -> str | None:
    absent = [name for name in packages if not _importable(name)]
    return f"needs the packages {', '.join(absent)}" if absent else None


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


NEEDS: Mapping[str, Need] = {
    "gpu": _ok("driver"),
    "bindings": _ok("cuda-core"),
    "tensorrt": _ok("plugins"),
    "kernels": _kernels,
    "exporter": _exporter,
    "onnx": lambda _: _lacking("onnx"),
    "tests": lambda _: _lacking("pytest", "hypothesis", "transformers"),
}
_CUDA = ("gpu", "bindings", "kernels")
_TRT = (*_CUDA, "tensorrt")
_EDGE = ("-m", "edge.apps.cli")
_PROFILE = (*_EDGE, "profile", "{bundle}", "--json", "--html", "{out}/page.html", "--engine")

STEPS: tuple[VerifyStep, ...] = (
    VerifyStep("doctor", "what is installed works", ("-m", "jetson.verify.doctor", "{bundle}")),
    VerifyStep(
        "cpu",
        "the runtime on this machine's CPU: chunks, steps, rewind, trees, files, text",
        ("tests/oldest_runtime.py",),
    ),
    VerifyStep(
        "first-cubin",
        "this driver loads the output of Triton's ptxas, and one kernel is right",
        ("-m", "tests.gpu.first_cubin"),
        ("exporter", "gpu", "bindings"),
    ),
    VerifyStep(
        "single-plugins",
        "TensorRT builds an engine of each single plugin, and it is right",
        ("-m", "jetson.verify.single_plugin", "{bundle}"),
        (*_TRT, "onnx"),
        1800,
    ),
    VerifyStep(
        "kernels",
        "every kernel, device memory and graphs are right on this GPU",
        (
            "-m", "pytest", "-q", "-p", "no:cacheprovider",
            "tests/gpu", "tests/kernels", "tests/cuda",
        ),
        ("exporter", "tests", "gpu", "bindings"),
        1800,
        {"EDGE_TEST_DEVICE": "cuda"},
    ),
    VerifyStep(
        "cuda-engine",
        "the CUDA engine agrees with ONNX Runtime",
        ("-m", "jetson.verify.engines", "agree", "{bundle}", "cuda", "ort"),
        _CUDA,
    ),
    VerifyStep(
        "build",
        "TensorRT builds the engine of a whole model",
        (*_EDGE, "build", "{bundle}", "--json"),
        _TRT,
        1800,
    ),
    VerifyStep(
        "tensorrt-engine",
        "the TensorRT engine agrees with the CUDA engine",
        ("-m", "jetson.verify.engines", "agree", "{bundle}", "tensorrt", "cuda"),
        _TRT,
    ),
    VerifyStep("profile-ort", "speed and energy on the CPU", (*_PROFILE, "ort")),
    VerifyStep("profile-cuda", "speed and energy of the CUDA engine", (*_PROFILE, "cuda"), _CUDA),
    VerifyStep(
        "profile-tensorrt",
        "speed and energy of the TensorRT engine",
        (*_PROFILE, "tensorrt"),
        _TRT,
    ),
    VerifyStep(
        "memory-cuda",
        "memory does not grow over many answers of the CUDA engine",
        ("-m", "jetson.verify.engines", "grow", "{bundle}", "cuda"),
        _CUDA,
        1200,
    ),
    VerifyStep(
        "memory-tensorrt",
        "memory does not grow over many answers of the TensorRT engine",
        ("-m", "jetson.verify.engines", "grow", "{bundle}", "tensorrt"),
        _TRT,
        1200,
    ),
)  # fmt: skip


def missing(step: VerifyStep, bundle: str) -> str | None:
    """Return why the step cannot run here, or None if it can."""
    for need in step.needs:
        reason = NEEDS[need](bundle)
        if reason is not None:
            return reason
    return None
