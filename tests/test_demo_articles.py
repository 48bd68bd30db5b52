"""The articles that a hybrid's teacher writes: their text, ids, and openings."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import edge
from edge.apps.demo.articles import HEATS, app, batches, openings
from edge.errors import InputError
from edge.export.calibration.texts import TextReader
from edge.export.distill.rows import read_rows
from tests.tiny_teachers import taught

OPTIONS = ["--count", "7", "--together", "3", "--length", "24"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_openings_are_whole_and_of_every_kind() -> None:
    drawn = [*itertools.islice(openings(random.Random(0)), 2000)]
    assert all("{" not in text and text[0] == text[0].upper() for text in drawn)
    assert {"The history of Germany", "Gravity is", "Albert Einstein was a"} <= {*drawn}
    assert any(text.endswith("is a species of") for text in drawn)
    assert not any(text.startswith("The history of a ") for text in drawn)
    tokenizer = edge.load("demo", threads=1).tokenizer
    asked = batches(tokenizer, 0, 7, 3)
    assert [len(batch) for batch in asked] == [3, 3, 1]
    assert [one for batch in asked for one in batch] == batches(tokenizer, 0, 7, 7)[0]
    heats = {one.temperature for batch in asked for one in batch}
    assert len(heats) == 7 and HEATS[0] <= min(heats) <= max(heats) <= HEATS[1]


def test_articles_of_a_bundle_resume_and_are_read_as_sampled(tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    command = ["demo", "-o", str(out), *OPTIONS]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    model = edge.load("demo", threads=1)
    asked = [one for batch in batches(model.tokenizer, 0, 7, 3) for one in batch]
    written = lines(out)
    assert len(written) == 7 and len({line["text"] for line in written}) == 7
    for line, opening in zip(written, asked, strict=True):
        assert line["ids"][: len(opening.ids)] == list(opening.ids)
        assert len(opening.ids) < len(line["ids"]) <= 24
        assert line["text"].startswith(opening.text)
        kept = [token for token in line["ids"] if token not in model.tokenizer.eos]
        assert model.tokenizer.decode(kept) == line["text"]
    assert max(len(line["ids"]) for line in written) == 24
    ids = np.load(tmp_path / "own.npy")
    assert ids.tolist() == [token for line in written for token in line["ids"]]
    rows = read_rows([tmp_path / "own.npy"], TextReader(model.tokenizer, None), 16, None, None)
    assert rows.tokens + rows.held_out.size == len(ids) // 16 * 16

    whole = out.read_bytes()
    out.write_bytes(b"\n".join(whole.split(b"\n")[:4]) + b"\n{")  # killed in the second batch
    assert CliRunner().invoke(app, command).exit_code == 0
    assert out.read_bytes() == whole and np.load(tmp_path / "own.npy").tolist() == ids.tolist()


def test_articles_of_a_checkpoint(tmp_path: Path) -> None:
    _, teacher = taught()
    out = tmp_path / "own.jsonl"
    command = [str(teacher), "-o", str(out), "--device", "cpu", "--count", "4", "--together", "4"]
    done = CliRunner().invoke(app, [*command, "--length", "64"])
    assert done.exit_code == 0, done.output
    assert len(lines(out)) == 4 and np.load(tmp_path / "own.npy").size <= 4 * 64


@pytest.mark.parametrize(
    "options, message",
    [(["-o", "own.txt"], "must end in .jsonl"), (["-o", "own.jsonl", "--length", "2"], "no room")],
)
def test_refused(tmp_path: Path, options: list[str], message: str) -> None:
    options[1] = str(tmp_path / options[1])
    done = CliRunner().invoke(app, ["demo", *options])
    assert isinstance(done.exception, InputError) and message in str(done.exception)
