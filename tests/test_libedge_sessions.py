"""Sessions of libedge: answers, stop reasons, files shared with Python, and refusals."""

from __future__ import annotations

import ctypes as c
import fcntl
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from edge.runtime.model import resolve
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler, new_rng
from tests import golden, libedge
from tests.libedge import COMMIT, CModel, CSession, EdgeFault, Handle, Sampling
from tests.test_faults_saving import PLACES, kept_in_place
from tests.test_libedge import compiled, folder, native, python

pytestmark = compiled
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


def prompt(name: str) -> list[int]:
    return golden.SENTENCES[name].prompt_ids


@pytest.mark.parametrize("name", ["demo-draft", "demo", "demo-bytes"])
def test_a_text_goes_on_in_c_and_back(name: str, tmp_path: Path) -> None:
    """As if it had never left Python: tokens, random numbers, state."""
    whole = python(name).session()
    whole.generate(prompt(name), seed=5, max_tokens=6, **SAMPLED).finish()
    session = python(name).session()
    session.generate(prompt(name), seed=5, max_tokens=6, **SAMPLED).finish()
    for _ in range(2):
        session.save(tmp_path / "python")
        there = native(name).session(window=3)
        there.load(tmp_path / "python")
        assert (there.tokens, there.pending) == (list(session.tokens), session.pending)
        said, _ = there.generate([], sampling=SAMPLED, max_tokens=5, ignore_eos=1)
        there.save(tmp_path / "c")
        session.load(tmp_path / "c")
        expected = whole.generate(max_tokens=5, **SAMPLED).finish()
        assert said[: len(expected.tokens)] == list(expected.tokens)
        if len(said) > len(expected.tokens):  # Python ends at eos
            return
        assert session.tokens == whole.tokens and session.pending == whole.pending
        again = session.generate(max_tokens=3, **SAMPLED).finish().tokens
        assert again == whole.generate(max_tokens=3, **SAMPLED).finish().tokens


def test_a_chat_keeps_its_messages(tmp_path: Path) -> None:
    session = python("demo").session()
    session.chat("Hellö, how are you?", max_tokens=8, temperature=0).finish()
    session.save(tmp_path / "a")
    there = native("demo").session()
    there.load(tmp_path / "a")
    there.save(tmp_path / "b")
    other = python("demo").session()
    other.load(tmp_path / "b")
    assert other.messages == session.messages and other.tokens == session.tokens


def test_a_state_without_a_session(tmp_path: Path) -> None:
    """A file from `State.save`: its tokens are unknown, and the metadata beside it stays."""
    state = python("demo").engine.new_state()
    python("demo").engine.run(np.array([[5, 6, 7]]), state, commit=True)
    state.save(tmp_path / "a", {"note": "ü"})
    there = native("demo").session()
    there.load(tmp_path / "a")
    assert (there.position, there.tokens) == (3, [])
    there.save(tmp_path / "b")
    assert python("demo").engine.new_state().load(tmp_path / "b") == {"note": "ü"}
    # it keeps its own random numbers
    python("demo").engine.new_state().save(tmp_path / "empty", {})
    again, usual = (native("demo").session(seed=3, has_seed=1) for _ in range(2))
    again.load(tmp_path / "empty")
    warm = {"temperature": 5.0}
    assert (
        again.generate([1], sampling=warm, max_tokens=4)
        [0] == usual.generate([1], sampling=warm, max_tokens=4)[0]
    )  # fmt: skip


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.05},
        {"temperature": 1.2, "top_k": 400, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.4},
        {"temperature": 0.0, "repetition_penalty": 2.0, "repetition_window": 3},
    ],
)
def test_the_same_seed_draws_the_same_tokens(how: dict[str, float]) -> None:
    session = native("demo").session(seed=11, has_seed=1)
    ids = prompt("demo")
    vocab = python("demo").tokenizer.vocab_size
    logits = session.run(ids, COMMIT)[0, :vocab]
    sampler = Sampler(SamplingParams(**how), new_rng(11))
    special = set(python("demo").tokenizer.special_ids)
    recent = [token for token in ids[-64:] if token not in special]
    found, expected = [], []
    for _ in range(300):
        token = c.c_int32()
        session.do("sample", c.byref(Sampling(**how)), c.byref(token))
        found.append(token.value)
        expected.append(sampler(logits, recent))
    # weights may differ in their last bit
    assert np.mean(np.array(found) == expected) >= 0.99


