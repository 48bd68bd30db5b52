"""`python -m edge.apps.bench.faithful`: how close answers drafted by a subword model stay to a byte
model's own (MambaByte, arXiv 2401.13660, table 6).

Bytes accepted by rank differ from the byte model's own. The paper's log-odds ratio is the
log-likelihood of the byte model's greedy answer divided by that of the other answer, both under the
byte model and of the same length. It is 1 for the greedy answer, and less for an answer that the
byte model finds less likely.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import numpy as np
import typer

from edge.apps.bench.drafts import spread
from edge.apps.evaluate.score import RunReader, nats
from edge.apps.evaluate.windows import TextRun, Windows
from edge.apps.exits import leave
from edge.apps.measure.machine import OtherLoad
from edge.apps.measure.table import FigureTable, show, two
from edge.apps.options import AsJson
from edge.apps.programs import CommandGroup
from edge.apps.prompts import DEFAULT, read_prompts
from edge.errors import InputError
from edge.runtime.model import Model, load
from edge.runtime.session import Session

_WORDS = 16  # tokens to write at a time, until there are enough bytes
PLAIN, ALONE = "the bytes alone", "the words alone"
app = CommandGroup()


@dataclass(frozen=True)
class Written:
    """A continuation, processor seconds including its prompt, and bytes per verify run."""

    data: bytes
    seconds: float
    per_run: float | None = None


@dataclass(frozen=True)
class FaithfulRow:
    """One way to continue all prompts.

    Attributes:
        log_odds, middle, least: mean, median and minimum log-odds ratio over prompts.
        same: share of prompts continued exactly as by the byte model alone.
        speed: bytes per second of processor time, relative to the byte model alone.
        per_run: bytes per verify run, mean over prompts; None without drafts.
    """

    way: str
    log_odds: float
    middle: float
    least: float
    same: float
    speed: float
    per_run: float | None


@app.command()
def bench(
    target: Annotated[str, typer.Option(help="A byte model.")] = "demo-bytes",
    draft: Annotated[str, typer.Option(help="A subword model that drafts.")] = "demo-draft",
    draft_tokens: Annotated[int, typer.Option(min=1, help="Bytes in a draft.")] = 12,
    betas: Annotated[str, typer.Option(help="Highest ranks to accept.")] = "1,2,3,5",
    file: Annotated[Path | None, typer.Option(help="Prompts. [default: a few built in]")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Maximum number of prompts.")] = 20,
    length: Annotated[int, typer.Option("--bytes", min=2, help="Bytes in every answer.")] = 256,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Compare continuations by bytes, by drafts accepted by rank, and by the drafter alone."""
    ranks = [part.strip() for part in betas.split(",")]
    texts = spread(read_prompts(file) if file else DEFAULT, prompts)
    others = OtherLoad()
    bytes_, words = (load(name, threads=threads) for name in (target, draft))
    if bytes_.tokenizer.kind != "bytes":
        raise InputError(f"{target} is not a byte model", field="--target")
    sessions = {PLAIN: bytes_.session()} | {
        f"top-{rank}": bytes_.session(
            draft=words, draft_tokens=draft_tokens, accept=f"top-{rank}"
        )
        for rank in ranks
    } | {ALONE: words.session()}  # fmt: skip
    for session in sessions.values():  # to warm up
        write(session, texts[0], 2)
    written = {
        way: [write(session, text, length) for text in texts] for way, session in sessions.items()
    }
    rows = compare(bytes_, texts, written)
    if as_json:
        facts = others.facts() | {
            "target": target, "draft": draft, "draft_tokens": draft_tokens, "prompts": len(texts),
            "bytes": length, "threads": threads, "rows": [asdict(row) for row in rows],
        }  # fmt: skip
        print(json.dumps(facts, indent=1, allow_nan=False))
        return
    show([
        f"{target} with {draft}: {len(texts)} prompts, {length} bytes each, drafts of "
        f"{draft_tokens}; {others.share():.0%} of the machine in use by others",
        FigureTable(
            ("accepted", "log-odds", "median", "least", "same", "bytes per run", "×"),
            [(row.way, two(row.log_odds), two(row.middle), two(row.least), f"{row.same:.0%}",
              two(row.per_run), two(row.speed)) for row in rows],
        ),
        "log-odds  ln p of the byte model's own answer ÷ ln p of this one, mean over prompts",
        "×  bytes per second of processor time, relative to the bytes alone",
    ])  # fmt: skip


def write(session: Session, prompt: str, length: int) -> Written:
    """Continue the prompt greedily by `length` bytes, with end tokens suppressed."""
    session.reset()
    tokenizer = session.model.tokenizer
    bias = dict.fromkeys(tokenizer.eos, -1e9)
    data, runs, accepted = b"", 0, 0
    next_prompt: str | None = prompt
    began = time.process_time()
    while len(data) < length:
        limit = length - len(data) if tokenizer.kind == "bytes" else _WORDS
        answer = session.generate(
            next_prompt, temperature=0, max_tokens=limit, logit_bias=bias, stop=()
        ).finish()
        data += b"".join(map(tokenizer.token_bytes, answer.tokens))
        if answer.speculation:
            runs += answer.speculation.rounds
            accepted += answer.speculation.accepted
        next_prompt = None
    seconds = time.process_time() - began
    return Written(data[:length], seconds, 1 + accepted / runs if runs else None)


def compare(
    model: Model, prompts: Sequence[str], written: Mapping[str, Sequence[Written]]
) -> list[FaithfulRow]:
    """Compare every way with `PLAIN`, under the byte model, which wrote `PLAIN`."""
    plain = written[PLAIN]
    plain_nats = [
        information(model, text, answer.data) for text, answer in zip(prompts, plain, strict=True)
    ]
    rows = []
    for way, answers in written.items():
        ratios = [
            own_nats / information(model, text, answer.data)
            for text, own_nats, answer in zip(prompts, plain_nats, answers, strict=True)
        ]
        runs = [answer.per_run for answer in answers if answer.per_run is not None]
        rows.append(FaithfulRow(
            way, fmean(ratios), median(ratios), min(ratios),
            fmean(answer.data == first.data for answer, first in zip(answers, plain, strict=True)),
            sum(answer.seconds for answer in plain) / sum(answer.seconds for answer in answers),
            fmean(runs) if runs else None,
        ))  # fmt: skip
    return rows


def information(model: Model, prompt: str, answer: bytes) -> float:
    """Return -ln p of the answer after the prompt, in nats, under a byte model."""
    tokenizer = model.tokenizer
    prefix = [*([tokenizer.bos] if tokenizer.add_bos else []), *tokenizer.encode(prompt)]
    ids = np.array([*prefix, *answer], np.int64)
    wanted = np.arange(len(ids)) >= len(prefix)
    run = TextRun(ids, wanted, fresh=True, carried=False, first=True, bytes=0, words=0)
    reader = RunReader(model.engine, Windows(len(ids), len(ids)))
    return sum(float(nats(logits, targets).sum()) for targets, logits in reader.read(run))


if __name__ == "__main__":
    leave(app)
