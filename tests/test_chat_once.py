"""`edge-chat` in scripts: only the answer on standard output, and the exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from edge.apps.chat import main
from edge.apps.chat.output import Stream
from tests import forks
from tests.programs import called
from tests.session_models import bundle, model

HOT = ["--temperature", "5", "--seed", "3"]


def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "edge.apps.chat", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"NO_COLOR": "1"}, **options,  # type: ignore[call-overload]
    )  # fmt: skip


def run(*arguments: str, text: bytes = b"") -> tuple[int, str, str]:
    return forks.run("edge.apps.chat", *arguments, text=text)


def expected(kind: str, prompt: str, **sampling: object) -> str:
    session = model(kind).session(seed=3)
    begin = session.chat if model(kind).template else session.generate
    return begin(prompt, temperature=5.0, **sampling).finish().text + "\n"


def test_the_answer_alone_is_on_standard_output() -> None:
    text = expected("bytes", "hello", max_tokens=20)
    code, out, err = run(str(bundle("bytes")), "-p", "hello", "--max-tokens", "20", *HOT)
    assert (code, out) == (0, text)
    assert err.count("\n") == 1 and "generation 20 at " in err and "reused 0" in err
    # a pipe gives the same, and the final line feed of `echo` is not text; with -p it comes before
    # it
    code, out, _ = run(str(bundle("bytes")), "--max-tokens", "20", *HOT, text=b"hello\n")
    assert (code, out) == (0, text)
    code, out, _ = run(
        str(bundle("bytes")), "-p", "hello", "--max-tokens", "20", *HOT, text=b"other\n"
    )
    assert (code, out) == (0, expected("bytes", "other\n\nhello", max_tokens=20))


def test_options_reach_the_sampler_and_a_base_model_says_that_it_continues() -> None:
    text = expected("base", "the state", max_tokens=9, top_k=5, top_p=0.9, min_p=0.01,
                    repetition_penalty=1.2, stop=("zzz", "qq"))  # fmt: skip
    code, out, err = run(
        str(bundle("base")), "-p", "the state", "--max-tokens", "9", "--top-k", "5", "--top-p",
        "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2", "--stop", "zzz", "--stop", "qq",
        "--threads", "1", "--system", "be kind", *HOT,
    )  # fmt: skip
    assert (code, out) == (0, text)
    assert "no chat template" in err and "--system is not used" in err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["nosuch", "-p", "x"], 1, "edge pull"),
        (["x", "-p", "x", "--temperature", "nan"], 2, "--temperature"),
        (["x", "-p", "x", "--top-k", "-1"], 2, "--top-k"),
        (["x", "-p", "x", "--stop", ""], 2, "--stop"),
        (["x", "-p", "x", "--threads", "0"], 2, "--threads"),
        (["demo", "-p", "x", "--draft", "ngram", "--draft-tokens", "0"], 2, "--draft-tokens"),
        (["demo", "-p", "x", "--draft", "demo-draft", "--draft-tree", "2,0"], 2, "--draft-tree[1]"),
        (["demo", "-p", "x", "--draft", "demo-draft", "--draft-tree", "9,9,9"], 2, "at most 255"),
        (["demo", "-p", "x", "--draft", "ngram", "--draft-tree", "2,1"], 2, "chains"),
        (["x", "-p", "x", "--draft-tree", "2;1"], 2, "--draft-tree"),
        (["x", "-p", "x", "--draft-tree", "2,1", "--draft-tokens", "3"], 2, "--draft-tokens"),
        (["x", "-p", "x", "--draft-tree", "2,1", "--draft-auto"], 2, "--draft-auto"),
        (["x", "-p", "x", "--draft", "ngram", "--accept", "top-0"], 2, "--accept"),
        (["x", "-p", "x", "--draft", "ngram", "--accept", "top-x"], 2, "lossy"),
        (["x", "-p", "x", "--accept", "top-3"], 2, "--draft ngram, or --draft BUNDLE"),
        (["x", "-p", "x", "--draft-tokens", "3"], 2, "--draft ngram, or --draft BUNDLE"),
        (["demo", "-p", "x", "--engine", "tensorrt"], 1, "TensorRT"),
        (["x", "-p", "x", "--engine", "warp"], 2, "warp"),
        (["x", "--top-k", "many"], 2, "--top-k"),
        (["x", "--bogus"], 2, "bogus"),
    ],
)
def test_refusals_are_one_line_with_what_to_do(arguments: list[str], code: int, says: str) -> None:
    got, out, err = called(main, *arguments)
    assert (got, out) == (code, "")
    assert says in err
    assert "Usage:" in err or (err.startswith("error: ") and err.count("\n") == 1)


@pytest.mark.parametrize("text", [b"", b"\n", b"ab\xff", b"word " * 200])
def test_input_that_cannot_be_answered_is_refused(text: bytes) -> None:
    code, out, err = called(main, bundle("hybrid"), text=text)  # 64 positions
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1


def test_an_interrupted_answer_is_what_there_is() -> None:
    process = start(str(bundle("bytes")), "-p", "hello", "--max-tokens", "100000000", *HOT)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n") and b"| stopped ]" in err and b"Traceback" not in err


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    process = start(str(bundle("bytes")), "-p", "hello", "--max-tokens", "100000000", *HOT)
    assert process.stdin is not None
    assert process.stdout is not None and process.stderr is not None
    process.stdin.close()
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=120) == 1
    assert process.stderr.read() == b""


def test_a_terminal_gets_no_control_characters_from_a_model() -> None:
    class Out:
        def __init__(self, terminal: bool) -> None:
            self.terminal, self.text = terminal, ""

        def isatty(self) -> bool:
            return self.terminal

        def write(self, piece: str) -> None:
            self.text += piece

        def flush(self) -> None: ...

        def fileno(self) -> int:
            raise OSError

    for terminal, shown in ((True, "a[2Jb\tc\n"), (False, "a\x1b[2J\x07b\tc\n")):
        out = Out(terminal)
        stream = Stream(out)  # type: ignore[arg-type]
        for piece in ("a\x1b[2J", "\x07", "b\tc"):
            stream.write(piece)
        stream.end()
        assert out.text == shown
