"""Commands that run one of edge's modules in a separate Python process.

`python -m` and `python -c` search the working folder for modules first, and that folder may be a
bundle: a `numpy.py` in it would run. The option against that, `-P`, is missing in Python 3.10.
"""

from __future__ import annotations

import sys
from pathlib import Path

import edge

# Runs before anything is imported by name; Python has already loaded `os` itself. An empty entry of
# `PYTHONPATH`, as in `PYTHONPATH=$PYTHONPATH:/more`, stands for the working folder.
_START = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; "
    "import os; root, module = sys.argv[1:3]; here = os.path.realpath(os.curdir); "
    "sys.path[:] = [p for p in sys.path if p == root or os.path.realpath(p) != here]; "
    "sys.path += [root] * (root not in sys.path); sys.argv[:3] = [module]; "
    "import runpy; runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` and imports nothing from the working folder."""
    root = str(Path(edge.__file__).absolute().parent.parent)
    return [sys.executable, "-c", _START, root, module, *arguments]
