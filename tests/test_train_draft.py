"""`edge train`: a drafter from its initial weights to a session, and the answers that it learns
from.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import edge
from edge.apps.cli import app
from edge.apps.demo.shapes import chat_config
from edge.apps.train import answers
from edge.errors import InputError
from edge.export.checkpoint import open_checkpoint
from edge.export.distill import author as authors
from edge.export.distill.drafter import begin, drafter_shape
from edge.export.distill.drafting import DrafterTraining
from edge.export.distill.options import DrafterOptions
from edge.export.exporter import export_checkpoint
from edge.export.network import Network
from edge.tensors import kv_cache_shapes, parameters, recurrent_state_shapes
from tests.tiny_teachers import network_of, taught, until

PROMPTS = ("the state of the", "a robot walks then", "the whole of the past and")


@pytest.fixture(scope="module")
def text() -> Path:
    return taught()[0]


@pytest.fixture(scope="module")
def teacher() -> Path:
    return taught()[1]


@pytest.fixture(scope="module")
def target(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the teacher's bundle, for which others draft."""
    return export_checkpoint(teacher, tmp_path_factory.mktemp("target") / "fp32").path


def quiet(line: str) -> None:
    pass


def test_the_first_factor_is_the_teachers_head(teacher: Path) -> None:
    """With hidden states in a subspace of 8 dimensions, a factor of rank 8 equals the head, and the
    drafter's norm matches their sizes.
    """
    network = network_of(teacher)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 8, generator=generator) @ torch.randn(8, 32, generator=generator)
    drafter = Network(drafter_shape(network.config, "mamba", 8, 1, None))
    begin(drafter, network, hidden)
    axes = torch.linalg.eigh(hidden.T @ hidden)[1][:, -8:].flip(1)
    torch.testing.assert_close(
        drafter.head(hidden @ axes), network.head(hidden), rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(drafter.norm_f.weight.square().sum(), hidden.square().sum(1).mean())


def test_a_drafter_from_the_command_to_a_session(
    teacher: Path, target: Path, text: Path, tmp_path: Path
) -> None:
    """It learns to predict its target, changes no word, and is an ordinary checkpoint."""
    lengths = []
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


def test_a_tokenizer_that_was_given_is_in_the_drafter(
    teacher: Path, text: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(teacher, tmp_path / "bare")
    given = (bare / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    options = DrafterOptions(
        (text,), tokens=64, length=16, batch=4, rank=32, layers=1, bf16=False, tokenizer=given
    )
    made = DrafterTraining(bare, tmp_path / "draft", options, quiet).run()
    assert (made.path / "tokenizer.json").read_bytes() == given.read_bytes()


def _said(session: edge.Session, prompt: str) -> list[int]:
    return list(session.generate(prompt, max_tokens=40, temperature=0).finish().tokens)


def test_a_drafter_of_few_ids(teacher: Path, target: Path, text: Path, tmp_path: Path) -> None:
    """It drafts the most frequent ids of the text and no others, and changes no word."""
    options = DrafterOptions(
        (text,), tokens=8000, length=32, batch=8, rank=32, layers=1, head=12, bf16=False
    )
    training = DrafterTraining(teacher, tmp_path / "few", options, quiet)
    training.run()
    checkpoint = open_checkpoint(tmp_path / "few")
    counts = Counter(training.rows.learned.flatten().tolist())
    listed = checkpoint.config.head_ids
    assert listed is not None and len(listed) == 12 and listed == tuple(sorted(listed))
    least = min(counts[i] for i in listed)
    assert all(count <= least for i, count in counts.items() if i not in listed)
    network = network_of(tmp_path / "few")
    logits, _ = network(torch.tensor([[*counts][:9]]))
    others = [i for i in range(checkpoint.config.vocab_size) if i not in listed]
    assert torch.equal(logits[..., others].amax(-1), logits.amin(-1))

    model = edge.load(target, engine="cpu", threads=1)
    for quant in ("w8", "w8a8"):
        export_checkpoint(tmp_path / "few", tmp_path / quant, quant=quant)
        for engine in ("cpu", "ort"):
            drafter = edge.load(tmp_path / quant, engine=engine, threads=1)
            session = model.session(draft=drafter, draft_tokens=3)
            result = session.generate(PROMPTS[0], max_tokens=40, temperature=0).finish()
            assert list(result.tokens) == _said(model.session(), PROMPTS[0])
            assert result.speculation is not None and result.speculation.accepted > 3
    with pytest.raises(InputError, match="head: 0 is outside 1 to"):
        DrafterTraining(teacher, tmp_path / "a", replace(options, head=0), quiet)
    with pytest.raises(InputError, match="label: needs every id"):
        DrafterTraining(teacher, tmp_path / "a", replace(options, label=0.1), quiet)


@pytest.mark.parametrize(
    ("mixer", "ends", "head"),
    [
        ("mamba", False, 20),
        ("mamba2", True, 20),
        ("mamba2", True, None),
        ("attention", True, None),
    ],
)
def test_interrupted_runs_continue_to_the_same_bits(
    mixer: str, ends: bool, head: int | None, teacher: Path, text: Path, tmp_path: Path
) -> None:
    """Also when the text is repeated, and the teacher is not run a second time."""
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[:2000])
    asked = DrafterOptions(
        (short,), tokens=1280, length=16, batch=4, mixer=mixer, rank=32, layers=2, bf16=False,
        save_every=1e6, train_ends=ends, head=head,
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
    kinds = {"mamba": {"mamba1"}, "attention": {"attention", "mlp"}}
    assert {layer.kind for layer in kept.config.layers} == kinds.get(mixer, {mixer})
    begun = Network(kept.config)
    begun.load_canonical(dict(kept.tensors()))
    assert begun.config.tie_embeddings


@pytest.mark.parametrize(("rank", "layers", "head"), [(32, 2, None), (128, 4, None), (96, 6, 99)])
def test_attention_has_the_parameters_of_mamba2(rank: int, layers: int, head: int | None) -> None:
    target = chat_config(4096, 256, "ma")
    ids = None if head is None else tuple(range(head))
    one, two = (
        drafter_shape(target, mixer, rank, layers, ids) for mixer in ("mamba2", "attention")
    )
    ends = target.vocab_size * rank
    assert len(two.layers) == layers and two.head_ids == ids
    assert parameters(two) - ends == pytest.approx(parameters(one) - ends, rel=0.08)
    assert recurrent_state_shapes(one, 1) and not kv_cache_shapes(one, 1000, 1)
    assert kv_cache_shapes(two, 1000, 1) and not recurrent_state_shapes(two, 1)


def test_a_transformer_drafts(teacher: Path, target: Path, text: Path, tmp_path: Path) -> None:
    """As transformers reads it, and without changing a word."""
    options = DrafterOptions(
        (text,), tokens=8000, length=32, batch=8, rank=32, layers=2, mixer="attention", bf16=False
    )
    made = DrafterTraining(teacher, tmp_path / "draft", options, quiet).run().path
    ids = torch.tensor([[3, 5, 2, 7, 4, 1]])
    theirs = AutoModelForCausalLM.from_pretrained(made)(ids).logits
    torch.testing.assert_close(network_of(made)(ids)[0], theirs, rtol=1e-4, atol=1e-4)
    export_checkpoint(made, tmp_path / "w8", quant="w8")
    model, drafter = (edge.load(at, engine="cpu", threads=1) for at in (target, tmp_path / "w8"))
    for shape in ({"draft_tokens": 3}, {"draft_tree": (2, 1)}):
        session = model.session(draft=drafter, **shape)
        result = session.generate(PROMPTS[0], max_tokens=40, temperature=0).finish()
        assert list(result.tokens) == _said(model.session(), PROMPTS[0])
        assert result.speculation is not None and result.speculation.accepted > 3


def test_options_that_cannot_be(teacher: Path, text: Path, tmp_path: Path) -> None:
    wrong = DrafterOptions((text,), mixer="gru", rank=48, layers=0, choice=0.8, label=0.5)
    with pytest.raises(InputError) as caught:
        DrafterTraining(teacher, tmp_path / "a", wrong, quiet)
    for field in ("mixer", "rank", "layers", "label"):
        assert f"{field}: " in str(caught.value)
    with pytest.raises(InputError, match="layers: 3 is odd"):
        odd = DrafterOptions((text,), mixer="attention", rank=32, layers=3)
        DrafterTraining(teacher, tmp_path / "a", odd, quiet)
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


def test_a_checkpoint_answers_as_its_bundle_does(
    teacher: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths are read in step; sampling repeats by its seed."""
    monkeypatch.setattr(authors, "multiplies_in_bf16", lambda device: False)
    model = edge.load(target, engine="cpu", threads=1)
    author = authors.CheckpointAuthor(teacher, "cpu", threads=1)
    prompts = [tuple(model.tokenizer.encode(text)) for text in PROMPTS]
    greedy = [answers.Asked("", ids, 0.0) for ids in prompts]
    assert len({len(ids) for ids in prompts}) > 1
    longest = max(map(len, prompts)) + 8
    found = answers.answers(author, greedy, "a", longest, 8)
    assert found == answers.answers(answers.BundleAuthor(model), greedy, "a", longest, 8)
    assert found[0] == _said(model.session(), PROMPTS[0])[:8]
    warm = [answers.Asked("", ids, 1.0) for ids in prompts]
    one, same, other = (answers.answers(author, warm, seed, longest, 8) for seed in "aab")
    assert one == same != other
    with pytest.raises(InputError, match="device: 'nowhere' cannot be used"):
        authors.CheckpointAuthor(teacher, "nowhere")


def test_a_bundle_has_an_engine_and_a_checkpoint_a_device(teacher: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    command = ["train", "answers", "--prompts", str(asked), "-o", str(tmp_path / "out")]
    for model, more, message in (
        (str(teacher), [], "--device cpu or cuda"),
        ("demo", ["--device", "cpu"], "--device: .*is a bundle"),
    ):
        done = CliRunner().invoke(app, [*command, model, *more])
        assert isinstance(done.exception, InputError) and re.search(message, str(done.exception))
