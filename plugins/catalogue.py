"""Discover the ops: every folder beside this file that has a `statement.py` defines some.

A folder holds an op, closely related ops, and everything that runs them. Names of files, and of
functions in them, follow from the op's name (`GeluTanh` is `gelu_tanh` in snake case):

    statement.py        every `Op` assigned in the module is an op of the domain `edge`
    reference.py        `gelu_tanh_node`, else `gelu_tanh`: called with the inputs and attributes
                        that its parameters name, named as in the statement
    body.py             `GELU_TANH`, the text of its ONNX function, or `gelu_tanh`, which returns
                        the text, else `body`, which returns the text of any op in the folder;
                        the prefix `ORT_` or `ort_` marks bodies written for ONNX Runtime's speed
    device.py           the folder's TensorRT ops, where these are more than the same op on columns
                        of its inputs: `statements` yields them, bodies are named as in body.py
    lowering.py         how kernels are launched: `lower_gelu_tanh`, or `lower` for every op
                        without a function of its own; `PAIRS` lists nodes that one kernel runs
    triton_{file}.py    Triton kernels, called `{file}.{function}` in launch plans
    cpu*.h              the same kernels in C++ for CPUs, under the same names

Statements need only the standard library.
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
    """Import the module `name` of every folder that has one; folder → module."""
    folders = sorted(file.parent.name for file in FOLDER.glob(f"*/{name}.py"))
    return {folder: importlib.import_module(f"{PACKAGE}.{folder}.{name}") for folder in folders}


@cache
def _homes() -> dict[str, tuple[str, Op]]:
    homes: dict[str, tuple[str, Op]] = {}
    for folder, module in parts("statement").items():
        for op in (value for value in vars(module).values() if isinstance(value, Op)):
            if op.name in homes:
                raise ValueError(f"{op.name} is stated in both {homes[op.name][0]} and {folder}")
            homes[op.name] = folder, op
    return homes


def home(op: str) -> str:
    """Return the folder of an op. Raises KeyError when no folder states it."""
    return _homes()[op][0]


def ops_in(folder: str) -> tuple[Op, ...]:
    """Return the ops that a folder states."""
    return tuple(op for where, op in _homes().values() if where == folder)


OPS: dict[str, Op] = {name: op for name, (_, op) in _homes().items()}


def kernel_file(name: str) -> Path | None:
    """Return the Triton file that launch plans call `name`: the first `scan` in `scan.scan`."""
    return next(iter(FOLDER.glob(f"*/triton_{name}.py")), None)


def kernel_module(name: str) -> str | None:
    """Return the name of the module in `kernel_file`."""
    file = kernel_file(name)
    return None if file is None else f"{PACKAGE}.{file.parent.name}.{file.stem}"