def test_large_seeds() -> None:
    for seed in (0, 2**32 - 1, 2**32, 2**64 - 1):
        session = native("demo-draft").session(seed=seed, has_seed=1)
        logits = session.run([1])[0, : python("demo-draft").tokenizer.vocab_size]
        sampler = Sampler(SamplingParams(temperature=3.0), new_rng(seed))
        for _ in range(5):
            token = c.c_int32()
            session.do("sample", c.byref(Sampling(temperature=3.0)), c.byref(token))
            assert token.value == sampler(logits)


def test_what_ends_an_answer() -> None:
    sentence = golden.SENTENCES["demo-draft"]
    fourth = sentence.ids[3]
    first = sentence.ids.index(fourth) + 1
    model = native("demo-draft")

    said, result = model.session().generate(sentence.prompt_ids, max_tokens=3)
    assert said == sentence.ids[:3] and result.finish == libedge.LENGTH
    assert result.tokens == 3 and result.prompt_tokens == len(sentence.prompt_ids)
    assert 0 < result.prompt_s <= result.total_s

    stop = libedge.ints([fourth])
    session = model.session()
    said, result = session.generate(sentence.prompt_ids, stop=stop, stop_count=1)
    assert said == sentence.ids[:first] and result.finish == libedge.STOP
    assert session.pending == fourth and session.position == len(sentence.prompt_ids) + first - 1

    said, result = model.session().generate(sentence.prompt_ids, lambda token: token == fourth)
    assert said == sentence.ids[:first] and result.finish == libedge.CANCELLED

    session = model.session()
    said, result = session.generate(sentence.prompt_ids, deadline_s=1e-9)
    assert (said, result.finish, result.prompt_tokens) == ([], libedge.DEADLINE, 0)
    for deadline_s in (0.05, 1.0, 20.0):  # the first token may come too late on a busy machine
        said, result = model.session().generate(
            sentence.prompt_ids, lambda _, s=deadline_s: time.sleep(s), deadline_s=deadline_s,
            ignore_eos=1,
        )  # fmt: skip
        assert result.finish == libedge.DEADLINE and len(said) < 2
        if said:
            break
    assert said == sentence.ids[:1]

    full = native("demo").session(capacity=20)
    said, result = full.generate(prompt("demo")[:8], ignore_eos=1)
    assert (result.finish, full.position, len(said)) == (libedge.CONTEXT, 20, 13)


def test_cancelling_from_another_thread() -> None:
    session = native("demo-draft").session()
    heard = threading.Event()

    def cancel() -> None:
        heard.wait(60)
        libedge.asked("edge_session_cancel", None, session.handle)

    other = threading.Thread(target=cancel)
    other.start()
    _, result = session.generate(
        prompt("demo-draft"), lambda _: heard.set(), max_tokens=1 << 40, ignore_eos=1
    )
    other.join(60)
    assert result.finish == libedge.CANCELLED
    libedge.asked("edge_session_cancel", None, session.handle)  # before the answer: it ends it
    said, result = session.generate([1], max_tokens=4, ignore_eos=1)
    assert (said, result.finish) == ([], libedge.CANCELLED)
    assert len(session.generate([1], max_tokens=4, ignore_eos=1)[0]) == 4
    libedge.asked("edge_session_cancel", None, session.handle)
    libedge.asked("edge_session_resume", None, session.handle)  # as if it had not been cancelled
    assert len(session.generate([1], max_tokens=4, ignore_eos=1)[0]) == 4


