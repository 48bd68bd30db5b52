"""Drafters that do not fit, are damaged or fail, in every program: exit code, message, answer."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import edge
from edge.apps import chat, cli
from edge.apps.serve.slot import Slot
from edge.export.exporter import export_checkpoint
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler
from edge.runtime.speculate.choose import drafting
from edge.runtime.speculate.draft import Draft, Drafter
from edge.runtime.speculate.shape import Shape
from tests.facts import says
from tests.malformed import resigned
from tests.session_models import END, bundle, model
from tests.text_samples import byte_level
from tests.transformers_checkpoints import save_mamba

_ROOT = tempfile.TemporaryDirectory(prefix="edge-faults-drafts-")
QUICK = ("-p", "4", "-n", "4", "-r", "1", "--warmup", "0", "--context", "0", "--no-breakdown")
PROGRAMS = {
    "chat": ("edge-chat", "BUNDLE", "-p", "one two", "--max-tokens", "4", "--temperature", "0"),
    "profile": ("edge", "profile", "BUNDLE", *QUICK, "--json"),
    "serve": ("edge", "serve", "BUNDLE", "--port", "0", "--json"),
}


def _run(program: str, target: Path, options: Sequence[str], monkeypatch: Any) -> int:
    """Return the exit code of a program, run in this process."""
    words = [str(target) if word == "BUNDLE" else word for word in PROGRAMS[program]]
    monkeypatch.setattr(sys, "argv", [*words, "--threads", "1", *options])
    monkeypatch.setattr(sys, "stdin", None)  # closed: nothing is piped in
    main: Callable[[], None] = chat.main if words[0] == "edge-chat" else cli.main
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(left.value.code, int)
    return left.value.code


def _copy(into: Path) -> Path:
    return Path(shutil.copytree(bundle("chat"), into))


def _damaged(folder: Path) -> str:
    weights = _copy(folder / "damaged") / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)
    return str(weights.parent)


def _half(folder: Path) -> str:
    copy = _copy(folder / "half")
    (copy / "graphs/ort.onnx").unlink()
    return str(copy)


def _nan(folder: Path) -> str:
    """Return weights that are all NaN, with a correct hash."""
    weights = _copy(folder / "nan") / "weights.bin"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    resigned(weights.parent)
    return str(weights.parent)


@cache
def _textless() -> str:
    """Return another tokenizer, and one that cannot encode all text."""
    folder = Path(_ROOT.name)
    source = save_mamba(folder / "source", vocab_size=400)
    (source / "tokenizer.json").write_bytes(byte_level(ignore_merges=True))
    (source / "generation_config.json").unlink()
    export_checkpoint(source, folder / "textless", verify=False)
    return str(folder / "textless")


CASES: dict[str, tuple[Callable[[Path], str], tuple[str, ...], tuple[str, ...]]] = {
    "another vocabulary, no way by text": (
        lambda _: _textless(), (),
        ("--draft: textless has another tokenizer than", "same tokenizer, or with"),
    ),
    "missing": (lambda folder: str(folder / "none"), (), ("/none: is not a folder", "edge export")),
    "nothing": (lambda _: "", (), ("--draft: is empty", "ngram, or none")),
    "damaged": (_damaged, (), ("damaged/weights.bin: does not match its SHA-256", "export")),
    "half of it": (_half, (), ("half: is missing graphs/ort.onnx", "copy the bundle whole")),
    "tree beyond the window": (
        lambda _: str(bundle("chat")), ("--draft-tree", "9,9,9"),
        ("--draft-tree: 819 tokens in 3 depths", "at most 255", "fewer branches"),
    ),
    "chain beyond the window": (
        lambda _: str(bundle("chat")), ("--draft-tokens", "65"),
        ("--draft-tokens: must be from 1 to 64",),
    ),
    "a tree from what says one thing": (
        lambda _: "ngram", ("--draft-tree", "2,1"), ("--draft-tree: ngram", "(--draft-tokens, or")
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("case", CASES)
def test_refused_with_field_and_remedy(
    case: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    make, options, says = CASES[case]
    code = _run(program, bundle("chat"), ["--draft", make(tmp_path), *options], monkeypatch)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    refusal = err.splitlines()[-1]
    # an option's value is a usage error, a refused file is not
    assert code == (2 if refusal.startswith("error: --") else 1)
    assert refusal.startswith("error: ") and all(words in refusal for words in says), refusal


@cache
def _plain(max_tokens: int) -> str:
    session = model("chat").session()
    return session.chat("one two", temperature=0, max_tokens=max_tokens).finish().text


@pytest.mark.parametrize("shape", [("--draft-tokens", "3"), ("--draft-tree", "2,1")])
def test_nan_from_a_drafter_ends_drafting_and_nothing_else(
    shape: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options = ["--draft", _nan(tmp_path), *shape]
    longer = ["--max-tokens", "12"]
    assert _run("chat", bundle("chat"), [*options, *longer], monkeypatch) == 0
    out, err = capfd.readouterr()
    assert out == _plain(12) + "\n"
    assert says(err, "nan given up: ", "not finite", "(check the bundle")
    assert _run("profile", bundle("chat"), options, monkeypatch) == 0
    found = json.loads(capfd.readouterr().out)
    drafted = found["speculation"]
    assert "not finite" in drafted["problem"] and drafted["speedup"] > 0
    assert drafted["theoretical_speedup"] is None
    assert found["absent"]["theoretical_speedup"] == "the drafter was given up"


def test_a_model_that_drafts_for_itself_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--draft", str(bundle("chat")), "--draft-tokens", "2"]
    assert _run("chat", bundle("chat"), options, monkeypatch) == 0
    out, err = capfd.readouterr()
    assert out == _plain(4) + "\n" and "note: chat drafts for itself" in err
    assert _run("profile", bundle("chat"), options, monkeypatch) == 0
    assert any("for itself" in note for note in json.loads(capfd.readouterr().out)["notes"])


class Says(Drafter):
    """A drafter that proposes what it is told to."""

    name, nbytes = "says", 0

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        said = tuple(self._tokens[: shape.depth])
        return Draft(said, (None,) * len(said))


@pytest.mark.parametrize("accept", ["exact", "top-2"])
def test_control_tokens_from_a_drafter_end_nothing_early(accept: str) -> None:
    """End, beginning and padding of a turn, and an id that is only a padding row of the model."""
    target = model("chat")
    session = target.session(draft="ngram", draft_tokens=4, accept=accept)
    plain = target.session().chat("one two", temperature=0, max_tokens=12).finish()
    for tokens in ((END, 1, 0, 2), (target.tokenizer.vocab_size, 399, 1, END)):
        assert session.drafting is not None
        session.drafting = replace(session.drafting, drafter=Says(tokens))
        session.reset()
        found = session.chat("one two", temperature=0, max_tokens=12).finish()
        assert found.speculation is not None and found.speculation.rounds
        assert found.tokens == plain.tokens and found.text == plain.text


def test_a_server_whose_drafter_fails_answers_plainly(tmp_path: Path) -> None:
    target, greedy = model("chat"), SamplingParams(temperature=0, max_tokens=12)
    broken = edge.load(_nan(tmp_path), threads=1)
    slot = Slot(
        target, capacity=None, cache_bytes=0, drafting=drafting(target, broken, 3, None, None)
    )
    plain = Slot(target, capacity=None, cache_bytes=0)
    for tokens in ([1, 20, 30], [1, 20, 30, 40]):
        found = slot.begin(tokens, greedy, continued=True).finish()
        assert found.tokens == plain.begin(tokens, greedy, continued=True).finish().tokens
        assert found.speculation is not None and "not finite" in found.speculation.problem
