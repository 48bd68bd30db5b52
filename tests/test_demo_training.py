"""Training the demo models: it learns, resumes exactly, and saves files that others read."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from edge.apps.demo import train as training
from edge.apps.demo.data import (
    ByteCodec,
    SourcedChat,
    TokenCodec,
    TrainingData,
    conversation_pieces,
    load_tokenizer,
    pack,
    read_conversations,
)
from edge.apps.demo.save import write_checkpoint
from edge.apps.demo.shapes import (
    bytes_config,
    chat_config,
    draft_config,
    mamba1_bytes_config,
    mamba1_config,
)
from edge.config import ModelConfig
from edge.export.calibration.texts import GREETINGS
from edge.export.checkpoint import open_checkpoint
from edge.export.distill.loss import Shares, head_loss, taught_loss
from edge.export.distill.optimizer import initialise, trapezoid
from edge.export.network import Network
from tests.demo_data import data as data
from tests.demo_data import short_talks as short_talks
from tests.demo_data import tokenizer as tokenizer

MAMBA1_TOY = mamba1_bytes_config(d_model=16, layers=2)
TOY = bytes_config(d_model=32, layers=2)
TALK = SourcedChat((("user", "Hi."), ("assistant", "Hello!\n\nYou?"), ("user", "Fine.")), "tldr")


def plan(steps: int) -> training.TrainingPlan:
    return training.TrainingPlan(width=65, batch=4, steps=steps, valid_conversations=2)


def weights_after(folder: Path, step: int) -> dict[str, Tensor]:
    return load_file(folder / "resume" / f"step-{step:08d}" / "weights.safetensors")


def test_a_stopped_run_continues_to_the_same_bits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = training.train(TOY, data, tmp_path / "whole", plan(6), None)
    assert card["steps"] == 6

    learn, calls = training.learn, 0

    def learn_until_told_to_stop(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(*args)

    monkeypatch.setattr(training, "learn", learn_until_told_to_stop)
    with pytest.raises(SystemExit):
        training.train(TOY, data, tmp_path / "parts", plan(6), None)
    assert weights_after(tmp_path / "parts", 3)
    training.train(TOY, data, tmp_path / "parts", plan(6), None)
    assert calls == 6
    whole, parts = weights_after(tmp_path / "whole", 6), weights_after(tmp_path / "parts", 6)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("toy", [TOY, MAMBA1_TOY], ids=["mamba2", "mamba1"])
def test_training_lowers_the_loss_past_a_half_written_checkpoint(
    toy: ModelConfig, data: Path, tmp_path: Path
) -> None:
    first = training.train(toy, data, tmp_path, plan(1), None)
    (tmp_path / "resume" / "step-00000099").mkdir()
    last = training.train(toy, data, tmp_path, plan(60), None)
    assert last["steps"] == 60
    assert last["chat_valid"]["bits_per_byte"] < first["chat_valid"]["bits_per_byte"] - 0.5


def random_network(config: Any) -> Network:
    torch.manual_seed(1)
    network = Network(config)
    initialise(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return network


@pytest.mark.parametrize("shape", [chat_config, draft_config, mamba1_config])
def test_transformers_reads_what_is_saved(
    shape: Callable[..., ModelConfig], tokenizer: Path, tmp_path: Path
) -> None:
    vocab = len(load_tokenizer(tokenizer))
    config = shape(vocab=vocab, d_model=64)
    network = random_network(config)
    write_checkpoint(network, tmp_path, tokenizer)
    ids = torch.randint(0, vocab, (2, 77))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, network(ids)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("which", ["chat", "draft", "bytes", "mamba1", "mamba1-bytes"])
def test_export_reads_what_is_saved(which: str, tokenizer: Path, tmp_path: Path) -> None:
    vocab = len(load_tokenizer(tokenizer))
    config = {
        "chat": chat_config(vocab=vocab, d_model=64),
        "draft": draft_config(vocab=vocab, d_model=64),
        "bytes": TOY,
        "mamba1": mamba1_config(vocab=vocab, d_model=64),
        "mamba1-bytes": mamba1_bytes_config(d_model=32),
    }[which]
    network = random_network(config)
    write_checkpoint(network, tmp_path, None if "bytes" in which else tokenizer)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.layers == config.layers
    read = dict(checkpoint.tensors())
    ours = network.canonical_tensors()
    assert read.keys() == ours.keys()
    assert all(torch.equal(read[name], ours[name]) for name in ours)


def test_the_tokenizer_gives_back_what_it_read(tokenizer: Path) -> None:
    model = load_tokenizer(tokenizer)
    for text in ("The cat", " two  spaces ", "line\n\nline", "ünïcödé 猫 12.5", "<|user|>a<|end|>"):
        assert model.decode(model.encode(text)) == text


def test_only_the_answers_to_instructions_are_learned(tokenizer: Path) -> None:
    codec = TokenCodec(load_tokenizer(tokenizer))
    ((ids, mask),) = conversation_pieces(TALK, codec, 100)
    learned = [i for i, wanted in zip(ids, mask, strict=True) if wanted]
    assert codec.model.decode(learned) == "Hello!\n\nYou?<|end|>"
    text = codec.model.decode(ids)
    assert text == "<|user|>Hi.<|end|><|assistant|>Hello!\n\nYou?<|end|><|user|>Fine.<|end|>"


def test_bytes_end_a_turn_with_a_blank_line() -> None:
    ((ids, mask),) = conversation_pieces(TALK, ByteCodec(), 100)
    assert bytes(ids) == b"User: Hi.\n\nAssistant: Hello!\nYou?\n\nUser: Fine.\n\n"
    assert bytes(np.array(ids)[mask].tolist()) == b"Hello!\nYou?\n\n"


def test_long_conversations_are_cut_at_users_turns() -> None:
    turns = (("user", "a" * 20), ("assistant", "b" * 20)) * 5
    pieces = conversation_pieces(SourcedChat(turns, "self_dialogue"), ByteCodec(), 80)
    assert all(len(ids) <= 80 and bytes(ids).startswith(b"User: ") for ids, _ in pieces)
    assert b"".join(bytes(ids) for ids, _ in pieces).count(b"a" * 20) == 5


def test_packing_keeps_every_piece_whole() -> None:
    rng = random.Random(2)
    pieces = [([i + 1] * rng.randint(2, 20), [True] * 20) for i in range(200)]
    pieces = [(ids, mask[: len(ids)]) for ids, mask in pieces]
    rows = pack([(list(ids), list(mask)) for ids, mask in pieces], 33, pad=0)
    for ids, _ in pieces:
        assert (rows.ids == ids[0]).any(1).sum() == 1
        assert (rows.ids == ids[0]).sum() == len(ids)
    assert rows.mask.sum() == sum(len(ids) for ids, _ in pieces)
    assert not rows.mask[rows.ids == 0].any()


def test_epochs_differ_and_repeat(data: Path) -> None:
    one, two = (TrainingData(data, ByteCodec(), 65, seed=3) for _ in range(2))
    assert np.array_equal(one.epoch(1).ids, two.epoch(1).ids)
    assert not np.array_equal(one.epoch(1).ids[:20], one.epoch(2).ids[:20])


def test_head_loss_is_cross_entropy() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(37, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    targets = torch.randint(0, 11, (37,))
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    gradients = torch.autograd.grad(expected * 0.5, (hidden, weight))
    found = head_loss(hidden, weight, targets, slice_rows=10)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found * 0.5, (hidden, weight)), gradients, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


class ProductShapes(TorchDispatchMode):
    """Shapes of the factors of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.Size, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.seen.add(tuple(factor.shape for factor in args))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("taught", [True, False])
def test_products_of_a_head_have_the_same_shapes_whatever_the_rows(taught: bool) -> None:
    """In bf16, torch keeps megabytes for every shape that it has met."""
    torch.manual_seed(0)
    weight, teacher = torch.randn(11, 8, requires_grad=True), torch.randn(11, 6)
    met = []
    for rows in (3, 10, 37):
        hidden, targets = torch.randn(rows, 8, requires_grad=True), torch.randint(0, 11, (rows,))
        with ProductShapes() as shapes:
            if taught:
                states = torch.randn(rows, 6)
                taught_loss(hidden, weight, states, teacher, Shares(), torch.bfloat16, 10)
            else:
                head_loss(hidden, weight, targets, torch.bfloat16, 10)
        met.append(shapes.seen)
    assert met[0] and met[0] == met[1] == met[2]


def test_the_learning_rate_warms_up_and_ends_at_zero() -> None:
    assert trapezoid(0, 0.0) == 0.01
    assert trapezoid(500, 0.5) == 1.0
    assert 0 < trapezoid(900, 0.9) < 0.5
    assert trapezoid(1000, 1.0) == 0.0


def test_greetings_alternate_and_end_with_an_answer() -> None:
    for conversation in read_conversations(GREETINGS):
        roles = [role for role, _ in conversation.turns]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(content for _, content in conversation.turns)
