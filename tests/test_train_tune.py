"""`edge train sft` and `edge train dpo`: the parts of a conversation that are learned, the loss,
runs.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from edge.apps.cli import app
from edge.errors import ExportError, InputError
from edge.export.calibration.texts import checkpoint_reader
from edge.export.checkpoint import open_checkpoint
from edge.export.distill.conversations import answered
from edge.export.distill.options import DistillOptions, PreferenceOptions, TuneOptions
from edge.export.distill.run import Distillation
from edge.export.distill.tuning import FineTuning, PreferenceTuning
from edge.text.byte import ByteTokenizer
from edge.text.template import ChatTemplate, Message
from tests.tiny_teachers import network_of, until, write_words
from tests.transformers_checkpoints import save_llama

TEMPLATE = (
    "{% for m in messages %}the {{ m.role }} {{ m.content }} stops {% endfor %}"
    "{% if add_generation_prompt %}the assistant {% endif %}"
)
ASKED = ("the state of the past", "a robot walks then", "it is the model")
CHOSEN, REJECTED = "it stops then it stops", "the whole of the past"


def talk(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(turns)
    return [{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)]


def lines(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_llama(tmp_path_factory.mktemp("teacher") / "tiny", num_hidden_layers=2)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    said = [{"messages": talk(asked, CHOSEN, asked, CHOSEN)} for asked in ASKED * 6]
    return lines(tmp_path_factory.mktemp("talks") / "talks.jsonl", said)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    said = [{"prompt": asked, "chosen": CHOSEN, "rejected": REJECTED} for asked in ASKED * 4]
    said.append({"chosen": talk(ASKED[0], CHOSEN), "rejected": talk(ASKED[0], REJECTED)})  # type: ignore[dict-item]
    return lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", said)


def quiet(line: str) -> None:
    pass


def log_p(path: Path, row: Tensor) -> Tensor:
    """Return the log probability of every answer token of a row [T], by the whole network and a
    softmax.
    """
    ids = torch.where(row < 0, ~row, row)
    said = F.log_softmax(network_of(path)(ids[None, :-1])[0][0], -1)
    return said.gather(1, ids[1:, None])[:, 0][row[1:] >= 0]


def test_answers_alone_are_learned(llama: Path, talks: Path, tmp_path: Path) -> None:
    """Every turn of the assistant with its end token, and no prompts or padding."""
    checkpoint = open_checkpoint(llama)
    reader = checkpoint_reader(checkpoint, checkpoint.config)
    assert reader.template is not None
    messages = [Message(m["role"], m["content"]) for m in talk(ASKED[0], CHOSEN, "then", REJECTED)]
    ids = answered(reader.template, messages, 128)
    assert [i if i >= 0 else ~i for i in ids] == reader.conversation(messages)
    own = reader.tokenizer.decode([i for i in ids if i >= 0])
    assert own.split() == f"{CHOSEN} stops {REJECTED} stops".split()
    asked = TuneOptions((talks,), length=128, batch=2, bf16=False, model=llama)
    run = FineTuning(llama, tmp_path / "out", asked, quiet)
    run.enter(run.stages[0])
    batch = torch.from_numpy(run.rows.learned[:2]).long()
    assert (batch[:, -1] == -1).all()
    found = run.learn(run.stages[0], batch)
    wanted = -torch.cat([log_p(llama, row) for row in batch]).mean()
    assert found == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("length", [3, 16, 17, 40])
def test_of_a_long_conversation_only_the_row_is_read(length: int) -> None:
    """Each turn encodes all that is before it: the square of thousands of turns would be hours."""

    class Counting(ChatTemplate):
        count = 0

        def encode(self, *arguments: Any, **options: Any) -> list[int]:
            self.count += 1
            return super().encode(*arguments, **options)

    source = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    template = Counting(source, ByteTokenizer())
    turns = [Message(role, text) for role, text in (("user", "ab"), ("assistant", "xyz"))] * 3000
    ids = answered(template, turns, length)
    assert template.count <= 2 * length
    short = answered(template, turns[:20], 1000)
    assert ids == short[:length] and any(i >= 0 for i in short) and any(i < 0 for i in short)


def test_the_loss_of_preferences_is_equation_4(llama: Path, pairs: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "other", num_hidden_layers=2, rope_theta=77.0)
    (other / "chat_template.jinja").write_text(TEMPLATE)
    asked = PreferenceOptions((pairs,), length=32, batch=3, bf16=False, model=other, beta=0.5)
    run = PreferenceTuning(llama, tmp_path / "out", asked, quiet)
    optimizer = run.enter(run.stages[0])
    batch = torch.from_numpy(run.rows.learned[:3]).long()
    gains = [
        [float(log_p(other, row).sum() - log_p(llama, row).sum()) for row in pair] for pair in batch
    ]
    wanted = [-math.log(1 / (1 + math.exp(-0.5 * (won - lost)))) for won, lost in gains]
    assert max(wanted) - min(wanted) > 1e-6
    assert run.learn(run.stages[0], batch) == pytest.approx(sum(wanted) / 3, rel=1e-4)
    before = run.margins(batch).detach()
    optimizer.step(1.0)
    assert run.margins(batch).mean() > before.mean()


@pytest.mark.parametrize("mixer", ["mamba2", "mamba1"])
def test_a_hybrid_is_tuned_and_goes_on_where_it_stopped(
    mixer: str, llama: Path, talks: Path, tmp_path: Path
) -> None:
    """To the same bits; what heads share is still stored once, and embedding and head are
    unchanged.
    """
    text = write_words(tmp_path / "words.txt")
    made = DistillOptions((text,), tokens=64, length=16, batch=4, mixer=mixer, bf16=False)
    hybrid = Distillation(llama, tmp_path / "hybrid", made, quiet).run().path
    asked = TuneOptions(
        (talks,), tokens=960, length=40, batch=4, bf16=False, model=hybrid, label=0.9, rate=3.0
    )
    whole = FineTuning(llama, tmp_path / "whole", asked, quiet).run()
    until(
        lambda line: line.startswith("learn 480 "),
        lambda report: FineTuning(llama, tmp_path / "parts", asked, report).run(),
    )
    with pytest.raises(ExportError, match="model: is not the one"):
        FineTuning(llama, tmp_path / "parts", replace(asked, model=llama), quiet).run()
    again = FineTuning(llama, tmp_path / "parts", asked, quiet).run()
    assert again.figures == whole.figures and whole.figures["loss"] < whole.figures["teacher_loss"]
    one, two = (load_file(p / "model.safetensors") for p in (whole.path, again.path))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    before = load_file(hybrid / "model.safetensors")
    same = {name for name in one if torch.equal(one[name], before[name])}
    assert same == {"model.embed_tokens.weight", "lm_head.weight"}
    tuned = open_checkpoint(whole.path)
    assert tuned.config == open_checkpoint(hybrid).config
    rows = torch.from_numpy(FineTuning(llama, tmp_path / "parts", asked, quiet).rows.held_out)
    said = -torch.cat([log_p(whole.path, row.long()) for row in rows]).mean()
    assert float(said) == pytest.approx(whole.figures["loss"], rel=1e-4)


def test_preferences_from_the_command(llama: Path, pairs: Path, tmp_path: Path) -> None:
    """The margin begins at 0, where the loss is ln 2, and rises."""
    out = tmp_path / "tuned"
    command = ["train", "dpo", str(llama), "-o", str(out), "--text", str(pairs), "--length", "32",
               "--batch", "4", "--tokens", "2048", "--rate", "20", "--fp32"]  # fmt: skip
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["margin"] > 0.05 and made["preferred"] == 1 and made["loss"] < 0.67
    head, first, *_ = (tmp_path / "tuned.run" / "curve.csv").read_text().splitlines()
    begun = dict(zip(head.split(","), first.split(","), strict=True))
    assert float(begun["margin"]) == 0 and float(begun["loss"]) == pytest.approx(math.log(2))
    assert "chosen preferred" in CliRunner().invoke(app, command).stdout
    assert open_checkpoint(out).config == open_checkpoint(llama).config


def test_a_tokenizer_that_was_given_is_in_the_product(
    llama: Path, talks: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(llama, tmp_path / "bare")
    given = (bare / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    command = ["train", "sft", str(bare), "-o", str(tmp_path / "out"), "--text", str(talks),
               "--length", "40", "--batch", "4", "--tokens", "160", "--fp32",
               "--tokenizer", str(given)]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out/tokenizer.json").read_bytes() == given.read_bytes()
    assert (tmp_path / "out/chat_template.jinja").read_text() == TEMPLATE


def test_what_is_refused(llama: Path, talks: Path, pairs: Path, tmp_path: Path) -> None:
    asked = TuneOptions((pairs,), length=32, batch=4, bf16=False, model=llama)
    with pytest.raises(ExportError, match="line 1 is not a conversation"):
        FineTuning(llama, tmp_path / "a", asked, quiet)
    bare = save_llama(tmp_path / "bare")
    with pytest.raises(ExportError, match="no chat template"):
        FineTuning(bare, tmp_path / "a", replace(asked, text=(talks,), model=bare), quiet)
    with pytest.raises(InputError, match="beta: 0 is outside"):
        wrong = PreferenceOptions((pairs,), length=32, batch=4, model=llama, beta=0.0)
        PreferenceTuning(llama, tmp_path / "a", wrong, quiet)
