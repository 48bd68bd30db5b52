"""`edge distill`: the initial mixers, the stages, resuming after an interruption, the product."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

import edge
from edge.apps.cli import app
from edge.config import AttentionConfig, ModelConfig
from edge.errors import EdgeError, ExportError, InputError
from edge.export.calibration.texts import checkpoint_reader
from edge.export.checkpoint import open_checkpoint
from edge.export.checkpoint.families.mamba_in_llama import grouped_rows, mixer_for
from edge.export.distill import hybrid, initial, stages
from edge.export.distill.initial import Inputs, from_attention
from edge.export.distill.loss import Shares, taught_loss
from edge.export.distill.options import DistillOptions
from edge.export.distill.rows import read_rows
from edge.export.distill.run import Distillation, DistillSummary
from edge.export.distill.student import Student, visits
from edge.export.exporter import export_checkpoint
from edge.export.mixers import mixer_of
from edge.export.network import empty_state
from tests.checkpoints import VOCABULARY
from tests.facts import says
from tests.tiny_teachers import network_of, taught, until
from tests.transformers_checkpoints import (
    save_bamba,
    save_gemma2,
    save_llama,
)


@pytest.fixture(scope="module")
def text() -> Path:
    return taught()[0]


@pytest.fixture(scope="module")
def teacher() -> Path:
    return taught()[1]


@pytest.fixture(scope="module")
def asked(text: Path) -> DistillOptions:
    return DistillOptions(
        (text,), keep=(0.66,), tokens=640, length=16, batch=4, bf16=False, save_every=1e6
    )


def quiet(line: str) -> None:
    pass


def distill(
    teacher: Path, out: Path, asked: DistillOptions, report: Callable[[str], None] = quiet
) -> DistillSummary:
    return Distillation(teacher, out, asked, report).run()


# -- the first mixers ------------------------------------------------------------------------------


BOTH = pytest.mark.parametrize("mixer", ["mamba2", "mamba1"])


@BOTH
def test_the_first_mixer_is_linear_attention(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v are the first two values of the input, and the third is always 1. By hand:

    t  q=k=v   Σ (q·k)v                           over its root mean square
    1  (1, 0)  1(1,0)                   = (1, 0)  (√2, 0)
    2  (0, 1)  0(1,0)+1(0,1)            = (0, 1)  (0, √2)
    3  (1, 1)  1(1,0)+1(0,1)+2(1,1)     = (3, 3)  (1, 1)
    4  (2,-1)  2(1,0)-1(0,1)+1(1,1)+5(2,-1) = (13,-5)

    Mamba-1 has no norm that takes a factor out: the first says which.
    """
    # where SiLU is linear and nothing decays; the norm's epsilon below has to be as small
    monkeypatch.setattr(initial, "X_SIZE", 1e-4)
    monkeypatch.setattr(initial, "BC_SIZE", 1e-4)
    monkeypatch.setattr(initial, "MEMORY", (1e9, 1e9))
    monkeypatch.setattr(initial, "RIDGE", 1e-9)
    u = torch.tensor([[[1.0, 0, 1], [0, 1, 1], [1, 1, 1], [2, -1, 1]]])
    attention = AttentionConfig(n_heads=1, n_kv_heads=1, head_dim=2)
    pick = torch.eye(3)[:2]
    weights = {f"{part}_proj.weight": pick for part in "qkv"} | {"o_proj.weight": pick.T}
    teacher = ModelConfig(family="t", vocab_size=8, d_model=3, layers=(attention,))
    config = hybrid.mixer_maker(mixer, teacher)(attention)
    new = mixer_of(config).module(3, 1e-38)
    made = from_attention(attention, config, weights, Inputs.of(u))
    for name, parameter in new.named_parameters():
        parameter.data.copy_(made[name])
    state = {name: torch.zeros(shape) for name, shape in empty_state(config, 1).items()}
    with torch.no_grad():
        said = new(u, state, 0)[0][0, :, :2]
    wanted = torch.tensor([[1.0, 0], [0, 1], [3, 3], [13, -5]])
    if mixer == "mamba1":
        said = said / said[0, 0]
    else:
        wanted = wanted / wanted.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(said, wanted, atol=2e-3, rtol=0)


