"""`edge eval` as people and scripts use it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from edge.apps.cli import main
from edge.apps.evaluate.score import Comparison
from edge.export.exporter import export_checkpoint
from tests.programs import called, without_torch
from tests.session_models import bundle

PROSE = Path(__file__).parents[1] / "docs/inside/decisions.md"


def run(*arguments: object) -> tuple[int, str, str]:
    return without_torch("eval", *arguments, hidden=["lm_eval", "matplotlib"])


def here(*arguments: object) -> tuple[int, str, str]:
    """Run the same in this process, which has torch."""
    return called(main, "eval", *arguments)


def write(folder: Path, text: str | bytes, name: str = "text.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_figures_for_people_and_for_scripts(tmp_path: Path) -> None:
    text = write(tmp_path, PROSE.read_text("utf-8")[:3000])
    code, out, err = run(bundle("bytes"), text, text, "--json", "--window", "60", "--threads", "1")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert (facts["method"], facts["window"], facts["stride"]) == ("windows", 60, 30)
    size = text.stat().st_size
    assert facts["documents"] == 2 and facts["tokens"] == facts["bytes"] == 2 * (size - 1)
    assert facts["texts"] == [str(text)] * 2 and facts["quantization"] == "fp32"
    assert 0 < facts["bits_per_byte"] < 20
    code, out, err = here(bundle("bytes"), text, "--stream", "--max-tokens", "50")
    assert (code, err) == (0, "")
    assert "perplexity" in out and "49 tokens" in out and "one stream" in out


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("", (), "holds no text"),
        ("\n<|endoftext|>\n", (), "fewer than 2 tokens"),
        ("a", (), "fewer than 2 tokens"),
        (b"fine\n\xff", (), "is not UTF-8 at byte 5"),
        (b"x" * 9000 + b"\xc3", (), "is not UTF-8 at byte 9000"),
        ("text", ("--window", "1"), "--window"),
        ("text", ("--window", "9", "--stride", "10"), "--stride"),
        ("text", ("--stream", "--stride", "10"), "--stream"),
        ("text", ("--against", "nosuch"), "nosuch"),
        ("text", ("--engine", "npu"), "unknown engine 'npu'"),
        ("text", ("--engine", "tensorrt"), "TensorRT"),
    ],
)
def test_refusals_are_one_line(
    tmp_path: Path, text: str | bytes, options: tuple[str, ...], says: str
) -> None:
    code, out, err = here(bundle("bytes"), write(tmp_path, text), *options)
    usage = says.startswith(("--", "unknown engine"))
    assert (code, out) == (2 if usage else 1, "") and says in err
    assert "Usage:" in err or (err.startswith("error: ") and err.count("\n") == 1)


def test_refusals_name_the_line_of_a_record(tmp_path: Path) -> None:
    for line, says in (("{", "is not JSON"), ('{"messages": [{"role": "user"}]}', "has neither")):
        path = write(tmp_path, f'{{"text": "fine"}}\n{line}\n', "a.jsonl")
        code, _, err = here(bundle("bytes"), path)
        assert code == 1 and f"a.jsonl: line 2: {says}" in err
    code, _, err = here(bundle("bytes"), tmp_path / "absent.txt")
    assert code == 1 and "absent.txt: is not a file" in err
    code, _, err = here(bundle("bytes"))
    assert code == 1 and "TEXT" in err
    code, _, err = here(bundle("bytes"), "--tasks", "arc_easy")
    assert code == 1 and "pip install 'mamba-edge[eval]'" in err


def test_divergence_is_that_of_the_definition() -> None:
    generator = np.random.default_rng(1)
    ours, theirs = ((generator.normal(size=(700, 3000)) * 3).astype(np.float32) for _ in "ab")
    theirs[:350] = ours[:350] + theirs[:350] * 0.01
    ids = generator.integers(0, 3000, 700)
    found = Comparison()
    for rows in (slice(0, 450), slice(450, 700)):
        found.add(ids[rows], ours[rows], theirs[rows])
    q, p = (F.log_softmax(torch.from_numpy(x).double(), -1) for x in (ours, theirs))
    kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    at = torch.arange(700), torch.from_numpy(ids)
    gap = p[at] - q[at]
    facts = found.to_dict()
    assert facts["kl_nats_per_token"] == pytest.approx(float(kl.mean()), rel=1e-6)
    assert facts["kl_p99"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-4)
    assert facts["kl_max"] == pytest.approx(float(kl.max()), rel=1e-6)
    agreed = float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert facts["top1_agreement"] == pytest.approx(agreed) and 0.4 < agreed < 0.6
    ratio = float(gap.mean().exp())
    assert facts["perplexity_ratio"] == pytest.approx(ratio, rel=1e-9)
    error = ratio * float(gap.std(correction=0)) / 700**0.5
    assert facts["perplexity_ratio_error"] == pytest.approx(error, rel=1e-6)


def test_two_bundles_read_the_same_tokens(tmp_path: Path) -> None:
    text = write(tmp_path, PROSE.read_text("utf-8")[:1500])
    code, out, err = run(bundle("chat"), text, "--against", bundle("chat"), "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["perplexity_ratio"] == facts["top1_agreement"] == 1.0
    assert facts["kl_max"] == facts["perplexity_ratio_error"] == 0.0
    coarse = tmp_path / "w4"
    # chunks of another length than the other bundle's
    export_checkpoint(bundle("chat").parent / "chat-source", coarse, quant="fp16", chunk=24)
    code, out, _ = here(coarse, text, "--against", bundle("chat"), "--json", "--window", "40")
    facts = json.loads(out)
    alone = json.loads(here(coarse, text, "--json", "--window", "40")[1])
    assert facts["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-5)
    assert facts["bits_per_byte"] == pytest.approx(alone["bits_per_byte"], rel=1e-5)
    ratio = facts["perplexity"] / facts["against"]["perplexity"]
    assert facts["perplexity_ratio"] == pytest.approx(ratio, rel=1e-9)
    assert 0 < facts["kl_nats_per_token"] <= facts["kl_max"] < 1e-3
    code, out, _ = here(coarse, text, "--against", bundle("chat"))
    assert code == 0 and "nats a token" in out and "agree" in out
    code, _, err = here(bundle("chat"), text, "--against", bundle("bytes"))
    assert code == 2 and "--against" in err and "different tokenizer" in err
