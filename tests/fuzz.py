"""Fuzzers for the parsers: `make fuzz MINUTES=60`, or one with `ARGS="--only gguf"`.

Each parser reads, in its own process, mutations of good inputs and of earlier inputs that were
refused for a new reason; the latter are kept in CORPUS/PARSER. It must end in a typed error or a
sound value, within ten seconds of CPU time and a gigabyte of memory. Anything else, including a
crash or a hang, is printed with its seed, and the input is kept as CORPUS/PARSER/found-….
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import random
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge.errors import EdgeError
from tests.fuzz_files import FILES
from tests.fuzz_texts import TEXTS
from tests.mutations import enlarged, mutated

Parse = Callable[[bytes], object]
HANG_S = 10  # of CPU time, for one input
MEMORY = 1 << 30  # beyond what the process has when it has read the good inputs
KEPT = 500  # inputs in the corpus of a parser


def _mutations(name: str, folder: Path) -> tuple[list[bytes], Parse]:
    from tests import test_faults_mutations as mutations

    makers = {
        "manifest": mutations.manifest_bytes,
        "plan": mutations.plan_bytes,
        "json": mutations.json_bytes,
        "wire": mutations.wire_bytes,
        "state": lambda: mutations.state_bytes(folder),
    }
    good, parse = makers[name]()
    return [good], lambda raw: parse(raw, len(raw))


def _graph(folder: Path) -> tuple[list[bytes], Parse]:
    from edge.runtime import folding, graph
    from tests.session_models import bundle

    sizes = {"weights.bin": 1 << 30}
    good = [(bundle(kind) / "graphs/ort.onnx").read_bytes() for kind in ("base", "hybrid")]
    return good, lambda raw: folding.is_bounded(graph.check(raw, sizes, "graph"))


def _tokenizer(folder: Path) -> tuple[list[bytes], Parse]:
    from edge.text.hf import HfTokenizer
    from tests.text_samples import byte_level, spaced_bpe, unigram

    def parse(raw: bytes) -> None:
        made = HfTokenizer(raw)
        made.decode(made.encode("the state of a robot é🤖  <|end|>"))

    return [byte_level(), spaced_bpe(), unigram()], parse


def _sentencepiece(folder: Path) -> tuple[list[bytes], Parse]:
    from edge.text.spm import SentencePieceTokenizer
    from tests.text_samples import spm_model

    def parse(raw: bytes) -> None:
        made = SentencePieceTokenizer(raw)
        made.decode(made.encode("the state of a robot é🤖  <|end|>"))

    return [spm_model("bpe"), spm_model("unigram")], parse


def _use_tokenizer_of(path: Path) -> None:
    """Make and use the tokenizer of a checkpoint, as `edge export` does."""
    from edge.export.checkpoint import open_checkpoint
    from edge.export.text_files import tokenizer_info
    from edge.text.load import make_tokenizer

    checkpoint = open_checkpoint(path)
    info, files = tokenizer_info(checkpoint, checkpoint.config)
    made = make_tokenizer(info, files[0][0].read_bytes(), "tokenizer")
    made.decode(made.encode("the state of a robot é🤖  <|end|>", special=True))


def _files(name: str, folder: Path) -> tuple[list[bytes], Parse]:
    """Return the tokenizer files of a checkpoint that `edge export` reads."""
    from tests import tokenizer_folders
    from tests.checkpoints import write_json
    from tests.test_gguf_text import TEKKEN, original
    from tests.text_samples import spm_model

    path = tokenizer_folders.bare_checkpoint(folder / "checkpoint")
    if name == "vocab":
        tokenizer_folders.add_vocab_merges(
            path, original("gpt-2"), tokenizer_class="GPT2Tokenizer", eos_token="<|end|>"
        )
        vocabulary, merges = (path / "vocab.json", path / "merges.txt")
        good = vocabulary.read_bytes() + merges.read_bytes()
    elif name == "tekken":
        special = ["<unk>", "<s>", "</s>"]
        write_json(
            path / "tekken.json",
            tokenizer_folders.tekken_of(original("tekken"), TEKKEN, special, 12),
        )
        good = (path / "tekken.json").read_bytes()
    else:
        good = spm_model(vocab_size=500)

    def parse(raw: bytes) -> None:
        if name == "vocab":
            cut = raw.rfind(b"#version")
            vocabulary.write_bytes(raw[: max(cut, 0)])
            merges.write_bytes(raw[max(cut, 0) :])
        else:
            (path / ("tekken.json" if name == "tekken" else "tokenizer.model.v3")).write_bytes(raw)
        _use_tokenizer_of(path)

    return [good], parse


def _gguf_text(folder: Path) -> tuple[list[bytes], Parse]:
    from tests.gguf_files import write_gguf
    from tests.transformers_checkpoints import save_llama

    file = folder / "model.gguf"
    whole = write_gguf(save_llama(folder / "llama"), file).read_bytes()

    def parse(raw: bytes) -> None:
        file.write_bytes(raw)
        _use_tokenizer_of(file)

    return [whole], parse


def _constraint(folder: Path) -> tuple[list[bytes], Parse]:
    """Return JSON schemas, regular expressions and Lark grammars."""
    import numpy as np

    from edge.runtime.constrain.mask import GrammarVocabulary
    from edge.runtime.constrain.statement import KINDS, constraint_of
    from tests.session_models import model

    tokenizer = model("bytes").tokenizer
    vocabulary = GrammarVocabulary(tokenizer)
    good = [
        b'json_schema:{"type": "object", "properties": {"to": {"enum": [1, "b"]}, "n": {"type": '
        b'"integer", "minimum": 3, "maximum": 900, "multipleOf": 3}, "s": {"type": "string", '
        b'"pattern": "^[a-c]{2,5}$"}, "l": {"type": "array", "items": {"anyOf": [{"$ref": "#"}, '
        b'{"type": "number"}]}, "minItems": 1, "maxItems": 4}}, "required": ["to"]}',
        rb"regex:([a-c]{1,3}(x|y)*|[^\d\s]+?)\.(?:[0-9]{2}){1,4}",
        b'grammar:start: item ("," item)*\nitem: WORD | "(" start ")" | NUMBER{1,3}\n'
        b"WORD: /[a-z]+/\nNUMBER: /[0-9]+/\n%ignore / +/\n",
    ]

    def parse(raw: bytes) -> None:
        kind, _, source = raw.decode(errors="replace").partition(":")
        constraint = constraint_of({kind if kind in KINDS else "regex": source})
        assert constraint is not None
        mask = vocabulary.mask(constraint, False)
        for _ in range(20):
            if mask.complete:
                break
            mask.say(int(mask.allowed(np.zeros(tokenizer.vocab_size, np.float32)).argmax()))

    return good, parse


def _template(folder: Path) -> tuple[list[bytes], Parse]:
    from edge.text import ChatTemplate, Message
    from tests.session_models import BYTES_CHAT, CHAT, model

    tokenizer = model("bytes").tokenizer
    talk = [Message("user", "why?"), Message("assistant", "so"), Message("user", "ah")]
    more = (
        "{% set ns = namespace(n=0) %}{% for m in messages if m.role != 'tool' %}"
        "{% set ns.n = ns.n + loop.index0 %}{{ (m.content | trim | upper).split(' ')[0:2] | join }}"
        "{% if loop.last and not (ns.n > 3) %}{{ ns.n | string }}{% endif %}{% endfor %}"
        "{% macro f(a, b=[1, {'x': 2}]) %}{{ a ~ b[-1]['x'] }}{% endmacro %}{{ f(bos_token) }}"
    )
    good = [text.encode() for text in (CHAT, BYTES_CHAT, more)]
    return good, lambda raw: ChatTemplate(raw.decode(errors="replace"), tokenizer).encode(talk)


def _safetensors(folder: Path) -> tuple[list[bytes], Parse]:
    from edge.export.checkpoint import open_checkpoint
    from tests.transformers_checkpoints import save_mamba

    file = save_mamba(folder / "checkpoint") / "model.safetensors"

    def parse(raw: bytes) -> None:
        file.write_bytes(raw)
        list(open_checkpoint(file.parent).tensors())

    return [file.read_bytes()], parse


def _gguf(folder: Path) -> tuple[list[bytes], Parse]:
    from edge.export.checkpoint import open_checkpoint
    from tests import transformers_checkpoints
    from tests.gguf_files import write_gguf

    file = folder / "model.gguf"
    good = []
    for name in (
        "llama", "granite_hybrid", "nemotron_h", "lfm2", "falcon_mamba", "qwen3_5", "gemma2",
    ):  # fmt: skip
        source = getattr(transformers_checkpoints, f"save_{name}")(folder / name)
        good.append(write_gguf(source, file).read_bytes())

    def parse(raw: bytes) -> None:
        file.write_bytes(raw)
        list(open_checkpoint(file).tensors())

    return good, parse


def _config(folder: Path) -> tuple[list[bytes], Parse]:
    """Return fields of config.json, including those of experts and adapters."""
    from edge.export.checkpoint import open_checkpoint
    from tests import transformers_checkpoints

    source = transformers_checkpoints.save_zamba2(folder / "zamba2")
    file = source / "config.json"
    good = [file.read_bytes()]
    good.append(
        (transformers_checkpoints.save_olmo_hybrid(folder / "o") / "config.json").read_bytes()
    )
    for name in ("mixtral", "qwen3_moe", "qwen3_next"):
        made = transformers_checkpoints.save_with_experts(folder / name, name)
        good.append((made / "config.json").read_bytes())

    def parse(raw: bytes) -> None:
        file.write_bytes(raw)
        open_checkpoint(source)

    return good, parse


@contextmanager
def _http() -> Iterator[tuple[list[bytes], Parse]]:
    from tests.server_process import KEY, Server

    asked = b'{"messages": [{"role": "user", "content": "hi"}], '
    bodies = {
        "/v1/chat/completions": asked + b'"max_tokens": 2, "stop": ["a"], "n": 2, "tools": '
        b'[{"type": "function", "function": {"name": "go", "parameters": {"type": "object", '
        b'"properties": {"to": {"enum": [1, "b"]}}}}}]}',
        "/v1/completions": b'{"prompt": "a", "max_tokens": 2, "logprobs": 2, "logit_bias": '
        b'{"7": 1}, "structured_outputs": {"regex": "[a-c]{1,3}(x|y)*"}}',
        "/api/chat": asked + b'"options": {"num_predict": 2, "seed": 1}, "format": "json"}',
    }
    good = [
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
        for path, body in bodies.items()
    ]
    with Server(bundle="demo-draft", anew=True) as server:

        def parse(raw: bytes) -> None:
            assert server.process.poll() is None, "the server has ended"
            with server.connect() as connection:
                connection.settimeout(30)
                try:
                    connection.sendall(raw)
                    connection.shutdown(socket.SHUT_WR)
                    answer = connection.recv(1 << 16)
                except OSError as problem:  # the server need not read a refused request to its end
                    if problem.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                        return
                    raise
            status = answer.split(b" ", 2)[1:2]
            told = not answer or status[0][:1] in b"24" or status[0] in (b"501", b"505")
            assert told, answer[:300]
            if status and status[0] != b"200":
                raise EdgeError(answer.partition(b"\r\n\r\n")[2].decode(errors="replace"))

        yield [*good, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"], parse


PARSERS = ("manifest", "plan", "json", "wire", "state", "graph", "tokenizer", "sentencepiece",
           "vocab", "tekken", "v3", "gguf_text", "constraint", "template", "config", "safetensors",
           "gguf", "http", *FILES, *TEXTS)  # fmt: skip


@contextmanager
def opened(name: str) -> Iterator[tuple[list[bytes], Parse]]:
    """Return good inputs of a parser, and the parser."""
    if name == "http":
        with _http() as made:
            yield made
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if name in ("manifest", "plan", "json", "wire", "state"):
            yield _mutations(name, folder)
        elif name in ("vocab", "tekken", "v3"):
            yield _files(name, folder)
        elif name in FILES or name in TEXTS:
            yield {**FILES, **TEXTS}[name](folder)
        else:
            yield globals()[f"_{name}"](folder)


def work(name: str, corpus: Path, seed: int, seconds: float) -> None:
    """Parse for a given time; print a line for each seed and each find."""
    current = corpus / "current"
    with opened(name) as (good, parse):
        inputs = deque([*good, *(file.read_bytes() for file in corpus.glob("seen-*"))], KEPT)
        for raw in good:  # which imports what is needed
            with suppress(EdgeError):  # a config.json of other weights
                parse(raw)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        met: set[str] = set()
        print(f"ready {seed}", flush=True)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            seed += 1
            rng = random.Random(seed)
            raw = mutated(inputs[rng.randrange(len(inputs))], rng)
            if rng.random() < 0.3:
                raw = enlarged(raw, rng)
            if rng.random() < 0.1:  # mutate twice
                other = inputs[rng.randrange(len(inputs))]
                raw = raw[: rng.randrange(len(raw) + 1)] + other[-rng.randrange(1, 99) :]
            current.write_bytes(raw)
            print(f"seed {seed}", flush=True)
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + HANG_S, -1))
            try:
                parse(raw)
            except EdgeError as problem:
                reason = re.sub(r"[0-9]+|'[^']*'|\"[^\"]*\"", "#", str(problem))[:80]
                if reason not in met and len(raw) < 1 << 16:
                    met.add(reason)
                    inputs.append(raw)
                    digest = hashlib.sha256(reason.encode()).hexdigest()[:12]
                    (corpus / f"seen-{digest}").write_bytes(raw)
            except BaseException as problem:
                _keep(corpus, raw)
                print(f"found {name}, seed {seed}: {problem!r:.300}", flush=True)
    print(f"done {seed}", flush=True)


def _keep(corpus: Path, raw: bytes) -> None:
    (corpus / f"found-{hashlib.sha256(raw).hexdigest()[:12]}").write_bytes(raw)


def fuzz(name: str, corpus: Path, seed: int, left: float) -> tuple[int, int]:
    """Return (inputs, finds) of one parser; a process that dies is a find and is replaced."""
    corpus.mkdir(parents=True, exist_ok=True)
    finds, first = 0, seed
    while left > 0:
        command = [sys.executable, "-m", "tests.fuzz", "--worker", name, "--corpus", str(corpus),
                   "--seed", str(seed), "--seconds", str(left)]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            began = time.monotonic()
            for line in worker.stdout:
                if line.startswith("ready"):
                    began = time.monotonic()
                elif line.startswith("found"):
                    finds += 1
                    print(line, end="", flush=True)
                else:
                    seed = int(line.split()[1])
        left -= time.monotonic() - began
        if worker.returncode:
            finds += 1
            _keep(corpus, (corpus / "current").read_bytes())
            print(f"found {name}, seed {seed}: ended with {worker.returncode}", flush=True)
            if seed == first:
                break  # the process does not start
    return seed - first, finds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--only", action="append", choices=PARSERS)
    parser.add_argument("--seed", type=int, default=None, help="the first; else from the clock")
    parser.add_argument("--worker")
    parser.add_argument("--seconds", type=float)
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.corpus, given.seed, given.seconds)
        return 0
    names = given.only or PARSERS
    seed = given.seed if given.seed is not None else int(time.time()) * 1_000_000
    each, found = 60 * given.minutes / len(names), 0
    for name in names:
        count, finds = fuzz(name, given.corpus / name, seed, each)
        found += finds
        print(f"{name:14} {count:9} inputs, {finds} finds", flush=True)
    return min(found, 1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