def test_biases_of_attention_become_the_convolutions() -> None:
    """x, B and C at the convolution's output, before SiLU, are the scaled v, k and q."""
    generator = torch.Generator().manual_seed(0)
    attention = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=3, qkv_bias=True)
    weights = {"o_proj.weight": torch.randn(5, 12, generator=generator)}
    for part, rows in (("q", 12), ("k", 6), ("v", 6)):
        weights[f"{part}_proj.weight"] = torch.randn(rows, 5, generator=generator)
        weights[f"{part}_proj.bias"] = torch.randn(rows, generator=generator)
    u = torch.randn(50, 5, generator=generator) + 1
    config = mixer_for(attention)
    made = from_attention(attention, config, weights, Inputs.of(u))
    found = u @ made["in_proj.weight"][12:48].T + made["conv1d.bias"]
    for part, start, size, heads in (("v", 0, 0.3, 2), ("k", 12, 0.5, 2), ("q", 24, 0.5, 4)):
        plain = u @ weights[f"{part}_proj.weight"].T + weights[f"{part}_proj.bias"]
        plain = plain.unflatten(1, (heads, 3)).repeat_interleave(4 // heads, 1)
        mine = found[:, start : start + 12].unflatten(1, (4, 3))
        torch.testing.assert_close(mine.square().mean((0, 2)).sqrt(), torch.full((4,), size))
        ratio = mine / plain
        torch.testing.assert_close(ratio, ratio[:1, :, :1].expand_as(ratio), rtol=1e-3, atol=0)


@BOTH
def test_heads_share_rows_as_attention_did(mixer: str, teacher: Path) -> None:
    network = network_of(teacher)
    student = Student(network, [0, 1, 2], make=hybrid.mixer_maker(mixer, network.config))
    ids = torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1))
    student.initialise(network, ids, 2)
    student.replace([0, 2])
    student.learns([student.mixers])
    optimizer = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], 0.1)
    stages.match(network, student, ids, bf16=False)
    optimizer.step()
    rows = grouped_rows(student.make(student.attention_config(0)), 2)
    for name, tensor in student.network.canonical_tensors().items():
        module = name.split(".")[2] if name.startswith(("layers.0", "layers.4")) else ""
        if module in rows:
            first = [rows[module].index(row) for row in rows[module]]
            assert torch.equal(tensor, tensor[first]) and len(set(rows[module])) < len(tensor)


# -- the stages ------------------------------------------------------------------------------------


def test_matching_reads_the_teachers_own_states(teacher: Path) -> None:
    """Every block's loss compares with its attention's input and output in the teacher, whatever
    else is replaced, and no other parameter gets a gradient.
    """
    network = network_of(teacher)
    student = Student(network, [0, 2])
    ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))
    student.initialise(network, ids, 2)
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    hooks = [
        network.layers[2 * block].mixer.register_forward_hook(
            lambda _, given, got, block=block: seen.update({block: (given[0], got[0])})
        )
        for block in (0, 2)
    ]
    network(ids)
    for hook in hooks:
        hook.remove()
    student.replace([0])
    student.learns([student.mixers])
    losses = stages.match(network, student, ids, bf16=False)
    for visit in visits(network, [0, 2], ids):
        torch.testing.assert_close(visit.u, seen[visit.block][0])
        torch.testing.assert_close(visit.y, seen[visit.block][1])
        said = student.run_mixer(visit).detach()
        error = (said - visit.y).square().mean() / visit.y.square().mean()
        assert losses[visit.block] == pytest.approx(float(error), rel=1e-5)
    assert all(p.grad is not None for p in student.mixers.parameters())
    assert all(p.grad is None for p in network.parameters())


