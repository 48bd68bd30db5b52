"""Chat commands and what the terminal shows: real processes, real screens."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import edge
from edge.apps.chat import conversation
from edge.apps.chat.commands import COMMANDS, Chat, following
from edge.apps.chat.input import Cleared, command_completer, leave_on_signals
from tests.session_models import bundle, model
from tests.terminal import ENDLESS, GIVE_UP, SHORT, Terminal


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Separate folders for what is kept between conversations."""
    return {
        "HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }


def test_regen_fork_and_undo_copy_states_and_say_so(home: dict[str, str]) -> None:
    terminal = Terminal(str(bundle("chat")), *SHORT, size=(24, 120), **home)
    terminal.ask("hello", "[ prompt")
    terminal.ask("/regen", "[ prompt 0 |")
    assert "reused" in terminal.wait_for("state ")
    terminal.ask("/fork before", "forked as before; /load before returns here;")
    terminal.wait_for("of state copied, nothing recomputed")
    terminal.ask("more", "[ prompt")
    terminal.ask("/list", "before               fork of this conversation")
    terminal.ask("/load before", "returned to before: ")
    terminal.ask("/undo", "undone; a conversation of 4 messages")
    terminal.ask("/regen", "[ prompt")
    terminal.ask("/show", "a conversation of 4 messages")
    terminal.ask("/undo", "undone; a conversation of 2 messages")
    terminal.bye()


def test_saved_by_name_and_listed(home: dict[str, str]) -> None:
    terminal = Terminal(str(bundle("chat")), *SHORT, **home)
    terminal.ask("hello", "[ prompt")
    terminal.ask("/save monday", "saved a conversation of 2 messages")
    terminal.bye()
    file = Path(home["XDG_DATA_HOME"]) / "mamba-edge" / "talks" / "monday.edge"
    assert file.is_file()
    terminal = Terminal(str(bundle("chat")), *SHORT, **home)
    terminal.ask("/list", "monday               saved 20")
    terminal.ask("/load monday", "resumed a conversation of 2 messages (")
    terminal.bye()
    terminal = Terminal(str(bundle("bytes")), *SHORT, **home)  # another model's
    terminal.ask("/load monday", "loaded a conversation of 2 messages")
    terminal.wait_for("state does not fit")
    terminal.bye()


def test_parameters_system_messages_and_files(home: dict[str, str], tmp_path: Path) -> None:
    """Parameters are checked before they are accepted; files become part of the next message."""
    (tmp_path / "notes.txt").write_text("one two three\n")
    (tmp_path / "bad.bin").write_bytes(b"ok \xff\xfe")
    terminal = Terminal(str(bundle("chat")), *SHORT, "--system", "one", **home)
    for line, says in [
        ("/show system", "one"),
        ("/system two three", "set the system message"),
        ("/show system", "two three"),
        ("/system", "two three"),
        ('/system ""', "removed the system message"),
        ("/show system", "no system message"),
        ("/set temperature 0", "temperature 0.0"),
        ("/set temperature -1", "error: temperature: must be from 0 to 100"),
        ("/set temperature warm", "error: temperature: 'warm' is not a number"),
        ("/set max_tokens 2", "max_tokens 2"),
        ("/set stop 'a b' c", "stop ('a b', 'c')"),
        ("/set stop", "stop none"),
        ("/set colour red", "error: /set: unknown parameter 'colour'"),
        ("/set", "max_tokens           2"),
        ("/show parameters", "temperature          0.0"),
        ("/stats", "no answer yet"),
        ("hello", "[ prompt"),
        ("/stats off", "figures off"),
        ("again", ">>>"),
        ("/stats", "answers: 2, tokens: 4"),
        ("/show", "a conversation of 4 messages"),
        ("/show transcript", "user: again"),
        ("/show me", "error: /show: cannot show 'me'"),
        ("/stats on", "figures on"),
        (f"/read {tmp_path}/notes.txt", "sent with the next"),
        (f"/read {tmp_path}/bad.bin", "UTF-8 at byte 3"),
        (f"/read {tmp_path}/none.txt", "such file"),
        ("/read", "error: /read: needs a file"),
        ("what is this?", "[ prompt"),
        ("/show transcript", "user: one two three"),
    ]:
        terminal.ask(line, says)
        if says == ">>>":
            terminal.type("\r")
    assert "what is this?" in terminal.wait_for("assistant:")
    terminal.wait_for(">>>")
    terminal.type("/rege\t")
    terminal.wait_for("/regen")
    terminal.type("\x15/read ~/not\t")
    terminal.wait_for("notes.txt")
    terminal.type("\r")
    terminal.wait_for("sent with the next message")
    terminal.bye()


def test_messages_of_several_lines_typed_and_pasted(home: dict[str, str]) -> None:
    terminal = Terminal(str(bundle("chat")), *SHORT, **home)
    terminal.ask('"""one', "...")
    terminal.type('two\rthree"""\r')
    terminal.wait_for("[ prompt")
    terminal.wait_for(">>>")
    terminal.type("\x1b[200~four\nfive\x1b[201~")  # a paste, as terminals bracket it
    terminal.wait_for("five")
    terminal.type("\r")
    terminal.wait_for("[ prompt")
    terminal.ask("/show transcript")
    said = terminal.wait_for("user: four")
    assert "user: one\ntwo\nthree" in said.replace("\r", "")
    terminal.bye()


def test_history_is_kept_privately_and_comes_back(home: dict[str, str]) -> None:
    terminal = Terminal(str(bundle("chat")), *SHORT, **home)
    terminal.ask("remember me", "[ prompt")
    terminal.bye()
    file = Path(home["XDG_STATE_HOME"]) / "mamba-edge" / "history"
    assert file.stat().st_mode & 0o077 == 0
    terminal = Terminal(str(bundle("chat")), *SHORT, **home)
    terminal.wait_for(">>>")
    terminal.type("\x1b[A\x1b[A")  # up: /bye, then the message before it
    terminal.wait_for("remember me")
    terminal.type("\x03")
    terminal.bye()


@pytest.mark.parametrize("when", ["answering", "waiting"])
@pytest.mark.parametrize("how", ["connection", "signal", "signals"])
def test_a_hang_up_saves_the_conversation(home: dict[str, str], when: str, how: str) -> None:
    """A terminal that closes causes more than one signal: the kernel's and the shell's."""
    options = ENDLESS if when == "answering" else SHORT
    terminal = Terminal(str(bundle("bytes")), *options, **home)
    terminal.ask("hello")
    if when == "answering":
        terminal.answering()
    else:
        terminal.wait_for("[ prompt")
        terminal.wait_for(">>>")
    talks, process = Path(home["XDG_DATA_HOME"]) / "mamba-edge" / "talks", terminal.process
    if how == "connection":
        terminal.hang_up()
    else:
        os.kill(process.pid, signal.SIGHUP)
    while how == "signals" and process.poll() is None and not list(talks.glob("hangup-*.edge")):
        os.kill(process.pid, signal.SIGHUP)
        time.sleep(0.001)
    ends = {129, -signal.SIGHUP} if how == "signals" else {129}
    assert process.wait(timeout=GIVE_UP) in ends
    saved = list(talks.glob("hangup-*.edge"))
    assert len(saved) == 1
    session = edge.load(bundle("bytes"), threads=1).session()
    session.load(saved[0])
    roles = [message.role for message in session.messages]
    assert roles == ["user", "assistant"]


def test_a_hang_up_that_is_lost_is_raised_again(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception raised in a finalizer leaves nothing; another signal soon after is no second."""
    monkeypatch.setattr(conversation, "AGAIN_S", 0.2)
    for name, value in home.items():
        monkeypatch.setenv(name, value)
    session = edge.load("demo", engine="cpu", threads=1).session()
    session.chat("hello", max_tokens=2).finish()
    with pytest.raises(conversation.HangUp) as left, conversation.save_on_hangup(session):
        with suppress(conversation.HangUp):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GIVE_UP)
    assert left.value.code == 128 + signal.SIGHUP
    talks = Path(home["XDG_DATA_HOME"]) / "mamba-edge" / "talks"
    assert len(list(talks.glob("hangup-*.edge"))) == 1


def _prompts(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(">>>")]


def test_what_was_written_is_never_redrawn_when_the_window_shrinks(home: dict[str, str]) -> None:
    terminal = Terminal("demo", "--temperature", "0", "--max-tokens", "60", **home)
    terminal.ask("Tell me about the sea.", "[ prompt")
    answer = re.sub(r"\s+", " ", terminal.raw)
    terminal.wait_for(">>>")
    terminal.resize(8, 40)
    time.sleep(0.3)
    terminal.type("/show\r")
    terminal.wait_for("whatever the length")
    lines = terminal.screen()
    assert sum(line.startswith("[ prompt") for line in lines) == 1
    assert len([line for line in lines if "Tell me about the sea." in line]) == 1
    assert "Tell me about the sea." in answer
    terminal.bye()


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: apt install tmux")
def test_a_talk_inside_tmux(home: dict[str, str], tmp_path: Path) -> None:
    socket = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null"]
    environment = os.environ | home

    def tmux(*arguments: str) -> str:
        done = subprocess.run(
            [*socket, *arguments], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def shows(text: str) -> str:
        deadline = time.monotonic() + GIVE_UP
        while True:
            screen = tmux("capture-pane", "-p", "-t", "talk", "-S", "-200")
            if text in screen:
                return screen
            assert time.monotonic() < deadline, screen
            time.sleep(0.1)

    command = f"{sys.executable} -m edge.apps.chat demo --temperature 0 --max-tokens 40"
    tmux("new-session", "-d", "-s", "talk", "-x", "72", "-y", "12", command)
    try:
        shows(">>>")
        tmux("send-keys", "-t", "talk", "What is a robot?", "Enter")
        before = shows("[ prompt")
        tmux("resize-window", "-t", "talk", "-x", "50", "-y", "8")
        tmux("send-keys", "-t", "talk", "/stats", "Enter")
        after = shows("answers: 1")
        assert before.count("What is a robot?") == after.count("What is a robot?") == 1
        assert after.count("[ prompt") == 2  # after the answer, and on request
        tmux("send-keys", "-t", "talk", "C-d")
    finally:
        subprocess.run([*socket, "kill-server"], env=environment, check=False)


def test_names_of_what_is_kept_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mondays.txt").touch()
    this = Chat(model("chat").session(), "chat", {})
    for line in ("/save monday", "/fork most", "/save the-day-after-that-monday"):
        word, name = line.split()
        COMMANDS[word].run(this, name)
    completer = command_completer(COMMANDS, partial(following, this))

    def found(typed: str) -> list[str]:
        ends = completer.get_completions(Document(typed), CompleteEvent())
        return sorted(typed[: len(typed) + end.start_position] + end.text for end in ends)

    assert found("/loa") == ["/load"]
    assert found("/load mo") == ["/load monday", "/load mondays.txt", "/load most"]
    assert found("/rm t") == ["/rm the-day-after-that-monday"]
    assert found("/read mo") == ["/read mondays.txt"]
    assert found("/set te") == ["/set temperature"]
    assert found("/undo ") == found("hello ") == []
    lines = str(COMMANDS["/list"].run(this, "")).splitlines()
    assert len({re.search(r"(fork of|saved) ", line).start() for line in lines}) == 1  # type: ignore[union-attr]
    assert this.length() == "a conversation of 0 messages"


@pytest.mark.parametrize("typed, ends", [("half a line", Cleared), ("", KeyboardInterrupt)])
def test_a_signal_while_or_after_a_line_is_typed(typed: str, ends: type[BaseException]) -> None:
    """The loop still delivers one that came late, and the next prompt begins in another loop."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        session: PromptSession[str] = PromptSession()
        leave_on_signals(session)

        async def interrupted() -> BaseException:
            interrupt = session.app.key_processor.send_sigint
            session.app.after_render += lambda _: (
                typed == session.default_buffer.text and interrupt()
            )
            with pytest.raises(ends) as ended:
                await session.prompt_async(handle_sigint=False)
            interrupt()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return ended.value

        for _ in range(2):
            keys.send_text(typed)
            assert type(asyncio.run(interrupted())) is ends
