"""The process that `fake_driver` starts: it runs each case of a scenario in a fork of its own.

Nothing touches CUDA before the forks, so every case finds an unused driver, and imports happen only
once.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def main(path: str, folder: str) -> None:
    """Write `.result` and `.stderr` beside each `folder/N.case`."""
    faulthandler.enable()
    spec = importlib.util.spec_from_file_location("scenario", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenario"] = module
    spec.loader.exec_module(module)
    for heavy in ("cuda.core", "edge.runtime.cuda.core"):
        importlib.import_module(heavy)
    gc.freeze()  # else each fork's collector scans all imported objects and copies their pages
    for case in sorted(Path(folder).glob("*.case")):
        if os.fork() == 0:
            _child(module, case)
        os.wait()


def _child(module: Any, case: Path) -> None:
    """Exit as a Python process does, to test its shutdown."""
    os.dup2(os.open(case.with_suffix(".stderr"), os.O_WRONLY | os.O_CREAT), 2)
    name, settings = json.loads(case.read_text())
    os.environ.update(settings)
    try:
        result = getattr(module, name)()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    # objects held only by a reference cycle (an exception and its frames) are not a leak
    gc.collect()
    case.with_suffix(".result").write_text(json.dumps(result))
    sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