def test_recomputing_changes_no_gradient(teacher: Path) -> None:
    network = network_of(teacher)
    student = Student(network, [1])
    ids = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(3))
    student.initialise(network, ids, 2)
    student.replace([1])
    student.learns([student.mixers])
    found = []
    for recompute in (False, True):
        student.zero_grad()
        taught = stages.taught_hidden(network, ids, False)
        shares = Shares(0.6, 0.0, 0.0, 0.4)
        loss = stages.learn(network, student.network, ids, taught, shares, False, recompute)
        found.append(
            (loss, [p.grad.clone() for p in student.mixers.parameters() if p.grad is not None])
        )
    assert found[0][0] == found[1][0] and len(found[0][1]) == len(list(student.mixers.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("caps", [(None, None), (1.5, None), (2.0, 1.2)])
def test_the_loss_is_equation_2(caps: tuple[float | None, float | None]) -> None:
    """α·CE of the text + β·KL(teacher ‖ student), and its gradients, by autograd."""
    generator = torch.Generator().manual_seed(0)
    hidden, head, taught = (torch.randn(*s, generator=generator) for s in ((9, 5), (7, 5), (9, 4)))
    teacher, targets = torch.randn(7, 4, generator=generator), torch.arange(9) % 7
    mine, plain = (h.clone().requires_grad_() for h in (hidden, hidden))
    shares = Shares(divergence=0.25, overlap=0.0, choice=0.0, label=0.75)
    found = taught_loss(
        mine, head, taught, teacher, shares, slice_rows=4, targets=targets, softcaps=caps
    )
    ours, theirs = (
        logits if cap is None else cap * torch.tanh(logits / cap)
        for logits, cap in zip((plain @ head.T, taught @ teacher.T), caps, strict=True)
    )
    log_q, log_p = F.log_softmax(ours, -1), F.log_softmax(theirs, -1)
    divergence = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    wanted = 0.75 * F.nll_loss(log_q, targets, reduction="sum") + 0.25 * divergence
    torch.testing.assert_close(found, wanted)
    torch.autograd.backward([found, wanted])
    torch.testing.assert_close(mine.grad, plain.grad)


def test_a_teacher_with_bounded_logits_is_learned_as_it_speaks(tmp_path: Path) -> None:
    """The text loss of Gemma 2 follows from its own logits."""
    teacher = network_of(save_gemma2(tmp_path, final_logit_softcapping=2.0))
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    student = network_of(tmp_path).requires_grad_(True)
    taught, label = stages.taught_hidden(teacher, ids, bf16=False), Shares(0.0, 0.0, 0.0, 1.0)
    found = stages.learn(teacher, student, ids, taught, label, bf16=False, recompute=False)
    logits = teacher(ids[:, :-1])[0]
    wanted = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert found == pytest.approx(float(wanted), rel=1e-5)
    same = stages.learn(teacher, student, ids, taught, Shares(1.0, 0.0, 0.0, 0.0), False, False)
    assert same == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(("blocks", "kept", "left"), [
    (8, 4, [0, 2, 4, 6]), (8, 2, [0, 1, 2, 4, 5, 6]), (8, 1, [0, 1, 2, 3, 4, 5, 6]),
    (8, 8, []), (8, 0, [*range(8)]), (5, 2, [0, 2, 3]),
])  # fmt: skip
def test_even_is_the_papers_choice(blocks: int, kept: int, left: list[int]) -> None:
    assert hybrid.evenly(range(blocks), kept) == left


def test_phases_only_ever_add_blocks() -> None:
    for even in (True, False):
        order = hybrid.evenly(range(30), 8) if even else [5, 3, 29, 0, 11, 7]
        counts = [7, 15, 22] if even else [2, 4, 6]
        found = hybrid.phases(order, counts, even)
        assert [len(phase) for phase in found] == counts
        assert all(set(a) < set(b) for a, b in pairwise(found))
    assert found[0] == [3, 5]


# -- whole runs ------------------------------------------------------------------------------------


@BOTH
def test_with_all_attention_kept_it_is_the_teacher(
    mixer: str, teacher: Path, asked: DistillOptions, tmp_path: Path
) -> None:
    made = distill(teacher, tmp_path / "hybrid", replace(asked, keep=(1.0,), mixer=mixer))
    assert made.replaced == () and made.figures["kl"] == 0.0 and made.tokens == 0
    before, after = open_checkpoint(teacher), open_checkpoint(made.path)
    assert after.config == before.config and not (made.path / "mamba_config.json").exists()
    for (name, one), (_, two) in zip(before.tensors(), after.tensors(), strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two), name
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (made.path / file).read_bytes() == (teacher / file).read_bytes()


@pytest.fixture(scope="module", params=["mamba2", "mamba1"])
def recovered(
    request: pytest.FixtureRequest, teacher: Path, text: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> DistillSummary:  # fmt: skip
    """Return a teacher without its second attention layer, after 24,000 tokens."""
    asked = DistillOptions(
        (text,), layers="1", tokens=24_000, length=32, batch=16, bf16=False, save_every=1e6,
        mixer=request.param,
    )  # fmt: skip
    return distill(teacher, tmp_path_factory.mktemp("run") / "hybrid", asked)


def test_a_tiny_teacher_is_recovered(recovered: DistillSummary, teacher: Path) -> None:
    points = list(csv.DictReader((recovered.run / "curve.csv").open()))
    matched = [float(p["loss"]) for p in points if p["name"] == "match"]
    kl = [float(p["kl"]) for p in points if p["name"] == "valid"]
    assert matched[-1] < 0.6 * matched[0]
    assert recovered.figures["kl"] == kl[-1] < min(0.06, 0.5 * kl[0])
    assert recovered.figures["perplexity_ratio"] < 1.1
    kept = open_checkpoint(recovered.path)
    for name, tensor in open_checkpoint(teacher).tensors():
        if not name.startswith("layers.2.") or ".norm." in name:
            assert torch.equal(kept.tensor(name), tensor)
    stored = load_file(recovered.path / "model.safetensors")
    parts = {name.removeprefix("model.layers.1.mamba."): t.shape for name, t in stored.items()}
    if kept.config.layers[2].kind == "mamba1":
        assert parts["in_proj_x.weight"] == parts["B_proj.weight"] == (16, 32)
        assert parts["in_proj_z.weight"] == parts["C_proj.weight"] == (32, 32)
    else:
        assert parts["in_proj.weight"] == (2 * 32 + 2 * 16 + 4, 32)


def test_the_product_runs_on_onnx_runtime(recovered: DistillSummary, tmp_path: Path) -> None:
    export_checkpoint(recovered.path, tmp_path / "bundle", quant="fp32")
    network = network_of(recovered.path)
    model = edge.load(tmp_path / "bundle", engine="ort", threads=1)
    prompt = "the state of the model"
    ids = model.tokenizer.encode(prompt)
    said = model.session().generate(prompt, max_tokens=12, temperature=0).finish()
    for token in said.tokens:
        assert int(network(torch.tensor([ids]))[0][0, -1].argmax()) == token
        ids.append(token)
    assert len(said.tokens) == 12


def interrupted(
    teacher: Path, out: Path, asked: DistillOptions, when: Callable[[str], bool]
) -> None:
    until(when, lambda report: distill(teacher, out, asked, report))


@BOTH
def test_interrupted_runs_continue_to_the_same_bits(
    mixer: str, teacher: Path, asked: DistillOptions, tmp_path: Path
) -> None:
    """Through both stages and two phases, the second of which trains one more block."""
    asked = replace(asked, keep=(0.66, 0.33), train_all=True, mixer=mixer)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    made = distill(teacher, whole, asked)
    assert [phase["kept"] for phase in made.phases] == [2, 1] and made.replaced == (0, 1)
    interrupted(teacher, parts, asked, lambda line: line.startswith("match 128"))
    interrupted(teacher, parts, asked, lambda line: line.startswith("learn 448"))
    interrupted(teacher, parts, asked, lambda line: line.startswith("learn 576"))
    again = distill(teacher, parts, asked)
    assert again.figures == made.figures and again.phases == made.phases
    one, two = (load_file(path / "model.safetensors") for path in (whole, parts))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    curves = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file.open())]
        for file in (made.run / "curve.csv", again.run / "curve.csv")
    ]
    assert curves[0] == curves[1]
    done = distill(teacher, parts, asked)  # nothing is left to do
    assert (done.tokens, done.figures) == (made.tokens, made.figures)
    assert network_of(made.run / "kept-2").config.layers[0].kind == mixer


