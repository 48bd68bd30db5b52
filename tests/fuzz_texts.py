"""Parsers of texts and records for `tests.fuzz`: prompts, conversations, runs, answers of hubs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz_files import Made

SAID = [{"role": "user", "content": "Hi é."}, {"role": "assistant", "content": "Hello!"}]
TALKS = [{"messages": SAID, "source": "talk"}, {"messages": [*SAID, *SAID]}, {"text": "Once. " * 9}]


def _lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def prompts(folder: Path) -> Made:
    """Files of prompts, as JSON lines."""
    from edge.apps.prompts import read_prompts

    rows = [{"turns": ["First?", "Second?"]}, {"question": "1 + 1?"}, {"prompt": "def f():"}]
    return _reading(folder / "prompts.jsonl", _lines(rows), read_prompts)


def questions(folder: Path) -> Made:
    """Conversations whose prompts a teacher answers."""
    from edge.apps.train.answers import Turns

    file = folder / "talks.jsonl"
    return _reading(file, _lines(TALKS[:2]), lambda path: Turns([path]))


def evaluated(folder: Path) -> Made:
    """Texts that `edge eval` reads."""
    from edge.apps.evaluate.texts import read_texts

    return _reading(folder / "texts.jsonl", _lines(TALKS), lambda path: list(read_texts([path])))


def calibrated(folder: Path) -> Made:
    """Texts that `edge export` calibrates with."""
    from edge.export.calibration.texts import read_text

    reader = _reader()
    return _reading(
        folder / "texts.jsonl", _lines(TALKS * 9), lambda path: read_text(path, reader, 4, 16)
    )


def learned(form: str, folder: Path) -> Made:
    """Conversations, or preferences, that `edge train` learns from."""
    from edge.export.distill.conversations import read_conversations

    reader = _reader()
    sides = {"chosen": "Hello!", "rejected": "Go."}
    rows = TALKS[:2] if form == "a conversation" else [{"prompt": "Hi.", **sides}, sides]
    return _reading(
        folder / "talks.jsonl",
        _lines(rows * 3),
        lambda path: read_conversations([path], reader, 32, 200, None, form),
    )


def _reader() -> Any:
    from edge.export.calibration.texts import TextReader
    from edge.text.byte import ByteTokenizer
    from edge.text.template import ChatTemplate

    tokenizer = ByteTokenizer()
    template = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}", tokenizer)
    return TextReader(tokenizer, template)


def _reading(file: Path, good: bytes, read: Callable[[Path], object]) -> Made:
    def parse(raw: bytes) -> None:
        file.write_bytes(raw)
        read(file)

    return [good], parse


def options(folder: Path) -> Made:
    """What a run was started with."""
    from edge.export.distill.options import begun_with, check_same

    now: dict[str, Any] = {"teacher": "ab" * 32, "model": {"layers": 2}, "text": [{"file": "a"}]}
    now["options"] = {"length": 64, "layers": "even", "rates": [0.01, 0.02]}
    file = folder / "run.json"
    good = json.dumps(now).encode()
    return _reading(file, good, lambda path: check_same(begun_with(path), now, folder))


def progress(folder: Path) -> Made:
    """The sums and the progress of a run's checkpoint."""
    from edge.export.distill import resuming

    step = folder / "step-00000001"
    step.mkdir()
    for name in (resuming.WEIGHTS, resuming.OPTIMIZER):
        (step / name).write_bytes(b"")
    marks = b"\n--\n"
    empty = hashlib.sha256(b"").hexdigest()
    sums = {resuming.WEIGHTS: empty, resuming.OPTIMIZER: empty, resuming.PROGRESS: empty}
    good = json.dumps(sums).encode() + marks + b'{"step": 1, "tokens": 64}'

    def parse(raw: bytes) -> None:
        first, _, second = raw.partition(marks)
        if len(raw) % 2:  # as if a run had written this progress
            fits = {**sums, resuming.PROGRESS: hashlib.sha256(second).hexdigest()}
            first = json.dumps(fits).encode()
        (step / resuming.SUMS).write_bytes(first)
        (step / resuming.PROGRESS).write_bytes(second)
        resuming.newest(folder, lambda said: None)

    return [good], parse


def hub(folder: Path) -> Made:
    """What a hub says about a repository."""
    from edge.apps.models import hub as asked

    files = [{"rfilename": name, "size": 9, "blobId": "ab" * 20} for name in (
        "config.json", "tokenizer.json", "README.md")]  # fmt: skip
    files.append({"rfilename": "model.safetensors", "size": 99, "lfs": {
        "sha256": "ab" * 32, "size": 99, "pointerSize": 9}})  # fmt: skip
    told = {"id": "owner/name", "sha": "cd" * 20, "siblings": files,
            "cardData": {"license": "mit"}, "tags": ["mamba"]}  # fmt: skip

    def parse(raw: bytes) -> None:
        asked.ask = lambda *given: raw  # in this process alone: no network is needed
        asked.look_up("owner/name", None)

    return [json.dumps(told).encode()], parse


TEXTS: Mapping[str, Callable[[Path], Made]] = {
    "prompts": prompts, "questions": questions, "evaluated": evaluated, "calibrated": calibrated,
    "conversations": partial(learned, "a conversation"),
    "preferences": partial(learned, "a preference"),
    "options": options, "progress": progress, "hub": hub,
}  # fmt: skip
