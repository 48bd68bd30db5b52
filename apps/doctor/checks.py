"""Checks of what this machine can run, by running it; each returns one finding.

Checks that load third-party libraries run in a process of their own (this module, with the name of
a check and a bundle), so that a crash or a hang is a finding too.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from edge import child
from edge.apps import exporter
from edge.apps.doctor.ort import beside, on_cuda, on_tensorrt, onnx_runtime, version
from edge.apps.doctor.tensorrt import plugins, tensorrt, tensorrt_engine
from edge.apps.measure.machine import ROOT, machine, power_mode, text
from edge.apps.terminal import say
from edge.apps.units import megabytes
from edge.errors import EdgeError
from edge.runtime.cuda import install

# compiling a model's kernels with Triton, if needed, takes a second each
LIMIT_S = 300.0
# the release of L4T that refuses large buffers (NvMap, "error 12")
_REFUSING_L4T = "36.4.7"


Status: TypeAlias = Literal["ok", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: `ok`: it ran; `absent`: it is not installed, or not for this kind of machine;
            `broken`: it is present and does not work.
        remedy: what to do, or None.
    """

    name: str
    status: Status
    detail: str
    remedy: str | None = None


Check = Callable[[str], tuple[str, str, str | None]]


def about_machine(_: str, root: Path = ROOT) -> tuple[str, str, str | None]:
    """Report the processor and the system."""
    facts = machine(root)
    board = f"{facts['board']}, " if facts["board"] else ""
    cpus = f"{facts['cpu']}, {facts['usable_cpus']} usable"
    return "ok", f"{board}{cpus}; {facts['system']}, Python {facts['python']}", None


def about_memory(_: str) -> tuple[str, str, str | None]:
    """Report the free memory of the system, within this process's control group."""
    import psutil  # type: ignore[import-untyped, unused-ignore]

    from edge.runtime.memory import available_bytes

    total, swap = psutil.virtual_memory().total, psutil.swap_memory().total
    free = available_bytes()
    shown = "unknown" if free is None else megabytes(free)
    return "ok", f"{shown} free of {megabytes(total)}, swap {megabytes(swap)}", None


def about_jetson(_: str, root: Path = ROOT) -> tuple[str, str, str | None]:
    """Report the L4T version and the name of the power mode; nothing is changed."""
    release = text(root / "etc/nv_tegra_release") or ""
    match = re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", release)
    if match is None:
        return "absent", "not a Jetson", None
    version = f"{match[1]}.{match[2]}"
    mode = power_mode(root)
    detail = f"L4T {version}, power mode {mode or 'unknown'}"
    if version == _REFUSING_L4T:
        return "broken", f"{detail}: its driver refuses large allocations", "update to L4T 36.5"
    return "ok", detail, None


def cpu_engine(bundle: str) -> tuple[str, str, str | None]:
    """Compare a step of the CPU kernels with the same step of ONNX Runtime."""
    from edge.plugins.cpu import library

    if library.path() is None:
        todo = "install a C++ compiler, then install edge again; --engine ort needs none"
        return "absent", "the kernels for CPUs were not compiled", todo
    status, detail, remedy = beside(bundle, "cpu")
    return status, f"{detail}; {library.instruction_set()}", remedy


def chosen_engine(bundle: str) -> tuple[str, str, str | None]:
    """Report the engine that `auto` chooses for the bundle, and why if it is not `cpu`."""
    from edge.runtime.engines import title
    from edge.runtime.model import load

    with load(bundle) as model:
        detail = f"runs {bundle} on {title(model.engine)}"
        why = model.engine.passed_over
    if why is None:
        return "ok", detail, None
    return "ok", f"{detail}, not on cpu: {why.message}", why.remedy


def driver(_: str) -> tuple[str, str, str | None]:
    """Report the NVIDIA driver."""
    version = install.driver_version()
    if version is None:
        return "absent", "no NVIDIA driver", "install it, or run on the CPU: --engine auto"
    return "ok", f"for CUDA {install.dotted(version)}", None


def cuda_core(_: str) -> tuple[str, str, str | None]:
    """Report the Python packages for CUDA, and load them if there is a driver."""
    packages = ("cuda-core", "cuda-bindings")
    versions = [version(name) for name in packages]
    if None in versions:
        requirement = install.requirement(install.driver_version())
        return "absent", "cuda-core or cuda-bindings is not installed", requirement
    detail = ", ".join(f"{n} {v}" for n, v in zip(packages, versions, strict=True))
    if install.driver_version() is None:
        return "ok", f"{detail}; no driver to try them on", None
    install.load()
    return "ok", detail, None


def gpu(_: str) -> tuple[str, str, str | None]:
    """Copy data to the GPU and back."""
    if install.driver_version() is None:
        return "absent", "no NVIDIA driver", None
    from edge.runtime.cuda.core import CoreDevice

    device = CoreDevice(limit_s=30)
    sent, back = device.host(1 << 20), device.host(1 << 20)
    sent[:] = np.arange(sent.size, dtype=np.uint32).astype(np.uint8)
    memory = device.allocate(sent.size)
    device.write(memory, 0, sent)
    device.read(back, memory, 0)
    device.wait()
    free, total = device.memory()
    where = "shared with the CPU" if device.integrated else "its own"
    detail = (
        f"{device.name}, sm_{device.sm}, {device.multiprocessors} SMs, "
        f"{megabytes(free)} free of {megabytes(total)} ({where})"
    )
    if not np.array_equal(sent, back):
        return "broken", f"{detail}: a copy came back altered", "check the GPU's memory"
    return "ok", detail, None


