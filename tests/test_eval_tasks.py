"""The runtime inside lm-evaluation-harness: numbers, boundaries, truncation, tasks on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edge.errors import InputError
from edge.export.graph.run import GraphRunner, open_reference
from edge.runtime.model import Model
from tests.session_models import bundle, model
from tests.test_eval_command import run

lm_eval = pytest.importorskip(
    "lm_eval",
    reason="lm-eval is not installed: it pulls 650 MB (pyarrow, scipy, pandas) and 50 s; "
    "pip install 'mamba-edge[eval]' runs these tests",
)
from edge.apps.evaluate.harness import EdgeLM  # noqa: E402


def asked(*requests: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=request) for request in requests]


def plain(of: Model, fed: list[int], wanted: list[int]) -> tuple[float, bool]:
    """Predict the last ids of `fed` named by `wanted`, by the reference ops in torch."""
    runner = GraphRunner(open_reference(of.path), of.config)
    ids = [*fed, *wanted]
    logits, _ = runner.run(np.array([ids[:-1]]), runner.initial(1, len(ids)))
    rows = torch.from_numpy(logits[0])[-len(wanted) :].double()
    log_p = -F.cross_entropy(rows, torch.tensor(wanted), reduction="sum")
    # padding rows take part in the softmax, and are never chosen
    return float(log_p), rows[:, : of.tokenizer.vocab_size].argmax(-1).tolist() == wanted


PAIRS = [
    ("the state of the model", " is the whole of the past"),
    ("the state of the model", " is"),
    ("the state of the model ", "is"),  # the space belongs to the continuation
    ("a robot walks", " and then it stops: 12 steps"),
    ("the state of the model", "s"),
    ("", "the past"),
    ("Größe, naïve", " café 東京"),
]


@pytest.mark.parametrize("kind", ["chat", "bytes", "base"])
def test_likelihoods_are_those_of_a_plain_computation(kind: str) -> None:
    of = model(kind)
    lm = EdgeLM(of)
    found = lm.loglikelihood(asked(*PAIRS), disable_tqdm=True)
    for (context, continuation), (log_p, greedy) in zip(PAIRS, found, strict=True):
        whole = of.tokenizer.encode(context + continuation)
        fed = of.tokenizer.encode(context.rstrip()) if context else [lm.prefix_token_id]
        wanted = whole[len(fed) :] if context else whole
        expected, best = plain(of, fed, wanted)
        assert log_p == pytest.approx(expected, rel=1e-4)
        assert greedy == best


@pytest.mark.parametrize("kind", ["chat", "hybrid"])
def test_greedy_is_what_greedy_choice_says(kind: str) -> None:
    of = model(kind)
    lm = EdgeLM(of)
    prompt = of.tokenizer.encode("the state of")
    answer = of.session().generate(prompt, temperature=0.0, max_tokens=20).finish().tokens
    requests = [(None, prompt, list(answer[:n])) for n in (1, 5, 20)]
    assert [g for _, g in lm._loglikelihood_tokens(requests, disable_tqdm=True)] == [True] * 3
    for at in (0, 7, 19):
        changed = list(answer)
        changed[at] = (changed[at] + 1) % 300
        ((_, greedy),) = lm._loglikelihood_tokens([(None, prompt, changed)], disable_tqdm=True)
        assert not greedy


def test_a_context_is_read_once_for_all_its_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    of = model("chat")
    lm = EdgeLM(of)
    fed = 0
    real = of.engine.run

    def counting(tokens: Any, *rest: Any, **options: Any) -> Any:
        nonlocal fed
        fed += tokens.shape[1]
        return real(tokens, *rest, **options)

    monkeypatch.setattr(of.engine, "run", counting)
    context = list(range(20, 60))
    choices = [[7], [8, 9], [10, 11, 12]]
    other = [(None, context[1:], [5, 6])]
    requests = [(None, context, choice) for choice in choices]
    # continuations of one context need not be adjacent
    found = lm._loglikelihood_tokens([*requests[:2], *other, requests[2]], disable_tqdm=True)
    assert fed == 40 + (0 + 1 + 2) + 39 + 1
    again = [lm._loglikelihood_tokens([r], disable_tqdm=True)[0] for r in requests]
    assert [found[0], found[1], found[3]] == again


def test_context_is_cut_from_the_left_as_the_harness_does() -> None:
    """HFLM: input = (context + continuation)[-(max_length + 1):][:-1]."""
    of = model("hybrid")  # 64 positions
    generator = np.random.default_rng(5)
    context, continuation = (generator.integers(7, 300, n).tolist() for n in (100, 9))
    for length in (64, 30, 9):
        lm = EdgeLM(of, max_length=length)
        ((log_p, _),) = lm._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
        seen = (context + continuation)[-(length + 1) :]
        expected, _ = plain(of, seen[: len(seen) - 9], continuation)
        assert log_p == pytest.approx(expected, rel=1e-4)
    with pytest.raises(InputError, match="does not fit"):
        EdgeLM(of, max_length=8)._loglikelihood_tokens([(None, context, continuation)])
    with pytest.raises(InputError, match="64 positions"):
        EdgeLM(of, max_length=65)
    assert EdgeLM(of).max_length == 64 and EdgeLM(model("chat")).max_length == 2048


def test_rolling_predicts_every_token_once() -> None:
    of = model("hybrid")
    text = "the state of the model is the whole of the past; " * 4
    ids = of.tokenizer.encode(text)
    length = 16
    (found,) = EdgeLM(of, max_length=length).loglikelihood_rolling(asked((text,)), True)
    prefixed = [of.tokenizer.bos or 0, *ids]
    expected, at = 0.0, 0
    while at < len(ids):
        count = min(length, len(ids) - at)
        end = at + count
        # every window is as full as possible; its last `count` ids are predicted
        begin = max(0, end - length)
        expected += plain(of, prefixed[begin : at + 1], ids[at:end])[0]
        at = end
    assert found == pytest.approx(expected, rel=1e-4)


def test_answers_end_where_the_task_says() -> None:
    of = model("bytes")
    lm = EdgeLM(of)
    whole = of.session().generate("hello", temperature=0.0, max_tokens=40).finish().text
    stop = whole[9:11]
    given = [("hello", {"until": [stop, ""], "max_gen_toks": 40}), ("hello", {"max_gen_toks": 7})]
    assert lm.generate_until(asked(*given), True) == [whole[: whole.index(stop)], whole[:7]]
    sampled = ("hello", {"do_sample": True, "temperature": 2.0, "max_gen_toks": 30})
    one, two = lm.generate_until(asked(sampled, sampled), True)
    assert one == two != whole[:30]
    short = EdgeLM(of, max_length=20)
    cut = of.session().generate("o" * 13, temperature=0.0, max_tokens=7).finish().text
    assert short.generate_until(asked(("hello" + "o" * 50, {"max_gen_toks": 7})), True) == [cut]
    with pytest.raises(InputError, match="no room"):
        short.generate_until(asked(("hello", {"max_gen_toks": 20})), True)


def test_conversations_use_the_template_and_typed_text_stays_text() -> None:
    of = model("chat")
    lm = EdgeLM(of)
    assert 6 not in lm.tok_encode("typed <|end|>")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well,"}]
    assert lm.apply_chat_template(turns[:1]) == "<|user|>hi<|end|><|assistant|>"
    open_end = lm.apply_chat_template(turns, add_generation_prompt=False)
    assert open_end == "<|user|>hi<|end|><|assistant|>well,"
    assert lm.tok_encode(open_end)[:1] == of.tokenizer.encode("<|user|>", special=True)
    with pytest.raises(InputError, match="no chat template"):
        EdgeLM(model("base")).apply_chat_template(turns)


def task_files(folder: Path) -> Path:
    rows = [
        {"question": "the state of the", "choices": ["model", "robot"], "answer": 0},
        {"question": "a robot walks and then it", "choices": ["stops", "is"], "answer": 0},
        {"question": "Größe, naïve", "choices": ["東京", "café", "café café"], "answer": 1},
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
    )
    (folder / "tiny_choice.yaml").write_text(
        f"task: tiny_choice\n{head}output_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    (folder / "tiny_perplexity.yaml").write_text(
        f"task: tiny_perplexity\n{head}output_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{question}}"\n'
        "metric_list:\n  - metric: bits_per_byte\n  - metric: word_perplexity\n"
    )
    return folder


def test_tasks_on_disk_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = task_files(tmp_path)
    command = [sys.executable, "-m", "edge.apps.cli", "eval", str(bundle("bytes")), "--task-path",
               str(folder), "--tasks"]  # fmt: skip
    done = subprocess.run(
        [*command, "tiny_choice,tiny_perplexity", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)["tasks"]
    lm = EdgeLM(model("bytes"))
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    right = 0
    for row in rows:
        pairs = [(row["question"], " " + choice) for choice in row["choices"]]
        scores = [log_p for log_p, _ in lm.loglikelihood(asked(*pairs), True)]
        right += scores.index(max(scores)) == row["answer"]
    assert facts["tiny_choice"]["acc,none"] == pytest.approx(right / 3)
    total = sum(lm.loglikelihood_rolling(asked(*[(r["question"],) for r in rows]), True))
    size = sum(len(row["question"].encode()) for row in rows)
    bits = facts["tiny_perplexity"]["bits_per_byte,none"]
    assert bits == pytest.approx(-total / np.log(2) / size, rel=1e-5)
    done = subprocess.run([*command, "tiny_choice", "--limit", "2"], capture_output=True, text=True)
    assert done.returncode == 0 and "acc" in done.stdout and "first 2" in done.stdout
    done = subprocess.run([*command, "nosuch"], capture_output=True, text=True)
    assert done.returncode == 1 and "unknown task 'nosuch'" in done.stderr


def test_the_harness_finds_the_model_by_name() -> None:
    from lm_eval.api.registry import get_model

    found = get_model("edge")
    assert found is EdgeLM
    made = found.create_from_arg_string(f"bundle={bundle('bytes')}", {"batch_size": 1})
    assert made.model.tokenizer.kind == "bytes"


def test_tasks_bring_their_own_text(tmp_path: Path) -> None:
    code, _, err = run(bundle("bytes"), tmp_path, "--tasks", "tiny_choice")
    assert code == 2 and "--tasks: brings its own text" in err