def test_snapshots_and_forks() -> None:
    session = native("demo").session(window=3)
    session.run(prompt("demo"), COMMIT)
    for token in (5, 6, 7, 8):
        session.run([token])
    snapshot = Handle()
    session.do("snapshot", c.byref(snapshot))
    other = session.fork()
    assert (other.reach, other.tokens) == (session.reach, session.tokens)
    expected = session.run([9]), session.run([10])
    for again in (other, session, native("demo").session(window=3, capacity=300)):
        if again is not other:
            again.do("restore", snapshot)
            assert again.reach == 0
        assert again.tokens == [*prompt("demo"), 5, 6, 7, 8]
        np.testing.assert_array_equal((again.run([9]), again.run([10])), expected)
    assert libedge.asked("edge_snapshot_bytes", c.c_int64, snapshot) > 0
    libedge.asked("edge_snapshot_free", None, snapshot)
    session.do("clear")
    assert (session.position, session.tokens) == (0, [])
    np.testing.assert_array_equal(
        session.run(prompt("demo"), COMMIT), native("demo").session().run(prompt("demo"), COMMIT)
    )


def test_sessions_on_threads_of_their_own() -> None:
    """They share a model of two threads, and each answers as it does alone, also while others
    start.
    """
    model = CModel(folder("demo-draft"), threads=2)
    sentence = golden.SENTENCES["demo-draft"]
    said: list[list[int]] = []

    def say() -> None:
        session = model.session()
        said.append(session.generate(sentence.prompt_ids, max_tokens=32, ignore_eos=1)[0])

    callers = [threading.Thread(target=say) for _ in range(4)]
    for caller in callers:
        caller.start()
    while any(caller.is_alive() for caller in callers):
        model.session()
    for caller in callers:
        caller.join(60)
    assert said == [sentence.ids] * 4


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_are_pinned() -> None:
    """All but the caller. A program compiled without the option passes a shorter structure."""
    cpus = sorted(os.sched_getaffinity(0))
    shorter = {"size": libedge.ModelOptions.pin.offset, "pin": 1}
    for options, expected in (({"pin": 0}, cpus), ({"pin": 1}, cpus[1:2]), (shorter, cpus)):
        before = set(os.listdir("/proc/self/task"))
        model = CModel(folder("demo-draft"), threads=2, **options)
        (started,) = set(os.listdir("/proc/self/task")) - before
        assert sorted(os.sched_getaffinity(int(started))) == expected
        assert sorted(os.sched_getaffinity(0)) == cpus
        model.session().run([1, 2, 3])
        del model
    fault = refused(libedge.INPUT, CModel, folder("demo-draft"), threads=len(cpus) + 1, pin=1)
    assert fault.field == "pin" and f"may use {len(cpus)} CPUs" in fault.message


def refused(status: int, work: object, *arguments: object, **options: object) -> EdgeFault:
    with pytest.raises(EdgeFault) as caught:
        work(*arguments, **options)  # type: ignore[operator]
    assert caught.value.status == status, caught.value
    return caught.value


