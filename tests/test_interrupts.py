"""Ctrl-C and SIGTERM while native code keeps the interpreter's main thread."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 60  # seconds, on a busy machine; nothing takes that long

# holds half-written files, then stays in a call that no signal ends
STUCK = """
import ctypes, os, sys, tempfile
from pathlib import Path
from edge.apps.exits import exit_code_of
from edge.bundle.writer import BundleWriter
from edge.export.distill.interrupted import stop_requests

def stuck():
    print("stuck", flush=True)
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    while True:
        libc.pthread_mutex_lock(mutex)  # the second time it waits for itself

def writing():
    with BundleWriter("bundle") as writer, tempfile.TemporaryDirectory(dir=".") as folder:
        writer.path("graphs/x").write_text("half")
        Path(folder, "x").write_text("half")
        stuck()

def learning():
    with stop_requests():
        stuck()

sys.exit(exit_code_of({"writing": writing, "learning": learning}[sys.argv[1]]))
"""


def started(what: str, folder: Path) -> subprocess.Popen[str]:
    """Return a process that is stuck by now."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, what], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "stuck\n"
    return process


@pytest.mark.parametrize("number, said", [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "")])
def test_what_cannot_be_interrupted_ends_and_leaves_nothing(
    number: int, said: str, tmp_path: Path
) -> None:
    process = started("writing", tmp_path)
    assert any(tmp_path.iterdir())
    process.send_signal(number)
    assert process.communicate(timeout=PATIENCE) == ("", said)
    assert process.returncode == 128 + number and not any(tmp_path.iterdir())


def test_an_interrupted_program_does_not_take_its_interpreter_down() -> None:
    """Which took 4 s if torch was loaded; exit handlers still run."""
    code = (
        "import atexit\nfrom edge.apps.exits import leave\n"
        "class Loaded:\n    def __del__(self): print('taken down', flush=True)\n"
        "atexit.register(print, 'left', flush=True)\nheld = Loaded()\n"
        "def program():\n    print('begun')\n    raise KeyboardInterrupt\nleave(program)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "begun\nleft\n", "")


def test_a_long_run_says_that_it_stops_and_a_second_signal_ends_it(tmp_path: Path) -> None:
    process = started("learning", tmp_path)
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("stopping after this step")  # while it is stuck
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE) == ("", "interrupted\n")
    assert process.returncode == 130


FORKED = """
import os, signal, sys, time
from edge.apps.exits import exit_code_of
from edge.apps.interrupts import raising_nothing

def forks():
    read, write = os.pipe()
    if not (child := os.fork()):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with raising_nothing():
            still = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            os.write(write, b"x" if still else b"-")
            signal.pause()
    assert os.read(read, 1) == b"x"  # no thread would obey for the child
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    time.sleep(1)  # twice the patience of who watches, should it have heard of it
    print("done")

sys.exit(exit_code_of(forks))
"""


def test_signals_to_a_forked_child_are_its_own() -> None:
    """As when a library's process pool ends its workers."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=PATIENCE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_programs_import_nothing_before_an_interrupt_is_quiet() -> None:
    names = re.findall(r'= "edge\.apps\.start:(\w+)"', (ROOT / "pyproject.toml").read_text())
    code = (
        "import signal, sys; from edge.apps import start; "
        "assert 'typer' not in sys.modules and 'edge.apps.exits' not in sys.modules; "
        f"assert all(callable(getattr(start, n)) for n in {names}); start.quiet_interrupts(); "
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL"
    )
    assert len(names) == 2
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE)


def ended(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that imports from `folder` first."""
    return subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, timeout=PATIENCE,
        cwd=folder, env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
    )  # fmt: skip


# C++ that loads torch calls Python like this, and aborts on an exception
LOADED = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.{signal})
    time.sleep(30)
except BaseException:
    os.abort()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_torch_is_loaded_ends_the_program_in_order(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(LOADED.format(signal=name))
    code = (
        "import sys\nfrom edge.apps import exporter\nfrom edge.apps.exits import exit_code_of\n"
        "sys.exit(exit_code_of(lambda: exporter.needs('this')))\n"
    )
    done = ended(code, tmp_path)
    said = "interrupted\n" if name == "SIGINT" else ""
    assert (done.returncode, done.stderr) == (128 + signal.Signals[name], said)


def test_pip_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)\n"
    )
    code = (
        "from pathlib import Path\nfrom edge.apps.models.index import _pip\n"
        "print(_pip(['download'], 'nothing', Path('.')).returncode)\n"
    )
    done = ended(code, tmp_path)
    assert (done.stdout, done.stderr) == (f"{-signal.SIGINT}\n", "")
