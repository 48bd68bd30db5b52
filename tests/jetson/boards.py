"""Made-up file systems of boards, with the few programs that a script calls."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

JETSON = Path(__file__).resolve().parents[2] / "jetson"

# in the boards' format; the second number of JetPack's release is that of L4T
RELEASE = "# R{major} (release), REVISION: {minor}, GCID: 38968081, BOARD: generic, EABI: aarch64\n"
ORIN_NANO = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
TOOLS = ("bash", "cat", "dirname", "env", "grep", "head", "realpath", "sed", "tr")
# only looked up, never run: the tests make dry runs
BUILDING = ("cmake", "g++", "make")
INCLUDES = ("usr/include/aarch64-linux-gnu/NvInfer.h", "usr/local/cuda/include/cuda_runtime_api.h")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def root(folder: Path, l4t: str | None = "36.4.3", model: str | None = ORIN_NANO) -> Path:
    """Make a board's root with TensorRT and CUDA headers; `l4t` as in 36.4.3."""
    made = folder / "root"
    made.mkdir()
    if l4t is not None:
        major, _, minor = l4t.partition(".")
        write(made / "etc/nv_tegra_release", RELEASE.format(major=major, minor=minor))
    if model is not None:
        write(made / "proc/device-tree/model", model + "\0")
    for name in INCLUDES:
        write(made / name, "")
    return made


def programs(
    folder: Path, machine: str = "aarch64", python: str = "3.10", others: str = ""
) -> Path:
    """Make a PATH folder with the machine's usual tools, its `uname`, and its Python; `others`:
    builds of ONNX Runtime that this Python sees besides PyPI's CPU build.
    """
    made = folder / "bin"
    made.mkdir()
    for name in BUILDING:
        _script(made / name, "exit 1")
    for name in TOOLS:
        where = shutil.which(name)
        assert where is not None, name
        (made / name).symlink_to(where)
    _script(made / "uname", f"echo {machine}")
    answer_python(made / f"python{python}", python, others)
    return made


def answer_python(path: Path, version: str, others: str = "") -> None:
    """Write a Python that answers the installer's questions, and does nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _script(
        path,
        f"""case "$*" in
  *version_info*) echo {version} ;;
  *packages_distributions*) echo {others} ;;
esac""",
    )


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
