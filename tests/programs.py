"""Programs called in the tests' own process, since another Python takes long to start."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from edge.apps.measure import roofline

# bytes of the buffer whose copy measures the memory: the one for this machine may take gigabytes,
# which a virtual machine may first have to fetch
ROOF_BUFFER = 1 << 20
_SMALL_ROOF = f"""
from edge.apps.measure import roofline
roofline.buffer_size = lambda: {ROOF_BUFFER}
"""


def called(
    main: Callable[[], object], *arguments: object, text: bytes = b""
) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a program with `text` on its standard input."""
    streams = {
        name: io.TextIOWrapper(io.BytesIO(given), "utf-8", write_through=True)
        for name, given in (("stdin", text), ("stdout", b""), ("stderr", b""))
    }
    terminated, code = signal.getsignal(signal.SIGTERM), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *map(str, arguments)])
        patch.setenv("NO_COLOR", "1")
        patch.setattr(roofline, "buffer_size", lambda: ROOF_BUFFER)
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        finally:
            signal.signal(signal.SIGTERM, terminated)
    out, err = (streams[name].buffer.getvalue().decode() for name in ("stdout", "stderr"))  # type: ignore[attr-defined]
    assert "Traceback" not in err
    return code, out, err


def without_torch(
    command: str, *arguments: object, hidden: Sequence[str] = ()
) -> tuple[int, str, str]:
    """Run `edge COMMAND` as where only the runtime is installed and `hidden` is missing; return
    code, standard output and standard error.
    """
    missing = ("torch", "onnx", "transformers", *hidden)
    program = (
        f"import sys; sys.modules |= dict.fromkeys({missing!r})\n"
        f"{_SMALL_ROOF if command == 'profile' else ''}"
        "from edge.apps.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr
