"""A drafter learns from its teacher: the loss, its lessons, resuming, and its chats."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edge.apps.demo import answers as demo_answers
from edge.apps.demo import prompts as demo_prompts
from edge.apps.demo import talks as demo_talks
from edge.apps.demo import train as training
from edge.apps.demo.data import load_tokenizer, make_codec
from edge.apps.demo.distill import Taught, TeacherLessons, load_network, read_talks, start_from
from edge.apps.demo.save import write_checkpoint
from edge.apps.demo.shapes import chat_config, draft_config
from edge.apps.train import answers as train_answers
from edge.export.distill.loss import Shares, taught_loss
from edge.export.distill.optimizer import initialise
from edge.export.network import Network
from edge.runtime.model import load
from tests.demo_data import data as data
from tests.demo_data import short_talks as short_talks
from tests.demo_data import tokenizer as tokenizer


def network_of(config: Any, seed: int) -> Network:
    torch.manual_seed(seed)
    network = Network(config)
    initialise(network)
    with torch.no_grad():
        network.embedding.weight.mul_(10)  # so that its choices are clear
    return network


@pytest.fixture(scope="module")
def teacher(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    vocab = len(load_tokenizer(tokenizer))
    write_checkpoint(network_of(chat_config(vocab, 32, "ma"), 1), folder, tokenizer)
    return folder


@pytest.fixture
def taught(teacher: Path, data: Path, tmp_path: Path) -> Taught:
    return Taught(teacher, (data / "chat.train.jsonl",), tmp_path / "lessons")


@pytest.mark.parametrize(
    "shares", [Shares(1, 0, 0), Shares(0, 1, 0), Shares(0, 0, 1), Shares(0.3, 0.5, 0.2)]
)
def test_the_loss_is_divergence_overlap_and_choice(shares: Shares) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(37, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    taught, head = torch.randn(37, 5), torch.randn(11, 5)
    log_q, p = (hidden @ weight.T).log_softmax(-1), (taught @ head.T).softmax(-1)
    expected = (
        shares.divergence * F.kl_div(log_q, p, reduction="sum")
        + shares.overlap * (1 - torch.minimum(log_q.exp(), p).sum(-1)).sum()
        + shares.choice * F.nll_loss(log_q, p.argmax(-1), reduction="sum")
    )
    gradients = torch.autograd.grad(expected * 0.5, (hidden, weight))
    found = taught_loss(hidden, weight, taught, head, shares, slice_rows=10)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found * 0.5, (hidden, weight)), gradients, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_lessons_are_what_the_teacher_thinks_of_each_talk_alone(
    taught: Taught, tokenizer: Path
) -> None:
    lessons = TeacherLessons(taught, make_codec(tokenizer), width=40, batch=4, seed=0)
    network, _ = load_network(taught.teacher)
    rows = lessons.epoch(0)
    batch = rows.batch(slice(4, 8))
    assert batch.taught is not None
    expected = []
    for ids, mask, talk in zip(batch.ids, batch.mask, rows.talks[4:8], strict=True):
        length = len(talk.ids)
        hidden, _ = network.hidden(ids[None, : length - 1])
        expected.append(hidden[0, mask[1:length]])
        # the answer with its end, and nothing of the question
        said = lessons_text(tokenizer, ids[mask].tolist())
        assert said.endswith(".<|end|>") and said[0].isupper()
    torch.testing.assert_close(batch.taught.float(), torch.cat(expected), atol=0.05, rtol=0.02)


def lessons_text(tokenizer: Path, ids: list[int]) -> str:
    return str(load_tokenizer(tokenizer).decode(ids))


def test_epochs_hold_every_talk_once_but_those_held_out(taught: Taught, tokenizer: Path) -> None:
    lessons = TeacherLessons(taught, make_codec(tokenizer), width=40, batch=2, seed=0)
    one, two = (lessons.epoch(number) for number in (0, 1))
    assert [t.first for t in one.talks] != [t.first for t in two.talks]
    assert [t.first for t in one.talks] == [t.first for t in lessons.epoch(0).talks]
    places = {talk.first for talk in one.talks}
    assert len(places) == len(one.talks) and len(lessons.held_out) == 2
    assert not places & {talk.first for talk in lessons.held_out}


def test_a_model_agrees_with_itself(taught: Taught, tokenizer: Path) -> None:
    lessons = TeacherLessons(taught, make_codec(tokenizer), width=40, batch=2, seed=0)
    itself = lessons.agreement(load_network(taught.teacher)[0])
    assert itself["same_choice"] > 0.95 and itself["overlap"] > 0.98
    other = lessons.agreement(network_of(draft_config(lessons.head.shape[0], 32, 1), 2))
    assert other["overlap"] < 0.8


def plan(taught: Taught, steps: int) -> training.TrainingPlan:
    return training.TrainingPlan(
        width=40, batch=4, steps=steps, valid_conversations=2, taught=taught
    )


def test_lessons_are_kept_for_the_same_file_only(
    taught: Taught, data: Path, tokenizer: Path
) -> None:
    codec = make_codec(tokenizer)
    first = TeacherLessons(taught, codec, width=40, batch=4, seed=0)
    (kept,) = taught.keep.glob("*/hidden.npy")
    np.save(kept, first.hidden + np.float16(1))
    again = TeacherLessons(taught, codec, width=40, batch=4, seed=1)
    assert np.array_equal(again.hidden, first.hidden + np.float16(1))
    other = data / "chat.valid.jsonl"
    more = replace(taught, talks=(other, *taught.talks))
    both = TeacherLessons(more, codec, width=40, batch=4, seed=1)
    alone = TeacherLessons(replace(taught, talks=(other,)), codec, width=40, batch=4, seed=1)
    assert np.array_equal(both.hidden, np.concatenate([alone.hidden, again.hidden]))
    talk = both.learned[-1]
    assert talk.first + sum(talk.mask) == len(both.hidden)
    cut = TeacherLessons(taught, codec, width=12, batch=4, seed=0)
    assert len(cut.hidden) < len(first.hidden)


def test_a_start_gives_what_fits(teacher: Path, tokenizer: Path, tmp_path: Path) -> None:
    vocab = len(load_tokenizer(tokenizer))
    large = network_of(draft_config(vocab, 32, 3), 3)
    write_checkpoint(large, tmp_path, tokenizer)
    small, before = (network_of(draft_config(vocab, 32, 1), 4) for _ in range(2))
    start_from(small, tmp_path)
    wanted = large.canonical_tensors()
    assert all(torch.equal(t, wanted[name]) for name, t in small.canonical_tensors().items())
    start_from(before, teacher)  # a hybrid: little of its first layer fits
    left = network_of(draft_config(vocab, 32, 1), 4).canonical_tensors()
    found = before.canonical_tensors()
    assert torch.equal(found["embedding.weight"], load_network(teacher)[0].embedding.weight)
    assert torch.equal(found["layers.0.in_proj.weight"], left["layers.0.in_proj.weight"])


def test_a_head_apart_begins_as_the_embedding_and_is_written(
    tokenizer: Path, tmp_path: Path
) -> None:
    vocab = len(load_tokenizer(tokenizer))
    tied = network_of(draft_config(vocab, 32, 1).model_copy(update={"tie_embeddings": True}), 3)
    write_checkpoint(tied, tmp_path / "tied", tokenizer)
    apart = network_of(draft_config(vocab, 32, 1), 4)
    start_from(apart, tmp_path / "tied")
    assert apart.lm_head is not None
    assert torch.equal(apart.lm_head.weight, tied.embedding.weight)
    with torch.no_grad():
        apart.lm_head.weight += 1
    write_checkpoint(apart, tmp_path / "apart", tokenizer)
    again, _ = load_network(tmp_path / "apart")
    for name, tensor in apart.canonical_tensors().items():
        assert torch.equal(tensor, again.canonical_tensors()[name]), name


def test_answers_are_learned_as_the_ids_that_were_said(tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    groups = [{"asked": [[5, 6], [7, 8]], "said": [[9, 10, 11], [12]]}, {"asked": [], "said": []}]
    file.write_text("".join(json.dumps(group) + "\n" for group in groups))
    talks = read_talks(file, make_codec(tokenizer), limit=4)
    assert [(talk.ids, talk.first) for talk in talks] == [([5, 6, 9, 10], 0), ([7, 8, 12], 2)]
    assert [talk.mask for talk in talks] == [[False, False, True, True], [False, False, True]]


def test_of_dialogues_both_sides_are_learned(tokenizer: Path, data: Path, tmp_path: Path) -> None:
    codec = make_codec(tokenizer)
    file = data / "chat.train.jsonl"
    other = tmp_path / "sums.jsonl"
    other.write_text(file.read_text().replace("self_dialogue", "gsm8k_chat"))
    both, one = (read_talks(path, codec, limit=100) for path in (file, other))
    for talk, assistant in zip(both, one, strict=True):
        assert talk.mask[1:] == [i != codec.turn("assistant", "")[0][0] for i in talk.ids[1:]]
        assert sum(assistant.mask) < sum(talk.mask) and assistant.ids == talk.ids


def test_talks_continue_after_a_kill(data: Path, tmp_path: Path) -> None:
    session = load("demo", threads=1).session(undo_levels=0)
    prompts = demo_talks.user_turns(data / "chat.train.jsonl")
    plan = demo_talks.ConversationPlan(seed=0, turns=2, max_tokens=12)
    expected = [list(demo_talks.talk(session, prompts, plan, index)) for index in range(4)]
    assert all(m["role"] == ("user", "assistant")[i % 2] for t in expected for i, m in enumerate(t))
    out = tmp_path / "talks.jsonl"
    line = json.dumps({"messages": expected[0], "source": "teacher"}) + "\n"
    out.write_text(line + line[:20])
    demo_talks.main("demo", data, out, talks=4, turns=2, max_tokens=12, threads=1)
    found = [json.loads(text)["messages"] for text in out.read_text().splitlines()]
    assert found == expected and any(found)


def test_answers_are_what_each_prompt_alone_gets(data: Path) -> None:
    model = load("demo", threads=1)
    prompts = demo_answers.Prompts(data)
    asked = train_answers.groups(model.template, prompts, seed=0, count=100, size=4)
    assert any(len({len(one.ids) for one in group}) > 1 for group in asked[:6])
    assert len({one for group in asked for one in group}) == 4 * len(asked)
    found = list(demo_answers.records(model, asked[:6], 0, 0, most=12))
    session = model.session(undo_levels=0)
    greedy = 0
    for group, record in zip(asked, found, strict=False):
        assert record["asked"] == [list(one.ids) for one in group]
        for one, said in zip(group, record["said"], strict=True):
            if one.temperature:
                continue
            session.reset()
            alone = session.generate(one.ids, temperature=0, max_tokens=12).finish().tokens
            assert said and said == list(alone)[: len(said)]
            greedy += 1
    assert greedy > 3
    # whatever was there before, a run continues where an earlier one stopped
    assert list(demo_answers.records(model, asked[:6], 1, 0, most=12)) == found[1:]


def test_choices_follow_the_distribution() -> None:
    rng = np.random.default_rng(0)
    logits = np.log(np.array([[0.2, 0.5, 0.3]], np.float32)).repeat(4000, 0)
    assert (train_answers.choose(logits, np.zeros(4000, np.float32), rng) == 1).all()
    for heat, weights in ((1.0, [0.2, 0.5, 0.3]), (0.5, [4 / 38, 25 / 38, 9 / 38])):
        chosen = train_answers.choose(logits, np.full(4000, heat, np.float32), rng)
        shares = np.bincount(chosen, minlength=3) / 4000
        assert np.abs(shares - weights).max() < 0.03


def test_prompts_come_from_talks_headings_and_passages(data: Path, tmp_path: Path) -> None:
    text = "# Kites in wind\nThe red kite flies. It is high. It is far. The end of it is near.\n"
    (tmp_path / "pretrain.train.txt").write_text((text + "<|endoftext|>\n") * 2)
    (tmp_path / "chat.train.jsonl").write_text((data / "chat.train.jsonl").read_text())
    prompts, rng = demo_answers.Prompts(tmp_path), random.Random(0)
    found = {prompts.draw(rng) for _ in range(300)}
    assert any("Kites in wind" in p and p[-1] in ".?" and "#" not in p for p in found)
    assert "It is high." in found or any("It is far." in p for p in found)
    assert found & {
        c[0] for c in demo_talks.user_turns(tmp_path / "chat.train.jsonl")["self_dialogue"]
    }


def test_learning_brings_it_nearer_to_its_teacher_and_the_card_says_so(
    data: Path, taught: Taught, tokenizer: Path, tmp_path: Path
) -> None:
    config = draft_config(len(load_tokenizer(tokenizer)), 32, 1)
    first = training.train(config, data, tmp_path, plan(taught, 1), tokenizer)
    card = training.train(config, data, tmp_path, plan(taught, 60), tokenizer)
    assert card["teacher"]["overlap"] > first["teacher"]["overlap"] + 0.02
    readme = (tmp_path / "checkpoint" / "README.md").read_text()
    assert f"{card['teacher']['same_choice']:.1%} of its likeliest tokens" in readme
    assert f"of {card['teacher']['talks']} talks" in readme and card["teacher"]["ids"] > 58


def test_prompts_for_a_drafter_are_of_every_kind(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_prompts.main(data, count=20)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    asked = [line["messages"][0]["content"] for line in lines]
    assert len(set(asked)) == len(asked) and all(text.strip() for text in asked)
    assert not any("{}" in text for text in asked)
    kinds = {line["source"] for line in lines}
    assert {"passage", "code", "talk", "everyday"} <= kinds and "request" not in kinds
    demo_prompts.main(data, count=20)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    headings = tmp_path / "headings"
    shutil.copytree(data, headings)
    with (headings / "pretrain.train.txt").open("a", encoding="utf-8") as documents:
        documents.write("# Building a robot\n\nIt walks.\n<|endoftext|>\n")
    demo_prompts.main(headings, count=20)
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    asked = [line["messages"][0]["content"] for line in out if line["source"] == "request"]
    assert asked and all("Building a robot" in text for text in asked)