def kernels(bundle: str) -> tuple[str, str, str | None]:
    """Load the bundle's kernels, if there is a GPU."""
    from edge.bundle import open_bundle
    from edge.bundle.kernels import open_kernels, open_plan, sizes
    from edge.runtime.model import resolve

    with open_bundle(resolve(bundle)) as opened:
        available = ", ".join(sizes(opened.manifest)) or "none"
        if install.driver_version() is None:
            return "absent", f"no GPU to load them on; {bundle} has: {available}", None
        from edge.runtime.cuda.core import CoreDevice

        device = CoreDevice(limit_s=30)
        if f"sm_{device.sm}" not in opened.manifest.kernels:
            remedy = f"edge export {bundle} -o NEW_BUNDLE --target sm_{device.sm}"
            return "absent", f"for sm_{device.sm} in {bundle}, which has: {available}", remedy
        compiled, plan = open_kernels(opened, device.sm), open_plan(opened)
        for variant in plan.variants:
            device.load(variant, *compiled.get(variant))
        return "ok", f"{len(plan.variants)} of {bundle} load on sm_{device.sm}", None


def cuda_engine(bundle: str) -> tuple[str, str, str | None]:
    """Compare a step on the GPU with the same step on the CPU."""
    from edge.bundle import open_bundle
    from edge.runtime.model import resolve

    if install.driver_version() is None:
        return "absent", "no NVIDIA driver", None
    with open_bundle(resolve(bundle)) as opened:
        if "cuda" not in opened.manifest.graphs:
            remedy = f"edge export {bundle} -o NEW_BUNDLE --target cpu"
            return "absent", f"{bundle} has no launch plan", remedy
    return beside(bundle, "cuda")


def triton(_: str) -> tuple[str, str, str | None]:
    """Compile a small kernel."""
    if version("triton") is None and version("pytorch-triton") is None:
        return "absent", "not installed; only compiling kernels needs it", None
    from edge.launch import Variant

    aot: Any = importlib.import_module("edge.plugins.compiler.aot")
    variant = Variant(
        kernel="rows.add",
        arguments=("a", "b", "y"),
        types=("*fp32:16",) * 3,
        constants={"WIDTH": 64, "A_STRIDE": 64, "B_STRIDE": 64, "BLOCK": 64},
    )
    compiled, cubin = aot.compile_variant(variant, 87)
    return "ok", f"{aot.triton_version()}: {compiled.symbol} for sm_87, {len(cubin)} bytes", None


def exporting(_: str) -> tuple[str, str, str | None]:
    """Report the packages that `edge export` imports, without importing them."""
    versions = {name: version(name) for name in exporter.PACKAGES}
    if missing := [name for name, version in versions.items() if version is None]:
        detail = f"{', '.join(missing)} not installed; running bundles does not need them"
        return "absent", detail, 'pip install "mamba-edge[export]"'
    return "ok", ", ".join(f"{name} {version}" for name, version in versions.items()), None


# in the order that they are run and shown
CHECKS: Mapping[str, Check] = {
    "machine": about_machine,
    "memory": about_memory,
    "jetson": about_jetson,
    "onnxruntime": onnx_runtime,
    "cpu engine": cpu_engine,
    "engine auto": chosen_engine,
    "driver": driver,
    "cuda-core": cuda_core,
    "gpu": gpu,
    "kernels": kernels,
    "cuda engine": cuda_engine,
    "triton": triton,
    "tensorrt": tensorrt,
    "plugins": plugins,
    "tensorrt engine": tensorrt_engine,
    "ort cuda": on_cuda,
    "ort tensorrt": on_tensorrt,
    "export": exporting,
}
# checks that load no third-party libraries; the others run in processes of their own
HERE = {"machine", "memory", "jetson", "driver", "export"}
# engine → the check that says whether it runs here, and the checks it depends on, in fixing order
ENGINES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "auto": ("engine auto", ()),
    "ort": ("onnxruntime", ()),
    "cpu": ("cpu engine", ()),
    "cuda": ("cuda engine", ("driver", "cuda-core", "gpu", "kernels")),
    "tensorrt": ("tensorrt engine", ("driver", "cuda-core", "gpu", "tensorrt")),
}


def _run_process(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; kill its process group on failure. Raises TimeoutExpired after LIMIT_S."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def examine(name: str, bundle: str) -> Finding:
    """Run a check; whatever goes wrong in it becomes its finding."""
    if name in HERE:
        return judged(name, CHECKS[name], bundle)
    command = child.command("edge.apps.doctor.checks", name, bundle)
    try:
        completed = _run_process(command)
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", f"did not finish within {LIMIT_S:g} s")
    lines = completed.stdout.splitlines()
    if completed.returncode == 0 and lines:
        return Finding(**json.loads(lines[-1]))
    last = (completed.stderr.strip().splitlines() or [""])[-1]
    reason = f": {last[:200]}" if last else ""
    return Finding(
        name, "broken", f"its process ended with {_exit_reason(completed.returncode)}{reason}"
    )


def judged(name: str, check: Check, bundle: str) -> Finding:
    """Run a check in this process and return its finding."""
    try:
        status, detail, remedy = check(bundle)
    except EdgeError as problem:
        where = ": ".join(part for part in (problem.file, problem.field) if part)
        detail = f"{where}: {problem.message}" if where else problem.message
        return Finding(name, "broken", detail, problem.remedy)
    except Exception as problem:
        return Finding(name, "broken", f"{type(problem).__name__}: {problem}")
    return Finding(name, status, detail, remedy)  # type: ignore[arg-type]


def _exit_reason(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"signal {-code}"


if __name__ == "__main__":
    _, _name, _bundle = sys.argv
    say(json.dumps(asdict(judged(_name, CHECKS[_name], _bundle))))