def test_the_cheapest_blocks_go(teacher: Path, asked: DistillOptions, tmp_path: Path) -> None:
    made = distill(teacher, tmp_path / "hybrid", replace(asked, layers="measured"))
    assert sorted(made.costs) == [0, 1, 2] and len(made.replaced) == 1
    assert made.costs[made.replaced[0]] == min(made.costs.values())


# -- what is refused -------------------------------------------------------------------------------


def refused(teacher: Path, out: Path, asked: DistillOptions) -> EdgeError:
    with pytest.raises((ExportError, InputError)) as caught:
        distill(teacher, out, asked)
    assert not (out / "config.json").exists()
    return caught.value


def test_all_that_is_wrong_is_told_at_once(
    teacher: Path, asked: DistillOptions, tmp_path: Path
) -> None:
    wrong = replace(
        asked, text=(), keep=(0.2, 0.5), mixer="gla", match=2.0, batch=0, device="abacus"
    )
    told = str(refused(teacher, tmp_path / "hybrid", wrong))
    for field in ("text", "keep_attention", "mixer", "match", "batch", "device"):
        assert field in told
    typed = ["--text", "x.txt", "--keep-attention", "2", "--match", "3", "--batch", "0"]
    command = ["distill", str(teacher), "-o", str(tmp_path / "hybrid"), *typed]
    said = str(CliRunner().invoke(app, command).exception)
    for fault in ("--batch: 0 is", "; --keep-attention: '2' is", "; --match: 3 is"):
        assert fault in said, said


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers": "0,7,x"}, ("7 is not within 0 to 2", "layers: 'x'")),
        ({"text": (Path("absent.txt"),)}, ("absent.txt: ", "text: ", "cannot be read")),
        ({"length": 2048}, ("length: ", 2048)),
        ({"batch": 4096}, ("fewer than a batch",)),
    ],
)
def test_options_that_cannot_be(
    changes: dict[str, Any],
    told: tuple[object, ...],
    teacher: Path,
    asked: DistillOptions,
    tmp_path: Path,
) -> None:
    assert says(refused(teacher, tmp_path / "hybrid", replace(asked, **changes)), *told)


