"""`edge info` plans memory for this machine or another, and says what to lower."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.apps import cli, info
from edge.apps.exits import exit_code_of
from edge.apps.info import boards
from edge.apps.info import memory as info_memory
from edge.apps.info.memory import PlanSizes
from edge.bundle import Manifest, open_bundle
from edge.config import ExpertsConfig
from edge.errors import InputError
from edge.runtime import memory
from edge.runtime.cpu import planning
from edge.tensors import parameters, read_bytes, read_parameters
from tests.facts import says
from tests.session_models import bundle
from tests.test_graph_models import network

GIB = 1 << 30
SIZES = PlanSizes(context=2048, batch=3, snapshots=40)


def manifest(kind: str) -> Manifest:
    with open_bundle(bundle(kind)) as opened:
        return opened.manifest


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["edge", "info", *map(str, arguments)])
        code = exit_code_of(cli.app)
        return code, *capsys.readouterr()

    return run


def place(available: int | None) -> boards.MemoryBudget:
    return boards.MemoryBudget("there", available, "as given")


def test_the_plan_and_the_keys_that_scripts_read(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: GIB)
    sizes = ("--context", 60, "--batch", 3, "--snapshots", 5)
    code, out, _ = run(bundle("hybrid"), "--json", *sizes)
    facts = json.loads(out)
    assert code == 0
    assert facts.keys() >= {
        "layers", "parameters", "weight_bytes", "state_bytes", "quantization", "files",
    }  # fmt: skip
    assert facts["active_parameters"] == facts["parameters"]  # there are no experts
    found, plan = facts["memory"], facts["memory"]["plan"]
    assert (found["context"], found["batch"], found["snapshots"]) == (60, 3, 5)
    assert (found["available_bytes"], found["fits"], found["lower"]) == (GIB, True, [])
    assert plan["state"] == 3 * facts["state_bytes"]  # those of one sequence
    assert plan["kv_cache"] == 3 * facts["kv_cache_bytes"] > 0
    assert plan["snapshots"] == 5 * (plan["state"] + plan["kv_cache"])
    by_engine = {"ort": memory.PROGRAM, "cpu": planning.PROGRAM}
    assert plan["program"] > by_engine[found["engine"]]
    parts = ("weights", "state_ring", "kv_cache", "logits", "workspace", "program", "snapshots")
    assert plan["total"] == max(sum(plan[part] for part in parts), plan["loading"])
    code, out, _ = run(bundle("hybrid"), *sizes)
    assert code == 0
    for line in ("memory on this machine", "60 tokens, batch 3", "total", "fits in 1.07 GB"):
        assert line in out


def test_a_token_reads_the_experts_that_it_chooses() -> None:
    config = network("experts").config
    softmax, _, latent = config.layers
    assert isinstance(softmax, ExpertsConfig) and isinstance(latent, ExpertsConfig)
    idle = 4 * (3 * 32 * 64) + 5 * (2 * 24 * 32)
    assert read_parameters(config) == parameters(config) - idle
    assert read_bytes(config, 2 * parameters(config)) == 2 * read_parameters(config)
    # two tokens choose partly different experts; many choose all
    assert read_parameters(config) < read_parameters(config, 2) < 2 * read_parameters(config)
    assert read_parameters(config, 1000) == parameters(config)


def test_the_context_is_one_that_the_model_was_trained_for(run: Any) -> None:
    facts = json.loads(run(bundle("hybrid"), "--json")[1])
    trained = facts["max_context"]
    assert facts["context"] == facts["memory"]["context"] == trained < 2048
    assert f"tokens, float32; trained for {trained}\n" in run(bundle("hybrid"))[1]
    config = Path(__file__).parent / "published" / "smollm2-135m-instruct.json"
    for model, most in ((bundle("hybrid"), trained), (config, 8192)):
        code, out, said = run(model, "--context", most + 1)
        assert (code, out) == (2, "") and says(said, "--context: ", f"1 to {most:,}", most + 1)


def test_constant_memory_has_no_context(run: Any) -> None:
    plans = [
        json.loads(run(bundle("chat"), "--json", "--context", tokens)[1])["memory"]["plan"]
        for tokens in (1, 1 << 20)
    ]
    assert plans[0] == plans[1]
    assert plans[0]["kv_cache"] == 0
    assert "kv cache" not in run(bundle("chat"))[1]


def test_a_board_that_it_does_not_fit_is_exit_code_1(run: Any) -> None:
    _, out, _ = run(bundle("hybrid"), "--memory", "1GB", "--json")
    total = json.loads(out)["memory"]["plan"]["total"]
    code, out, _ = run(bundle("hybrid"), "--memory", f"{total}B")
    assert (code, "lower:" in out) == (0, False)
    code, out, _ = run(bundle("hybrid"), "--memory", f"{total - 1}")
    assert code == 1
    assert "does not fit in" in out and "lower: --context" in out and "lower: --snapshots" in out
    code, out, _ = run(bundle("hybrid"), "--memory", f"{total - 1}", "--json")
    assert code == 1
    assert json.loads(out)["memory"]["fits"] is False
    assert run(bundle("hybrid"), "--board", "Orin-Nano-8GB")[0] == 0


def test_this_machine_too_small_is_only_said(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    code, out, _ = run(bundle("base"))
    assert code == 0
    assert "does not fit in 1 kB" in out and "use a smaller model" in out
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    code, out, _ = run(bundle("base"))
    assert code == 0
    assert says(out, "not say", "free")


def test_each_advice_followed_makes_it_fit() -> None:
    hybrid = manifest("hybrid")
    available = SIZES.plan(hybrid)["total"] - 100_000
    advice = info_memory.lower(hybrid, SIZES, available)
    options = dict(line.split(" ", 1) for line in advice)
    assert options.keys() >= {"--context", "--snapshots", "--batch"}
    for option in ("context", "snapshots", "batch"):
        value = int(options[f"--{option}"])
        less = replace(SIZES, **{option: value})
        more = replace(SIZES, **{option: value + 1})
        assert less.plan(hybrid)["total"] <= available < more.plan(hybrid)["total"]
    found = info_memory.facts(hybrid, SIZES, place(available))
    assert (found["fits"], found["lower"]) == (False, advice)


def test_fewer_bits_are_advised_where_they_are_enough() -> None:
    chat = manifest("chat")  # in fp32, and enlarged so that its weights dominate
    wide = chat.model.model_copy(update={"vocab_size": 4_000_000})
    large = chat.model_copy(update={"model": wide})
    sizes = PlanSizes(1, 1, 0)
    totals = {
        recipe: sizes.plan(info_memory.rounded(large, recipe))["total"] for recipe in ("w8", "w4")
    }
    assert totals["w4"] < totals["w8"] < sizes.plan(large)["total"]
    advice = info_memory.lower(large, sizes, totals["w8"])
    assert [line.split(" when")[0] for line in advice] == ["--quant w8", "--quant w4"]
    advice = info_memory.lower(large, sizes, totals["w4"])
    assert [line.split(" when")[0] for line in advice] == ["--quant w4"]
    (only,) = info_memory.lower(large, sizes, totals["w4"] - 1)
    assert "use a smaller model" in only


def test_what_only_several_make_fit() -> None:
    hybrid = manifest("hybrid")
    least = PlanSizes(1, 1, 0).plan(info_memory.rounded(hybrid, "w4"))["total"]
    (only,) = info_memory.lower(hybrid, SIZES, least)
    assert only.startswith("several at once") and only.endswith("which fits")


@pytest.mark.parametrize("name", boards.BOARDS)
def test_a_board_leaves_less_than_it_has(name: str) -> None:
    size = int(name.rpartition("-")[2].removesuffix("gb")) * GIB
    found = boards.board(name)
    assert found.available is not None
    assert size / 2 < found.available < size
    assert "assumed" in found.basis


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("512MiB", 512 << 20),
        ("3.5g", 3_500_000_000),
        ("7000000", 7 * 10**6),
        ("2000 ki", 2_048_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert boards.sized(text).available == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "4TB", "1e9", "0", "4", "0.1", "9" * 400, "nan"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError) as caught:
        boards.sized(text)
    assert caught.value.field == "--memory"
    assert "4GB" in str(caught.value.remedy)


def test_what_is_refused(run: Any) -> None:
    code, out, err = run(bundle("chat"), "--board", "toaster")
    assert (code, out) == (2, "")
    assert "toaster" in err and "orin-nano-8gb" in err
    code, _, err = run(bundle("chat"), "--board", "l4-24gb", "--memory", "4GB")
    assert code == 2
    assert "--memory" in err and "--board" in err
    assert run(bundle("chat"), "--batch", "0")[0] == 2


def test_accuracy_is_told_in_a_line_of_words() -> None:
    figures = {"kl_nats_per_token": 0.0044, "perplexity_before": 24.8, "perplexity": 25.0,
               "tokens": 1024, "engine": {"flips": 1e-6}}  # fmt: skip
    told = info.accuracy_line(figures)
    assert says(told, "KL", "0.0044", "before 24.8", "after 25.0", "1024") and "engine" not in told
    assert info.accuracy_line({"skipped": "too large"}) == "not measured: too large"
    assert info.accuracy_line({}) == "not recorded"
