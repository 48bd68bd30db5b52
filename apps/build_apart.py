"""A build in a process of its own.

TensorRT's parser and builder fall over some graphs that are none of ours: that is to end as an
error. The child writes to the same terminal; this process waits, and passes on what stops it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from edge.errors import EngineError

# set for the child, which then builds
VARIABLE = "EDGE_BUILD_APART"
# a build ends at its next step, of which the longest tries out one kernel after another
_PATIENCE_S = 60.0


def is_child() -> bool:
    return VARIABLE in os.environ


def run(arguments: Sequence[str], bundle: str) -> int:
    """`edge build` with these arguments; its exit code.

    Raises EngineError: its process was ended, by a crash or for memory; whatever interrupts this
    one, after the child has ended.
    """
    command = [sys.executable, "-m", "edge.apps.cli", "build", *arguments]
    with tempfile.TemporaryDirectory(prefix="mamba-edge-build-") as scratch:
        # a session of its own: Ctrl-C comes to this process, and once
        child = subprocess.Popen(
            command,
            env=os.environ | {VARIABLE: "1", "TMPDIR": scratch},
            start_new_session=True,
        )
        try:
            code = child.wait()
        except BaseException:
            _end(child)
            raise
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    why = "memory ran out" if code == -signal.SIGKILL else "the graph, or TensorRT, is at fault"
    raise EngineError(
        f"TensorRT's process was ended by {name} while it built: {why}",
        file=bundle,
        remedy="edge info BUNDLE checks the bundle; for memory lower --workspace, --chunk or "
        "--batch, or stop other programs",
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """In order, so that nothing half-made is left; at once when interrupted again."""
    child.terminate()
    try:
        child.wait(_PATIENCE_S)
    except BaseException:
        child.kill()
        child.wait()
