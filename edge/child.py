"""Commands that start a module of ours in a Python of its own.

`python -m` and `python -c` look for modules in the working folder first, and the working folder
may be a bundle: a `numpy.py` in it would run. `-P`, which prevents that, is unknown to Python 3.10.
"""

from __future__ import annotations

import sys
from pathlib import Path

import edge

# Run before anything is imported by name. Python has loaded `os` by itself by then. `PYTHONPATH`
# names the working folder where it has an empty entry, as `PYTHONPATH=$PYTHONPATH:/more` has.
_START = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; "
    "import os; root, module = sys.argv[1:3]; here = os.path.realpath(os.curdir); "
    "sys.path[:] = [p for p in sys.path if p == root or os.path.realpath(p) != here]; "
    "sys.path += [root] * (root not in sys.path); sys.argv[:3] = [module]; "
    "import runpy; runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` as a program, with nothing from the working folder."""
    root = str(Path(edge.__file__).absolute().parent.parent)
    return [sys.executable, "-c", _START, root, module, *arguments]
