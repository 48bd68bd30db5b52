"""Small usability problems, each as it was found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from typer.testing import CliRunner

import edge
from edge.apps import exits
from edge.apps.chat import app as chat_app
from edge.apps.chat import files, output
from edge.apps.chat.commands import COMMANDS, Chat
from edge.apps.chat.conversation import DEMONSTRATION
from edge.apps.cli import COMMANDS as PROGRAMS
from edge.apps.cli import app, main
from edge.apps.doctor import tensorrt
from edge.apps.profile.run import ProfileRequest, Subject
from edge.cpu import usable_cores
from edge.errors import EngineError, InputError, StateError
from edge.runtime.parameters import SamplingParams
from edge.runtime.result import GenerationResult, Timings
from tests import forks
from tests.facts import says
from tests.programs import called
from tests.session_models import bundle, model
from tests.terminal import SHORT, Terminal


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "mamba-edge" / "talks"


@pytest.fixture
def chat(home: Path) -> Chat:
    this = Chat(model("chat").session(), "chat", {"max_tokens": 3, "seed": 1})
    this.session.chat("hello", **this.sampling).finish()
    return this


def do(this: Chat, line: str) -> str:
    word, _, argument = line.partition(" ")
    said = COMMANDS[word].run(this, argument)
    return said if isinstance(said, str) else said.finish().text


# -- answers ---------------------------------------------------------------------------------------


def test_a_stopped_prefill_says_what_was_read() -> None:
    session = model("chat").session()

    def progress(_: str, done: int, of: int) -> None:
        if done == 48:  # three chunks of 16 have been read
            session.cancel()

    result = session.generate([9] * 400, max_tokens=3, on_progress=progress).finish()
    assert result.finish_reason == "cancelled" and result.prompt_tokens == 48
    assert session.tokens == ()


def test_regenerating_after_undo_restore_and_load(tmp_path: Path) -> None:
    session = model("chat").session()
    options = {"max_tokens": 5, "seed": 4}
    first = session.chat("one", **options).finish()
    kept = session.snapshot()
    session.save(tmp_path / "one.edge")
    for back in (
        session.undo,
        lambda: session.restore(kept),
        lambda: session.load(tmp_path / "one.edge"),
    ):
        session.chat("two", **options).finish()
        back()
        again = session.regenerate(**options).finish()
        assert again.tokens == first.tokens
        assert [message.role for message in session.messages] == ["user", "assistant"]
        session.restore(kept)
    with pytest.raises(StateError, match="no answer to regenerate"):
        model("chat").session().regenerate()


def test_another_models_conversation_names_the_models(tmp_path: Path) -> None:
    session = model("bytes").session()
    session.chat("hello", max_tokens=2).finish()
    session.save(tmp_path / "talk.edge")
    with pytest.raises(StateError) as caught:
        model("chat").session().load(tmp_path / "talk.edge")
    said = str(caught.value)
    assert "saved with bytes" in said
    assert "another model: " in said and model("bytes").fingerprint not in said
    assert len(said) < 400


def test_ranges_are_written_as_people_write_them() -> None:
    with pytest.raises(InputError, match="from 1 to 2,147,483,648, not 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InputError, match=r"above 0 to 1, not 0$"):
        SamplingParams(top_p=0.0)
    with pytest.raises(InputError, match=r"from 0 to 1,000, not 3,000,000$"):
        SamplingParams(logprobs=3_000_000)
    with pytest.raises(InputError, match=r"^window: .* 1 to 256, not 0$"):
        model("chat").session(window=0)


# -- commands --------------------------------------------------------------------------------------


def test_names_with_spaces_are_saved_listed_and_removed(chat: Chat, home: Path) -> None:
    assert str(home / "my talk.edge") in do(chat, "/save my talk")
    do(chat, "/save my talk")  # the previous save stays beside it
    assert "my talk" in do(chat, "/list") and (home / "my talk.edge~").exists()
    assert do(chat, "/load my talk").startswith("resumed")
    assert do(chat, "/rm my talk") == "removed my talk"
    assert list(home.iterdir()) == [] and do(chat, "/list").startswith("no forks")
    with pytest.raises(InputError, match="'my talk'"):
        do(chat, "/rm my talk")


def test_forks_and_saved_conversations_do_not_hide_each_other(chat: Chat) -> None:
    do(chat, "/save t1")
    with pytest.raises(InputError, match="t1 is a saved conversation"):
        do(chat, "/fork t1")
    do(chat, "/fork t2")
    with pytest.raises(InputError, match="t2 is a fork"):
        do(chat, "/save t2")
    do(chat, "/save fork1")
    assert do(chat, "/fork").startswith("forked as fork2;")
    assert do(chat, "/rm t2") == "removed the fork t2"
    assert "t2" not in do(chat, "/list")


def test_system_alone_shows_it(chat: Chat) -> None:
    assert do(chat, "/system").startswith("no system message; /system TEXT")
    assert len(chat.session.messages) == 2
    do(chat, "/system be kind")
    assert do(chat, "/system") == "be kind"
    assert do(chat, '/system ""').startswith("removed")


def test_conversations_that_were_cut_off_do_not_pile_up(home: Path) -> None:
    home.mkdir(parents=True)
    for day in range(10, 20):
        (home / f"hangup-202601{day}-000000.edge").write_bytes(b"")
    (home / "other.edge").write_bytes(b"")
    (home / ".hangup-20260101-000000.edge.saving-0123456789abcdef").write_bytes(b"killed there")
    newest = files.hung_up()
    assert not list(home.glob(".*"))
    kept = sorted(path.name for path in home.glob("hangup-*"))
    assert kept == [f"hangup-202601{day}-000000.edge" for day in (17, 18, 19)]
    assert newest.name > kept[-1] and (home / "other.edge").exists()


def test_a_path_is_no_command_and_the_demonstration_says_what_it_is(tmp_path: Path) -> None:
    terminal = Terminal("demo", *SHORT, XDG_DATA_HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path))
    for line in DEMONSTRATION:
        assert len(line) <= 80
        terminal.wait_for(line)
    terminal.ask("/etc/hosts is a file", "[ prompt")
    line = "[ prompt" + terminal.wait_for("]") + "]"
    assert len(line) <= 80 and "\n" not in line
    terminal.ask("/clear", "cleared")
    terminal.bye()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_figures_fit_the_terminal(width: int) -> None:
    result = GenerationResult(
        "", (1,) * 1280, "length", 12_345, 999_999, Timings(1.0, (1.0, 1.5), 2.0)
    )
    session = model("chat").session()
    line = output.figures(result, session, width=width)
    assert len(line) <= max(width, 56) and "generation 1280" in line and "cut at" in line
    assert "reused 999999" in output.figures(result, session)


# -- programs --------------------------------------------------------------------------------------


def test_one_answer_as_json() -> None:
    given = ("--json", "--max-tokens", "4", "--seed", "1")
    done = subprocess.run(
        [sys.executable, "-m", "edge.apps.chat", str(bundle("chat")), *given],
        input=b"hello", capture_output=True, timeout=120,
    )  # fmt: skip
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == b""
    assert facts["generated_tokens"] == 4 and facts["finish_reason"] == "length"
    assert facts["prompt_tokens"] > 0 and facts["ttft_ms"] > 0 and facts["state_bytes"] > 0


def test_without_a_terminal_and_without_text_it_says_how_to_use_it() -> None:
    with open(os.devnull) as nothing:
        code, _, said = forks.run("edge.apps.chat", str(bundle("chat")), stdin=nothing.fileno())
    assert code == 1
    assert says(said, "give some text", "-p", "a pipe", "in a terminal")


def test_a_pipe_that_stays_open_is_not_waited_for() -> None:
    read, write = os.pipe()
    given = (str(bundle("chat")), "-p", "hello", "--max-tokens", "2")
    try:
        code, _, said = forks.run("edge.apps.chat", *given, stdin=read)
    finally:
        os.close(read)
        os.close(write)
    assert code == 0 and says(said, "nothing came", " 3 s")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("edge.apps.chat", ["chat", "-p", "x", "--max-tokens", "2"]),
        ("edge.apps.cli", ["info", "chat"]),
    ],
    ids=["edge-chat", "edge"],
)
def test_a_full_disk_is_one_line(module: str, arguments: list[str]) -> None:
    given = [str(bundle("chat")) if each == "chat" else each for each in arguments]
    with open("/dev/full", "wb") as full, open(os.devnull) as nothing, TemporaryFile() as err:
        files = nothing.fileno(), full.fileno(), err.fileno()
        assert forks.Fork(module, *given, files=files).wait(120) == 1
        said = forks.content(err)
    assert "Traceback" not in said and "Exception" not in said
    assert "No space left on device" in said


def test_help_and_version() -> None:
    runner = CliRunner()
    for flag in ("-h", "--help"):
        said = runner.invoke(chat_app, [flag]).output
        groups = [
            "Arguments:",
            "Options:",
            "Running the model:",
            "Sampling (defaults",
            "Constrained answers",
        ]
        places = [said.index(group) for group in groups]
        assert places == sorted(places) and max(map(len, said.splitlines())) <= 80
        said = runner.invoke(app, [flag]).output
        assert "Usage" in said and not [
            line for line in said.splitlines()[1:] if line.endswith("...")
        ]
    assert runner.invoke(chat_app, ["--version"]).output.strip() == edge.__version__
    for bare in (["list"], ["train", "draft"]):  # without arguments of their own
        assert "Options:" in runner.invoke(app, [*bare, "-h"]).output
    for program in PROGRAMS:  # ranges and types as people write them
        said = " ".join(runner.invoke(app, [program, "-h"]).output.split())
        assert "x<" not in said and "x>" not in said and "[str]" not in said, said
    said = " ".join(runner.invoke(app, ["profile", "-h"]).output.split())
    assert "[default: 5; 1 to 10,000]" in said and "small models] [1 to 1,024]" in said
    said = " ".join(runner.invoke(app, ["serve", "-h"]).output.split())
    assert "[default: 600; 0.1 to 1,000,000]" in said and "[default: 16; at least 0]" in said
    said = " ".join(runner.invoke(app, ["export", "-h"]).output.split())
    assert "[default: fp16]" in said and "--quant" in said
    assert "chat" in PROGRAMS


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "-p", "x", "--temperature", "-1"],
        ["chat", "-p", "x", "--choices", "a,"],
        *([name, *given, "--engine", "foo"] for name, given in
          {"chat": [], "profile": ["demo"], "eval": ["demo", "x"], "serve": ["demo"],
           "doctor": []}.items()),
        *([name, *given, *wrong] for name, given in
          {"chat": [], "profile": ["demo"], "eval": ["demo", "x"], "serve": ["demo"]}.items()
          for wrong in (["--provider", "x"], ["--engine", "cpu", "--provider", "cuda"])),
        *(["build", "demo", f"--{size}", "0"] for size in ("window", "batch", "chunk", "capacity")),
        ["serve", "demo", "--context", "999999999"],
    ],
)  # fmt: skip
def test_mistakes_in_usage_exit_with_two(arguments: list[str]) -> None:
    runner = CliRunner()

    def program() -> None:
        result = runner.invoke(app, arguments)
        raise result.exception or SystemExit(result.exit_code)

    assert exits.exit_code_of(program) == 2


def test_a_state_that_the_recipe_cannot_keep_is_a_mistake_in_usage(tmp_path: Path) -> None:
    asked = ["export", "demo-fp16", "-o", str(tmp_path / "out"), "--quant", "w8"]
    said = CliRunner().invoke(app, [*asked, "--ssm-state", "int8"]).exception
    assert isinstance(said, InputError) and said.field == "--ssm-state"
    assert "layers.0 cannot keep its state in int8" in str(said)
    assert exits.exit_code_of(lambda: _raise(said)) == 2 and not list(tmp_path.iterdir())


def _raise(problem: BaseException) -> None:
    raise problem


def test_serve_looks_for_the_model_before_it_says_where_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = CliRunner().invoke(app, ["serve", "nope"])
    assert result.exception is not None and "nope" in str(result.exception)
    assert "API key" not in result.output + capsys.readouterr().err


def test_a_misspelt_conversation_is_asked_about(chat: Chat) -> None:
    do(chat, "/save robot")
    do(chat, "/fork before")
    for line, meant in (("/load robto", "robot"), ("/rm robt", "robot"), ("/load befor", "before")):
        with pytest.raises(InputError, match="no conversation is called") as caught:
            do(chat, line)
        assert f"do you mean {meant}? /list names them" in str(caught.value)


def test_what_excludes_an_option_is_named_as_one() -> None:
    asked = ["run", "demo", "-p", "x", "--choices", "a,b", "--regex", "x"]
    said = str(CliRunner().invoke(app, asked).exception)
    assert said.startswith("--regex: cannot be given together with --choices"), said


def test_a_misspelt_recipe_is_asked_about(tmp_path: Path) -> None:
    asked = ["export", "demo-fp16", "-o", str(tmp_path / "out"), "--quant", "w8a9"]
    assert "did you mean 'w8a8'?" in str(CliRunner().invoke(app, asked).exception)


def test_what_the_first_page_installs_runs_its_examples() -> None:
    lines = (Path(__file__).parent.parent / "README.md").read_text().splitlines()
    extras = next(line for line in lines if "pip install" in line).partition(".[")[2].split("]")[0]
    assert {"export", "hub", "server", "constrain"} <= set(extras.split(","))


def test_a_misspelt_drafter_is_asked_about_before_anything_is_loaded() -> None:
    said = CliRunner().invoke(app, ["run", "nope", "--draft", "ngrm", "-p", "hello"]).exception
    assert "ngrm" in str(said) and "do you mean ngram?" in str(said)


@pytest.mark.parametrize("program", ["eval", "profile"])
def test_all_missing_bundles_and_texts_are_named_at_once(program: str, tmp_path: Path) -> None:
    texts = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")] if program == "eval" else []
    said = str(CliRunner().invoke(app, [program, "one", *texts, "--against", "two"]).exception)
    assert all(f"{name}: is n" in said for name in ("one", "two", *texts)), said
    other = ["--against", str(bundle("chat"))]
    alone = CliRunner().invoke(app, [program, "one", *texts[:1], *other]).exception
    assert "one: is neither" in str(alone) and "; two" not in str(alone)


def test_a_misspelt_role_is_asked_about() -> None:
    session = model("chat").session()
    for role, meant in (("usr", "user"), ("asistant", "assistant"), ("User", "user")):
        talk = [{"role": role, "content": "x"}, {"role": "user", "content": "y"}]
        with pytest.raises(InputError, match=f"unknown role '{role}' .did you mean '{meant}'"):
            session.chat(talk, max_tokens=1).finish()
    # a template may have its own roles
    session.chat([{"role": "observation", "content": "x"}], max_tokens=1).finish()


def test_doctor_recommends_no_build_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    from edge.runtime.tensorrt import bindings, cache

    def absent(kind: str) -> None:
        raise EngineError("TensorRT is not installed")

    monkeypatch.setattr(bindings, "load", absent)
    monkeypatch.setattr(cache, "entries", lambda fingerprint: [])
    status, detail, remedy = tensorrt.tensorrt_engine(str(bundle("chat")))
    assert status == "absent" and remedy is None and "TensorRT is not installed" in detail


def test_two_sides_are_measured_on_the_same_threads() -> None:
    small = str(bundle("chat"))  # alone it would run on one
    for against, threads in ((small, usable_cores()), (None, 1)):
        request = ProfileRequest(small, against=against, engine="ort")
        assert Subject(request, small, "ort").threads == threads


def test_wrong_values_of_options_are_told_in_plain_words_all_at_once() -> None:
    typed = ["serve", "--port", "99999", "--queue", "-1", "--deadline", "soon", "--engine", "gpu"]
    code, _, said = called(main, *typed)
    assert code == 2
    for fault in (
        ("error: --port: ", "whole number", "0 to 65,535", "'99999'; "),
        ("; --queue: ", "whole number", "at least 0", "'-1'; "),
        ("; --deadline: ", "number", "0.1 to 1,000,000", "'soon'; "),
        ("; --engine: ", "'gpu' (choose "),
        ("; bundle: ", "missing"),
    ):
        assert says(said, *fault), said
    assert len(said.splitlines()) == 1


def test_an_argument_that_alone_is_missing_is_told_with_the_usage() -> None:
    code, _, said = called(main, "serve", "--port", "0")
    assert code == 2 and said.startswith("Usage: ") and "Missing argument" in said


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        (["doctor", "no-such-model"], ("no-such-model: ", "folder", "name of a model")),
        (["doctor", "./no-such-folder"], ("no-such-folder: ", "not exist (", "edge export")),
        (["chat", "--threads", "2000"], ("--threads: ", "1 to 1,024", "2000")),
        (["serve", "demo", "--allow-host", "http://robot:80", "--port", "0"],
         ("--allow-host: ", "'http://robot:80'", "host name (", "without scheme")),
        (["export", "x", "-o", "x", "--ssm-state", "int4"],
         ("--ssm-state: ", "fp32", "fp16", "int8", "'int4'")),
        (["export", "demo-fp16", "-o", "x", "--tokenizer", "nowhere.json"],
         ("nowhere.json: ", "--tokenizer: ", "not exist (", "tokenizer file")),
    ],
)  # fmt: skip
def test_what_is_not_there_or_too_many_is_refused_at_once(
    typed: list[str], fault: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, said = called(main, *typed)
    assert code and not out and says(said, f"error: {fault[0]}", *fault[1:]), said
    assert len(said.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_model_is_shown_for_people() -> None:
    shown = called(main, "show", "demo")[1]
    for line in (r"chat template  yes", r"bytes +\d.*MB", r"parameters +4,\d{3},\d{3}"):
        assert re.search(rf"^{line}$", shown, re.MULTILINE), shown
