"""Threads, forks, signals, limits and several processes (rows 27, 30 to 35, 46 and 60 of the fault
table).
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge
from edge.bundle import open_bundle
from edge.errors import EdgeError, EngineError, InputError
from edge.runtime.session import Session
from tests.checkpoints import save_mamba2
from tests.faulty_calls import in_child
from tests.session_models import bundle, model
from tests.test_faults_disk import names

ROOT = Path(__file__).parent.parent
HOT: dict[str, Any] = {"temperature": 5.0, "seed": 3}
PATIENCE = 120  # seconds, on a busy machine


def states(session: Session) -> dict[str, np.ndarray]:
    return session._context.state.arrays()


def same(one: Session, other: Session) -> None:
    """Two sessions hold the same, to the last bit."""
    assert (one.tokens, one.pending, one.messages) == (other.tokens, other.pending, other.messages)
    theirs = states(other)
    for name, array in states(one).items():
        assert array.tobytes() == theirs[name].tobytes(), name


# -- cancelling (row 27) ---------------------------------------------------------------------------


def cancelled(kind: str, prompt: list[int], at: int, draft: Any) -> tuple[Session, Any, int]:
    """A session whose answer is cancelled during the engine's run number `at`; runs there were."""
    session = model(kind).session(draft=draft)
    session.generate([5, 6, 7], max_tokens=2, **HOT).finish()
    engine, runs = session.model.engine, []
    real = engine.run

    def run(*arguments: Any, **options: Any) -> Any:
        runs.append(0)
        if len(runs) == at:
            session.cancel()
        return real(*arguments, **options)

    engine.run = run  # type: ignore[method-assign]
    try:
        result = session.generate(prompt, max_tokens=6, **HOT).finish()
    finally:
        del engine.run
    return session, result, len(runs)


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("kind", ["bytes", "hybrid"])
def test_row_27_cancelled_at_every_chunk_and_step(kind: str, draft: Any) -> None:
    """Within one run. Before the first token: no trace. After it: the tokens there are stay."""
    prompt = [9, 8, 7] * 11  # three chunks of at most 16
    before = model(kind).session(draft=draft)
    before.generate([5, 6, 7], max_tokens=2, **HOT).finish()
    _, whole, every = cancelled(kind, prompt, 0, draft)
    chunks = -(-(len(prompt) + 1) // model(kind).engine.chunk)
    assert chunks == 3 and every > chunks
    for at in range(1, every + 1):
        session, result, runs = cancelled(kind, prompt, at, draft)
        assert runs == at or (at == every and result.finish_reason != "cancelled")
        # nothing but the engine's own work comes after a cancel: at most what one run brings
        assert result.tokens == whole.tokens[: len(result.tokens)]
        if at < chunks:
            assert result.finish_reason == "cancelled" and not result.tokens
            same(session, before)
            assert session.undo_levels == 1
            continue
        assert result.tokens
        held = (*session.tokens, *(() if session.pending is None else (session.pending,)))
        assert held[-len(result.tokens) :] == result.tokens
        if draft is None:  # drafting runs several tokens at a time, which rounds otherwise
            twin = model(kind).session()
            twin.generate([5, 6, 7], max_tokens=2, **HOT).finish()
            twin.generate(prompt, max_tokens=len(result.tokens), **HOT).finish()
            same(session, twin)


# -- sessions beside each other (row 30) -----------------------------------------------------------


def talks(kind: str, seed: int, pause: Callable[[], None]) -> list[Any]:
    """What a session does, all of it drawn from `seed`; `pause` is called between runs."""
    rng = random.Random(seed)
    out: list[Any] = []
    session = model(kind).session(seed=seed)
    for _ in range(rng.randint(4, 7)):
        verb = rng.choice(["say", "say", "say", "undo", "cancel", "reset", "again"])
        try:
            if verb in ("say", "cancel"):
                text = " ".join(
                    rng.choices(["the", "state", "of", "a", "robot"], k=rng.randint(1, 9))
                )
                answer = session.generate(text, temperature=3.0, max_tokens=rng.randint(1, 9))
                for number, _ in enumerate(answer):
                    pause()
                    if verb == "cancel" and number == 2:
                        answer.cancel()
                out.append(answer.result.tokens)
            elif verb == "again":
                out.append(session.regenerate(temperature=3.0, max_tokens=3).finish().tokens)
            else:
                session.undo() if verb == "undo" else session.reset()
        except EdgeError as problem:
            out.append(str(problem))
        pause()
    out.append((session.tokens, {name: a.tobytes() for name, a in states(session).items()}))
    return out


@pytest.mark.parametrize("kind", ["base", "hybrid"])
def test_row_30_sessions_interleaved_at_random_equal_serial_ones(kind: str) -> None:
    """One step at a time, in an order drawn at random, so that it can be repeated; and freely."""
    serial = [talks(kind, seed, lambda: None) for seed in range(8)]
    assert len({str(out) for out in serial}) == 8
    for order in (None, 1, 2, 3):
        baton = None if order is None else Baton(random.Random(order), range(8))
        together: dict[int, list[Any]] = {}

        def work(seed: int, baton: Baton | None = baton, out: dict[int, Any] = together) -> None:
            if baton is None:
                out[seed] = talks(kind, seed, lambda: None)
                return
            baton.wait(seed)
            out[seed] = talks(kind, seed, lambda: baton.pass_on(seed))
            baton.leave(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert [together[seed] for seed in range(8)] == serial, f"order {order}"


class Baton:
    """Of several threads one runs, until it passes on to one drawn at random."""

    def __init__(self, rng: random.Random, runners: range) -> None:
        self._rng, self._left, self._turn = rng, list(runners), runners[0]
        self._changed = threading.Condition()

    def wait(self, me: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == me, PATIENCE)

    def pass_on(self, me: int) -> None:
        with self._changed:
            self._turn = self._rng.choice(self._left)
            self._changed.notify_all()
        self.wait(me)

    def leave(self, me: int) -> None:
        with self._changed:
            self._left.remove(me)
            self._turn = self._rng.choice(self._left or [me])
            self._changed.notify_all()


# -- a state used again (row 31) -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["base", "chat", "hybrid"])
def test_row_31_a_cleared_state_holds_nothing_of_before(kind: str) -> None:
    """Whatever lies in the slots and rows that are not in use, nobody sees it."""
    used, fresh = (model(kind).engine.new_state(capacity=40) for _ in range(2))
    rng, clean = np.random.default_rng(1), np.random.default_rng(2)
    model(kind).engine.run(rng.integers(0, 40, (1, 16)), used, commit=True)
    model(kind).engine.run(rng.integers(0, 40, (1, 3)), used)
    # canaries: worse than anything a run could have left
    for array in (*used.rings.values(), *used.caches.values()):  # type: ignore[attr-defined]
        array.fill(np.float32(1e30).astype(array.dtype))
    used.clear()
    assert used.position == used.reach == 0
    assert not any(array.any() for array in used.arrays().values())
    for step in range(6):
        ids = clean.integers(0, 40, (1, 1 + step % 3))
        runs = [model(kind).engine.run(ids, s, commit=step == 0).copy() for s in (used, fresh)]
        assert runs[0].tobytes() == runs[1].tobytes()
    ours = fresh.arrays()
    for name, array in used.arrays().items():
        assert array.tobytes() == ours[name].tobytes()


def test_row_31_a_reset_session_answers_as_a_new_one(tmp_path: Path) -> None:
    secret = "the secret is 4711 "
    session = model("chat").session(system="be brief", undo_levels=1)
    session.chat(secret * 5, max_tokens=5, **HOT).finish()
    session.reset()
    new = model("chat").session(system="be brief")
    same(session, new)
    answers = [s.chat("what?", max_tokens=8, **HOT).finish().tokens for s in (session, new)]
    assert answers[0] == answers[1]
    session.save(tmp_path / "state")
    assert secret.strip().encode() not in (tmp_path / "state").read_bytes()


# -- one session, two users (rows 32 and 33) -------------------------------------------------------


def test_row_32_two_threads_race_for_one_session() -> None:
    """One is served, the other gets an EdgeError at once; nothing is left in between."""
    session, start = model("bytes").session(), threading.Barrier(2)
    outcomes: list[str] = []

    def ask() -> None:
        for _ in range(60):
            start.wait(PATIENCE)
            try:
                session.generate("a", max_tokens=3, temperature=0).finish()
                outcomes.append("answered")
            except (EngineError, InputError) as problem:
                assert "use" in str(problem) or "being made" in str(problem)
                outcomes.append("refused")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(outcomes) == 120 and outcomes.count("answered") >= 60
    # each answered turn is there, whole, and none twice
    twin = model("bytes").session()
    for _ in range(outcomes.count("answered")):
        twin.generate("a", max_tokens=3, temperature=0).finish()
    same(session, twin)


def test_row_33_a_callback_that_calls_the_session() -> None:
    """From within a run: refused, without waiting for itself, and the answer goes on."""
    session = model("bytes").session()
    expected = model("bytes").session().generate("ab", max_tokens=6, **HOT).finish()
    engine, refused = session.model.engine, []
    real = engine.run
    calls: list[Callable[[], object]] = [
        lambda: session.generate("x").finish(), lambda: session.chat("x"), session.undo,
        session.reset, session.snapshot, lambda: session.save("nowhere"),
        lambda: session.load("nowhere"), session.regenerate, lambda: answer.close(),
        lambda: next(answer),
    ]  # fmt: skip

    def run(*arguments: Any, **options: Any) -> Any:
        for call in calls:
            with pytest.raises((EngineError, InputError)) as caught:
                call()
            refused.append(str(caught.value))
        return real(*arguments, **options)

    answer = session.generate("ab", max_tokens=6, **HOT)
    engine.run = run  # type: ignore[method-assign]
    try:
        result = answer.finish()
    finally:
        del engine.run
    assert result.tokens == expected.tokens
    assert len(refused) >= 6 * len(calls) and all("in use" in text for text in refused)


def test_row_33_between_the_pieces_of_an_answer() -> None:
    session = model("bytes").session()
    for _ in session.generate("ab", max_tokens=4, **HOT):
        with pytest.raises(InputError, match="being made"):
            session.generate("x")
    assert session.generate("x", max_tokens=1).finish().tokens


# -- fork (row 34) ---------------------------------------------------------------------------------


def fork_in_the_middle(folder: str) -> None:
    loaded_model = edge.load(folder, threads=2)
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
        sys.exit(7)  # an ordinary end, with all that Python does then
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
    """It ends soon, as one does that was told to; what it wrote."""
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
    command = f"exec {sys.executable} -m edge.apps.chat demo-draft < {tmp_path}/prompt"
    process = started(["sh", "-c", command])
    wait_for(lambda: "onnxruntime" in Path(f"/proc/{process.pid}/maps").read_text())
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
    return Path(save_mamba2(tmp_path_factory.mktemp("checkpoint") / "tiny"))


def export_and_stop(source: str, out: str, stage: str, number: str) -> None:
    """`edge export`, which is sent a signal at a stage of its work."""
    from edge.apps import cli
    from edge.export import exporter

    real = exporter.export_checkpoint

    def export(*arguments: Any, progress: Any, **options: Any) -> Any:
        def report(at: str, done: float) -> None:
            progress(at, done)
            if at.startswith(stage):
                os.kill(os.getpid(), int(number))
                time.sleep(PATIENCE)  # a signal that is not heeded would show

        return real(*arguments, progress=report, **options)

    exporter.export_checkpoint = export  # type: ignore[assignment]
    sys.argv = ["edge", "export", source, "-o", out, "--quant", "w8"]
    try:
        cli.main()
    except SystemExit as leaving:
        print(leaving.code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("stage", ["reading", "weights", "checking", "hashing"])
def test_row_35_a_signal_while_exporting(
    number: int, stage: str, checkpoint: Path, tmp_path: Path
) -> None:
    said = in_child(export_and_stop, checkpoint, tmp_path / "b", stage, int(number))
    assert said.split() == [str(128 + number)]
    assert names(tmp_path) == set(), "something is left behind"


# -- no memory (row 46) ----------------------------------------------------------------------------


def load_within(folder: str, share: str) -> None:
    """Load with so much more address space than there is now; "loaded", or what was refused."""
    import edge.runtime.ort
    import edge.text  # programs do not count

    load = edge.load
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (space + int(share), resource.RLIM_INFINITY))
    try:
        session = load(folder, threads=1).session()
        session.generate("one", max_tokens=2).finish()
        print("loaded")
    except EdgeError as problem:
        print(f"refused: {problem}")


def test_row_46_no_memory_at_load() -> None:
    """Whatever there is of it: a typed error, or a model that runs."""
    said = []
    for mib in (0, 8, 24, 40, 1024):
        said.append(in_child(
            load_within, edge.runtime.model.resolve("demo-draft"), mib << 20,
            environment={"OMP_NUM_THREADS": "1"},
        ).strip())  # fmt: skip
    assert all(text == "loaded" or text.startswith("refused: ") for text in said), said
    assert said[0].startswith("refused: ") and said[-1] == "loaded"


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


def export_often(source: str, out: str, quant: str, count: str) -> None:
    from edge.export.exporter import export_checkpoint

    print("ready", flush=True)
    sys.stdin.read()
    for _ in range(int(count)):
        export_checkpoint(source, out, quant=quant, verify=False)


def test_row_60_two_processes_export_to_one_path(checkpoint: Path, tmp_path: Path) -> None:
    command = (
        "import sys; from tests.test_faults_processes import export_often as f; f(*sys.argv[1:])"
    )
    out = tmp_path / "b"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", command, str(checkpoint), str(out), quant, "6"], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for quant in ("fp32", "w8")
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    whole = 0
    while any(process.poll() is None for process in processes):
        if out.exists():
            whole += sound(out)
    for process in processes:
        assert process.stderr is not None
        assert process.wait() == 0, process.stderr.read().decode()
    assert sound(out) and names(tmp_path) == {"b"}
    assert whole > 3, "there was nothing to see"


def sound(folder: Path) -> bool:
    """Whether the bundle is whole. A reader that meets an exchange may see files go, not change."""
    try:
        with open_bundle(folder) as opened:
            opened.verify()
    except EdgeError as problem:
        assert "missing" in str(problem), problem
        return False
    return True