def test_what_is_refused(tmp_path: Path) -> None:
    model = native("demo")
    session: CSession = model.session(window=3, capacity=30)
    ask = libedge.INPUT
    assert "0 to" in refused(ask, session.run, [-1]).message
    assert refused(ask, session.run, [model.vocab]).field == "tokens"
    assert "no tokens" in refused(ask, session.run, []).message
    assert "window of 3" in refused(ask, session.run, [1] * 4).message
    assert "chunk" in refused(ask, session.run, [1] * 600, COMMIT).message
    assert refused(ask, session.run, [1], 8).field == "flags"
    assert refused(ask, session.run, [1, 2], 0, [-1, 1]).field == "parents"
    assert "context of 30" in refused(libedge.FULL, session.generate, [1] * 31).message
    assert refused(libedge.STATE, session.rewind, 1).message.startswith("cannot rewind")
    assert "no tree" in refused(libedge.STATE, session.do, "select", 0).message
    session.run([1, 2], 0, [-1, -1])
    assert "tree" in refused(libedge.STATE, session.run, [1]).message
    assert refused(ask, session.do, "select", 2).field == "node"
    session.do("select", -1)
    assert session.position == 0
    assert "nothing to continue" in refused(ask, session.generate, []).message
    bad = {"temperature": -1, "top_p": 0, "min_p": 2}
    assert all(name in str(refused(ask, session.generate, [1], sampling=bad)) for name in bad)
    assert refused(ask, session.generate, [1], max_tokens=0).field == "max_tokens"
    session.run([1])
    assert refused(libedge.STATE, session.do, "prepare").field == "session"
    for wrong in ({"window": 0}, {"window": 257}, {"capacity": 1 << 25}, {"history": 0}):
        assert refused(ask, model.session, **wrong).field == next(iter(wrong))
    assert refused(ask, CModel, folder("demo"), threads=0).field == "threads"
    fault = refused(ask, CModel, folder("demo"), instruction_set="avx1024")
    assert fault.field == "instruction_set" and "plain" in fault.message
    assert refused(libedge.BUNDLE, CModel, tmp_path).message.endswith("is missing")
    held: list[EdgeFault] = []
    session.generate([1], lambda _: bool(held.append(refused(libedge.ENGINE, session.run, [1]))),
                     max_tokens=1)  # fmt: skip
    assert "in use" in held[0].message
    # a refused call leaves no old handle behind
    handles = [Handle(1), Handle(1)]

    def copy_while_busy(_: object) -> bool:
        for verb, handle in zip(("fork", "snapshot"), handles, strict=True):
            refused(libedge.ENGINE, session.do, verb, c.byref(handle))
        return False

    session.generate([1], copy_while_busy, max_tokens=1)
    assert [handle.value for handle in handles] == [None, None]


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    session = native("demo-draft").session()
    session.run([1, 2, 3], COMMIT)
    file = tmp_path / "state"
    session.save(file)
    before = session.tokens
    data = file.read_bytes()
    for at in range(0, len(data), len(data) // 50):
        file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        refused(libedge.STATE, session.load, file)
        file.write_bytes(data[:at])
        refused(libedge.STATE, session.load, file)
    file.write_bytes(data + b"\0")
    assert "after its end" in refused(libedge.STATE, session.load, file).message
    file.write_bytes(data)
    other = native("demo").session()
    assert refused(libedge.STATE, other.load, file).field == "model"
    assert session.tokens == before
    session.load(file)
    refused(libedge.STATE, session.load, tmp_path / "none")
    refused(libedge.STATE, session.load, tmp_path)
    assert "regular" in refused(libedge.STATE, session.save, tmp_path).message
    # a save keeps the previous file, follows links and leaves nothing else; neither does a load
    left = tmp_path / ".state.saving-0123456789abcdef"
    left.write_bytes(b"of a save that was killed")
    with left.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        session.load(file)
        assert left.exists()
    session.load(file)
    assert not left.exists()
    left.write_bytes(b"again")
    (tmp_path / "link").symlink_to(file)
    session.run([4])
    session.save(tmp_path / "link")
    assert (tmp_path / "state~").read_bytes() == data and file.read_bytes() != data
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "state", "state~"]


def test_defaults_of_a_bundle() -> None:
    bundle = libedge.CBundle(folder("demo"))
    info, sampling = bundle.info(), Sampling()
    libedge.call("edge_bundle_sampling", bundle.handle, c.byref(sampling))
    model = python("demo")
    for name, value in model.defaults.items():
        if name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") and value:
            assert getattr(sampling, name) == pytest.approx(value), name
    assert info.fingerprint.decode() == model.fingerprint
    assert (info.layers, info.token_count) == (len(model.config.layers), model.tokenizer.vocab_size)
    assert tuple(info.eos[i] for i in range(info.eos_count)) == model.tokenizer.eos
    assert (resolve("demo") / info.tokenizer_file.decode()).exists()


@pytest.mark.parametrize("kind", PLACES)
def test_the_file_before_takes_no_place_of_another_kind(kind: str, tmp_path: Path) -> None:
    session = native("demo").session(capacity=16)
    session.run([1, 2, 3], 1)
    kept_in_place(PLACES[kind], session.save, tmp_path)