def test_teachers_that_are_no_llama(asked: DistillOptions, tmp_path: Path) -> None:
    mixed = save_bamba(tmp_path / "bamba")
    assert says(refused(mixed, tmp_path / "a", asked), "attention and MLP")
    biased = save_llama(tmp_path / "biased", attention_bias=True)
    assert "out_bias" in str(refused(biased, tmp_path / "b", asked))
    export_checkpoint(save_llama(tmp_path / "llama"), tmp_path / "bundle", quant="fp32")
    assert "is a bundle" in str(refused(tmp_path / "bundle", tmp_path / "c", asked))


def test_another_run_is_not_continued(teacher: Path, asked: DistillOptions, tmp_path: Path) -> None:
    out = tmp_path / "hybrid"
    interrupted(teacher, out, asked, lambda line: line.startswith("match"))
    told = str(refused(teacher, out, replace(asked, seed=1, rate=2.0)))
    assert "seed: was 0" in told or "rate: was 1.0" in told
    assert "seed" in told and "rate" in told
    (out.parent / "full.run").write_text("where the run's folder has to be")
    with pytest.raises(ExportError, match=r"full\.run: was not written"):
        distill(teacher, out.parent / "full", asked)
    (out.parent / "mine").mkdir()
    (out.parent / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="exists and does not"):
        distill(teacher, out.parent / "mine", asked)


def test_text_may_be_token_ids(teacher: Path, text: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(teacher)
    reader = checkpoint_reader(checkpoint, checkpoint.config)
    ids = read_rows([text], reader, 16, None, text).learned.flatten().astype(np.uint16)
    file = tmp_path / "ids.npy"
    np.save(file, ids)
    rows, same = (read_rows([f, f], reader, 16, None, None) for f in (file, text))
    assert (rows.learned == same.learned).all() and (rows.held_out == same.held_out).all()
    some = read_rows([file], reader, 16, 640, file)
    assert len(some.learned) == 40 and len(some.held_out) == 16
    assert (some.learned[-1] == ids[len(ids) // 16 * 39 // 40 * 16 :][:16]).all()
    for array, told in (
        (ids[:8], "too few"), (ids[None], "of shape"), (ids.astype(float), "float64"),
        (ids + 1000, "outside 0 to"),
    ):  # fmt: skip
        np.save(file, array)
        with pytest.raises(ExportError, match=told):
            read_rows([file], reader, 16, None, None)
    np.savez(tmp_path / "several.npz", ids=ids)
    file.write_bytes((tmp_path / "several.npz").read_bytes())
    with pytest.raises(ExportError, match="is an archive of arrays"):
        read_rows([file], reader, 16, 640, None)
    file.write_bytes(b"no array")
    with pytest.raises(ExportError, match="cannot be read"):
        read_rows([file], reader, 16, None, None)
