"""`edge train`: a drafter from its initial weights to a session, and the answers that it learns
from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import edge
from edge.apps.cli import app
from edge.apps.train import answers
from edge.errors import InputError
from edge.export.checkpoint import open_checkpoint
from edge.export.distill.drafter import begin, drafter_shape
from edge.export.distill.drafting import DrafterTraining
from edge.export.distill.options import DrafterOptions
from edge.export.exporter import export_checkpoint
from edge.export.network import Network
from tests.tiny_teachers import network_of, train_teacher, until, write_words

PROMPTS = ("the state of the", "a robot walks then", "the whole of the past and")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text") / "words.txt")


@pytest.fixture(scope="module")
def teacher(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_teacher(tmp_path_factory.mktemp("teacher") / "tiny", text)


def quiet(line: str) -> None:
    pass


def test_the_first_factor_is_the_teachers_head(teacher: Path) -> None:
    """With hidden states in a subspace of 8 dimensions, a factor of rank 8 equals the head, and the
    drafter's norm matches their sizes.
    """
    network = network_of(teacher)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 8, generator=generator) @ torch.randn(8, 32, generator=generator)
    drafter = Network(drafter_shape(network.config, "mamba", 8, 1))
    begin(drafter, network, hidden)
    axes = torch.linalg.eigh(hidden.T @ hidden)[1][:, -8:].flip(1)
    torch.testing.assert_close(
        drafter.head(hidden @ axes), network.head(hidden), rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(drafter.norm_f.weight.square().sum(), hidden.square().sum(1).mean())


def test_a_drafter_from_the_command_to_a_session(teacher: Path, text: Path, tmp_path: Path) -> None:
    """It learns to predict its target, changes no word, and is an ordinary checkpoint."""
    target, lengths = tmp_path / "target", []
    export_checkpoint(teacher, target, quant="fp32")
    model = edge.load(target, engine="cpu", threads=1)
    plain = [_said(model.session(), prompt) for prompt in PROMPTS]
    for tokens in ("64", "8000"):
        out = tmp_path / tokens
        done = CliRunner().invoke(
            app, ["train", "draft", "--teacher", str(teacher), "-o", str(out), "--text", str(text),
                  "--rank", "32", "--layers", "1", "--tokens", tokens, "--length", "32",
                  "--batch", "8" if tokens != "64" else "2", "--fp32", "--json"],
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        made = json.loads(done.stdout)
        assert made["tokens"] >= int(tokens) and 0 <= made["overlap"] <= 1
        bundle = tmp_path / f"bundle-{tokens}"
        export_checkpoint(out, bundle, quant="w8")
        drafter = edge.load(bundle, engine="cpu", threads=1)
        runs = []
        for prompt, words in zip(PROMPTS, plain, strict=True):
            session = model.session(draft=drafter, draft_tokens=3)
            result = session.generate(prompt, max_tokens=40, temperature=0).finish()
            assert list(result.tokens) == words
            assert result.speculation is not None
            runs.append(result.speculation.acceptance_length)
        lengths.append(sum(runs) / len(runs))
    assert lengths[1] > lengths[0] + 0.5


def _said(session: edge.Session, prompt: str) -> list[int]:
    return list(session.generate(prompt, max_tokens=40, temperature=0).finish().tokens)


@pytest.mark.parametrize(("mixer", "ends"), [("mamba", False), ("mamba2", True)])
def test_interrupted_runs_continue_to_the_same_bits(
    mixer: str, ends: bool, teacher: Path, text: Path, tmp_path: Path
) -> None:
    """Also when the text is repeated, and the teacher is not run a second time."""
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[:2000])
    asked = DrafterOptions(
        (short,), tokens=1280, length=16, batch=4, mixer=mixer, rank=32, layers=2, bf16=False,
        save_every=1e6, train_ends=ends,
    )  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    made = DrafterTraining(teacher, whole, asked, quiet).run()
    assert (made.run / "taught" / "hidden.f16").is_file()
    for stop in ("learn 192 ", "learn 1088 "):
        until(
            lambda line, stop=stop: line.startswith(stop),
            lambda report: DrafterTraining(teacher, parts, asked, report).run(),
        )
    again = DrafterTraining(teacher, parts, asked, quiet).run()
    assert again.figures == made.figures
    one, two = (load_file(path / "model.safetensors") for path in (whole, parts))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    kept = open_checkpoint(whole)
    assert {layer.kind for layer in kept.config.layers} == {"mamba1" if mixer == "mamba" else mixer}
    begun = Network(kept.config)
    begun.load_canonical(dict(kept.tensors()))
    assert begun.config.tie_embeddings


def test_options_that_cannot_be(teacher: Path, text: Path, tmp_path: Path) -> None:
    wrong = DrafterOptions((text,), mixer="gru", rank=48, layers=0, choice=0.8, label=0.5)
    with pytest.raises(InputError) as caught:
        DrafterTraining(teacher, tmp_path / "a", wrong, quiet)
    for field in ("mixer", "rank", "layers", "label"):
        assert f"{field}: " in str(caught.value)
    with pytest.raises(InputError, match="batch: 0 is outside"):
        DrafterTraining(teacher, tmp_path / "a", replace(wrong, batch=0), quiet)


def test_answers_go_on_where_they_stopped(tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    turns = [f"{word} is {other}?" for word in ("who", "what", "how") for other in ("it", "he")]
    lines = [
        {
            "messages": [
                {"role": "user", "content": turn},
                {"role": "assistant", "content": "\u2028"},
            ]
        }
        for turn in turns
    ]
    asked.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    out = tmp_path / "answers.jsonl"
    command = ["train", "answers", "demo", "--prompts", str(asked), "-o", str(out), "--count", "40",
               "--together", "2", "--max-tokens", "5"]  # fmt: skip
    none = CliRunner().invoke(app, [*command, "--together", "41"])  # more than there are
    assert "--prompts: has too few" in str(none.exception) and not out.exists()
    assert CliRunner().invoke(app, command).exit_code == 0
    whole = out.read_text()
    found = [json.loads(line)["messages"] for line in whole.splitlines()]
    assert len(found) > 4 and {one["content"] for one, _ in found} <= set(turns)
    assert any(answer["content"] for _, answer in found)
    out.write_text("\n".join(whole.split("\n")[:3]) + "\n{")
    assert CliRunner().invoke(app, command).exit_code == 0
    assert out.read_text() == whole
    asked.write_text('{"text": "no conversation"}\n')
    with pytest.raises(InputError, match="line 1 of"):
        answers.Turns([asked])
