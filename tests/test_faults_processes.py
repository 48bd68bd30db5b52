"""Forks, signals, limits and several processes (rows 34, 35, 46 and 60 of the fault table)."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import edge
from edge.bundle import open_bundle
from edge.errors import EdgeError, EngineError
from edge.runtime.model import resolve
from tests.faulty_calls import in_child
from tests.session_models import bundle, model
from tests.test_faults_disk import names


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share no engine: these tests check how each is opened."""
    monkeypatch.setattr("edge.runtime.model.ENGINES_IN_USE", MagicMock(get=lambda key: None))


ROOT = Path(__file__).parent.parent
PATIENCE = 120  # seconds, on a busy machine

# -- fork (row 34) ---------------------------------------------------------------------------------


def fork_in_the_middle(folder: str) -> None:
    loaded_model = edge.load(folder, engine="ort", threads=2)
    session = loaded_model.session()
    answer = session.generate("the state", max_tokens=9, temperature=0)
    next(answer)
    child = os.fork()
    if not child:
        uses: list[Callable[[], object]] = [
            lambda: next(answer), lambda: loaded_model.session(),
            lambda: session.generate("x").finish(), lambda: session.generate("y").finish(),
        ]  # fmt: skip
        for use in uses:
            try:
                use()
            except EngineError as problem:
                assert "forked" in str(problem), problem
            else:
                raise AssertionError("a child used the engine of its parent")
        sys.exit(7)  # a normal exit, with all that Python does then
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    print(*answer.finish().tokens)


def test_row_34_a_forked_child_is_told_and_ends_and_the_parent_goes_on() -> None:
    tokens = model("bytes").session().generate("the state", max_tokens=9, temperature=0).finish()
    said = in_child(fork_in_the_middle, bundle("bytes"), timeout=PATIENCE)
    assert said.split() == [str(token) for token in tokens.tokens]


# -- signals (row 35) ------------------------------------------------------------------------------

CHAT = [sys.executable, "-m", "edge.apps.chat"]
EXPORT = [sys.executable, "-m", "edge.apps.cli", "export"]


def started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip


def ended(process: subprocess.Popen[bytes], number: int) -> tuple[str, str]:
    """Check that the process ends soon, with the exit code of its signal; return its output."""
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, err.decode()
    assert b"Traceback" not in err, err.decode()
    return out.decode(), err.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_row_35_a_signal_while_answering(number: int) -> None:
    command = [*CHAT, str(bundle("bytes")), "-p", "hello", "--max-tokens", "100000000"]
    process = started(command)
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(number)
    ended(process, number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_row_35_a_signal_while_reading_a_prompt(number: int, tmp_path: Path) -> None:
    """A prompt of a minute: after the model is loaded, before the first token."""
    (tmp_path / "prompt").write_text("word " * 25_000)
    command = f"exec {sys.executable} -m edge.apps.chat demo-bytes < {tmp_path}/prompt"
    process = started(["sh", "-c", command])
    loading = re.compile("/weights.bin|/_native")  # ort's, or what cpu runs
    wait_for(lambda: bool(loading.search(Path(f"/proc/{process.pid}/maps").read_text())))
    time.sleep(0.3)
    process.send_signal(number)
    out, _ = ended(process, number)
    assert not out.strip()


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.transformers_checkpoints import save_mamba2

    return Path(save_mamba2(tmp_path_factory.mktemp("checkpoint") / "tiny"))


STAGES = {"reading": signal.SIGINT, "weights": signal.SIGTERM, "checking": signal.SIGTERM,
          "hashing": signal.SIGINT}  # fmt: skip


def export_and_stop(source: str, out: str) -> None:
    """Start `edge export` for each stage of its work, and signal it there."""
    from edge.apps import cli, interrupts
    from edge.export import exporter

    interrupts.end = sys.exit  # type: ignore[assignment]  # this process goes on to the next
    real, stages = exporter.export_checkpoint, iter(STAGES.items())

    def export(*arguments: Any, progress: Any, **options: Any) -> Any:
        stage, number = next(stages)

        def report(at: str, done: float) -> None:
            progress(at, done)
            if at.startswith(stage):
                os.kill(os.getpid(), number)
                time.sleep(PATIENCE)  # an ignored signal would show

        return real(*arguments, progress=report, **options)

    exporter.export_checkpoint = export  # type: ignore[assignment]
    sys.argv = ["edge", "export", source, "-o", out, "--quant", "w8"]
    for _ in STAGES:
        try:
            cli.main()
        except SystemExit as leaving:
            print(leaving.code, *names(Path(out).parent))
    assert "torch._dynamo" not in sys.modules, "a check against the network loads a compiler"


def test_row_35_a_signal_while_exporting(checkpoint: Path, tmp_path: Path) -> None:
    """It exits as the signal demands, and leaves nothing behind."""
    said = in_child(export_and_stop, checkpoint, tmp_path / "b")
    assert said.split() == [str(128 + number) for number in STAGES.values()]


# -- no memory (row 46) ----------------------------------------------------------------------------


def load_within(folder: str, *shares: str) -> None:
    """Load in a fork for each amount of address space, so much more than now; print "loaded", or
    the refusal.
    """
    import edge.runtime.cpu.engine
    import edge.runtime.ort
    import edge.text  # programs do not count
    from edge.plugins.cpu import library

    if library.path():
        library.library()

    load = edge.load
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for share in map(int, shares):
        if os.fork():
            assert os.wait()[1] == 0
            continue
        resource.setrlimit(resource.RLIMIT_AS, (space + share, resource.RLIM_INFINITY))
        try:
            session = load(folder, threads=1).session()
            session.generate("one", max_tokens=2).finish()
            print("loaded")
        except EdgeError as problem:
            print(f"refused: {problem}")
        return


def test_row_46_no_memory_at_load() -> None:
    """With any amount: a typed error, or a model that runs."""
    amounts = [mib << 20 for mib in (0, 8, 24, 40, 1024)]
    environment = {"OMP_NUM_THREADS": "1"}
    said = in_child(load_within, resolve("demo-draft"), *amounts, environment=environment)
    said = said.splitlines()
    assert len(said) == len(amounts)
    assert all(text == "loaded" or text.startswith("refused: ") for text in said), said
    assert said[0].startswith("refused: ") and said[-1] == "loaded"


@pytest.mark.parametrize("mib", [100, 174, 184, 204, 240, 400])
def test_row_46_a_limit_of_address_space(mib: int) -> None:
    """Too little for libraries, for ONNX Runtime, for a model; and enough."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({mib << 20},) * 2); "
    program = "import sys; from edge.apps.chat import main; sys.argv[0] = 'edge-chat'; main()"
    ended = subprocess.run(
        [sys.executable, "-c", limit + program, "demo-draft", "-p", "Hello", "--max-tokens", "2"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    said = ended.stderr.splitlines()
    if mib < 400:
        assert ended.returncode in (0, 1) and "Traceback" not in ended.stderr, ended.stderr
        assert ended.returncode == 0 or said[-1].startswith("error: "), said
    assert ended.returncode == (1 if mib == 100 else 0 if mib == 400 else ended.returncode)


def test_row_46_a_memory_error_at_load_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    from edge.runtime import model as loading

    def full(*arguments: object, **options: object) -> None:
        raise MemoryError

    for step in ("open_bundle", "load_tokenizer", "load_template", "open_engine"):
        with monkeypatch.context() as patch:
            patch.setattr(loading, step, full)
            with pytest.raises(EngineError, match="not enough memory"):
                edge.load(bundle("bytes"), threads=1)
    edge.load(bundle("bytes"), threads=1)


# -- two at once (row 60) --------------------------------------------------------------------------


def export_often(source: str, out: str) -> None:
    """Export three times, and until stdin ends."""
    from edge.export.exporter import export_checkpoint

    print("ready", flush=True)
    sys.stdin.readline()
    done = 0
    while done < 3 or not select.select([sys.stdin], [], [], 0)[0]:
        export_checkpoint(source, out, quant="fp32", verify=False)
        done += 1


def test_row_60_two_processes_export_to_one_path(checkpoint: Path, tmp_path: Path) -> None:
    """The other one is this process, which has loaded torch; it also reads."""
    from edge.export.exporter import export_checkpoint

    command = (
        "import sys; from tests.test_faults_processes import export_often as f; f(*sys.argv[1:])"
    )
    out, enough = tmp_path / "b", threading.Event()

    def export() -> None:
        done = 0
        while done < 3 or not enough.is_set():
            export_checkpoint(checkpoint, out, quant="w8", verify=False)
            done += 1

    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(
            [sys.executable, "-c", command, str(checkpoint), str(out)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ))  # fmt: skip
        stack.callback(process.kill)
        exporter = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(enough.set)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        exporting = exporter.submit(export)
        whole = 0
        while whole <= 5:  # however rarely this thread gets its turn
            assert process.poll() is None, "it waits for stdin's end"
            assert not exporting.done(), exporting.exception()
            whole += out.exists() and sound(out)
        enough.set()
        _, problems = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, problems.decode()
        exporting.result(PATIENCE)
    assert sound(out) and names(tmp_path) == {"b"}


def sound(folder: Path) -> bool:
    """Return whether the bundle is whole. During an exchange a reader may see files vanish, not
    change.
    """
    try:
        with open_bundle(folder) as opened:
            opened.verify()
    except EdgeError as problem:
        # the folder itself is gone where it was opened just before
        assert "missing" in str(problem) or "No such file" in str(problem), problem
        return False
    return True
