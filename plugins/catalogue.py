"""Find ops by looking at the folders beside this file: an op is there when its folder is.

A folder holds one idea: an op, its relatives and all that runs them. What a file has to be called,
and a name in it, follows from the op's name (`GeluTanh` in snake case is `gelu_tanh`):

    statement.py        every `Op` that the module assigns is an op of the domain `edge`
    reference.py        `gelu_tanh_node`, or else `gelu_tanh`, is called with those inputs and
                        attributes, by the statement's names, that its parameters ask for
    body.py             `GELU_TANH`, the text of its ONNX function, or `gelu_tanh`, which makes it,
                        or else `body`, which makes every op's; what ONNX Runtime runs faster
                        begins with `ORT_` or `ort_`
    device.py           the ops of the folder as TensorRT has them, where it is more than the same
                        op on columns of values: `statements` yields them, bodies are as in body.py
    lowering.py         how kernels are called: `lower_gelu_tanh`, or `lower` for every op of the
                        folder without a function of its own; `PAIRS` that kernels run at once
    triton_{file}.py    Triton kernels, which launch plans call `{file}.{function}`
    cpu*.h              the same kernels in C++ for CPUs, each under that name

Statements need nothing but the standard library.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from types import ModuleType

from edge.ops import Op

PACKAGE = "edge.plugins"
FOLDER = Path(__file__).parent
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def snake(op: str) -> str:
    """`AddRMSNormQuantize` → `add_rms_norm_quantize`."""
    return _WORDS.sub("_", op).lower()


@cache
def parts(name: str) -> dict[str, ModuleType]:
    """The module called `name` of every folder that has one, by folder."""
    folders = sorted(file.parent.name for file in FOLDER.glob(f"*/{name}.py"))
    return {folder: importlib.import_module(f"{PACKAGE}.{folder}.{name}") for folder in folders}


@cache
def _homes() -> dict[str, tuple[str, Op]]:
    found: dict[str, tuple[str, Op]] = {}
    for folder, module in parts("statement").items():
        for op in (each for each in vars(module).values() if isinstance(each, Op)):
            if op.name in found:
                raise ValueError(f"{op.name} is stated in {found[op.name][0]} and in {folder}")
            found[op.name] = folder, op
    return found


def home(op: str) -> str:
    """The folder of an op. Raises KeyError when none states it."""
    return _homes()[op][0]


def ops_in(folder: str) -> tuple[Op, ...]:
    """The ops that a folder states."""
    return tuple(op for where, op in _homes().values() if where == folder)


OPS: dict[str, Op] = {name: op for name, (_, op) in _homes().items()}


def kernel_file(name: str) -> Path | None:
    """The Triton file that launch plans call `name`: `scan` of `scan.scan`."""
    return next(iter(FOLDER.glob(f"*/triton_{name}.py")), None)


def kernel_module(name: str) -> str | None:
    """The module of `kernel_file`."""
    file = kernel_file(name)
    return None if file is None else f"{PACKAGE}.{file.parent.name}.{file.stem}"
