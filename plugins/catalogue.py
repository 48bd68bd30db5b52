"""Find ops by looking at the folders beside this file: an op is there when its folder is.

A folder holds one idea: an op, its relatives and everything that runs them. What a file has to be
called, and a name in it, follows from the op's name (`Gelu` in snake case is `gelu`):

    lowering.py         how kernels are called: `lower_gelu`, or `lower` for every op of the folder
                        that has no function of its own
    triton_{file}.py    Triton kernels, which launch plans call `{file}.{function}`
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from types import ModuleType

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


def kernel_file(name: str) -> Path | None:
    """The Triton file that launch plans call `name`: `scan` of `scan.scan`."""
    return next(iter(FOLDER.glob(f"*/triton_{name}.py")), None)


def kernel_module(name: str) -> str | None:
    """The module of `kernel_file`."""
    file = kernel_file(name)
    return None if file is None else f"{PACKAGE}.{file.parent.name}.{file.stem}"
