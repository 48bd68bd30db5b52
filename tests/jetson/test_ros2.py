"""The ROS 2 packages: the talker with a real model; messages, launch and parameters as text.

The node itself is tested only under ROS 2: jetson/ros2/edge_chat/test.
"""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
import threading
import time
import weakref
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import edge
from edge.errors import BundleError, EngineError, InputError, StateError
from edge.plugins.cpu import library
from edge.runtime.session import Session
from edge.runtime.transcript import read_conversation
from tests.jetson import boards

ROOT = boards.JETSON.parent
ROS2 = boards.JETSON / "ros2"
PACKAGE = ROS2 / "edge_chat"
sys.path.insert(0, str(PACKAGE))
from edge_chat.talker import GoalRequest, NodeSettings, Outcome, Refused, Talker  # noqa: E402

SETTINGS = NodeSettings(bundle="demo-draft", threads=1, temperature=0.0, max_tokens=40)
HELLO = GoalRequest("Hello, how are you?")
ANSWER = "I'm doing well, thanks for asking! How are you doing today?"  # the greedy answer
# too long to end before it is cancelled
LONG = GoalRequest("Hello, how are you?", temperature=3.0, seed=5, max_tokens=100_000)
LIMIT_S = 60


@pytest.fixture
def talker() -> Iterator[Talker]:
    """An active talker."""
    made = Talker()
    made.configure(SETTINGS)
    made.activate()
    yield made
    made.shutdown()


def done(talker: Talker, request: GoalRequest, on_piece: Any = lambda piece: None) -> Outcome:
    outcome = talker.start(request, on_piece).wait(LIMIT_S)
    assert outcome is not None
    return outcome


class TestTalker:
    def test_an_answer_comes_in_pieces(self, talker: Talker) -> None:
        pieces: list[str] = []
        outcome = done(talker, HELLO, pieces.append)
        assert outcome.text == "".join(pieces) == ANSWER
        assert (outcome.finish_reason, outcome.error) == ("stop", "")
        assert outcome.tokens >= len(pieces) > 1
        assert outcome.prompt_tokens > 0 and outcome.ttft_s > 0 and outcome.tokens_per_s > 0

    def test_warming_up_leaves_no_trace(self) -> None:
        answers = []
        for warm in (0, 8):
            talker = Talker()
            talker.configure(replace(SETTINGS, warmup_tokens=warm))
            talker.activate()
            answers.append(done(talker, replace(HELLO, keep=True)))
            talker.shutdown()
        assert answers[0].text == answers[1].text
        assert answers[0].reused_tokens == answers[1].reused_tokens == 0

    def test_the_model_runs_on_a_thread_of_its_own(self, talker: Talker) -> None:
        names: set[str] = set()
        done(talker, HELLO, lambda piece: names.add(threading.current_thread().name))
        assert len(names) == 1 and names.pop().startswith("edge-decode")

    def test_cancelling_ends_it_within_a_step(self, talker: Talker) -> None:
        goals: list[Any] = []
        begun = threading.Event()
        pieces: list[str] = []

        def cancel(piece: str) -> None:
            pieces.append(piece)
            begun.wait(LIMIT_S)
            goals[0].cancel()

        goals.append(talker.start(LONG, cancel))
        begun.set()
        outcome = goals[0].wait(LIMIT_S)
        assert outcome.finish_reason == "cancelled"
        # the held-back tail may follow
        assert len(pieces) <= 2 and outcome.text == "".join(pieces)
        assert done(talker, HELLO).finish_reason == "stop"

    def test_cancelling_before_the_first_token_leaves_no_trace(
        self, talker: Talker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done(talker, HELLO)
        position = talker.save(str(tmp_path / "before"))
        held, chat = threading.Event(), Session.chat

        def waits(*arguments: Any, **options: Any) -> Any:
            assert held.wait(LIMIT_S)
            return chat(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Session, "chat", waits)
            goal = talker.start(replace(LONG, keep=True))
            goal.cancel()
            held.set()
            outcome = goal.wait(LIMIT_S)
        assert outcome is not None
        assert (outcome.text, outcome.finish_reason, outcome.tokens) == ("", "cancelled", 0)
        assert talker.save(str(tmp_path / "after")) == position > 0
        before, after = (read_conversation(tmp_path / name) for name in ("before", "after"))
        assert before == after and len(after.messages) == 2

    def test_a_deadline_gives_what_there_is(self, talker: Talker) -> None:
        outcome = done(talker, replace(LONG, deadline_s=1e-6))
        assert (outcome.text, outcome.finish_reason) == ("", "deadline")

    def test_the_deadline_of_the_settings_counts_for_goals_without_one(self) -> None:
        talker = Talker()
        talker.configure(replace(SETTINGS, deadline_s=1e-6, warmup_tokens=0))
        talker.activate()
        assert done(talker, LONG).finish_reason == "deadline"
        assert done(talker, replace(HELLO, deadline_s=0)).finish_reason == "stop"
        talker.shutdown()

    def test_a_second_goal_is_refused_while_one_runs(self, talker: Talker) -> None:
        refused: list[str] = []

        def second(piece: str) -> None:
            for attempt in (
                lambda: talker.start(HELLO),
                talker.reset,
                lambda: talker.save("anywhere"),
            ):
                with pytest.raises(Refused, match="another goal") as caught:
                    attempt()
                refused.append(str(caught.value))

        assert done(talker, HELLO, second).finish_reason == "stop"
        assert refused and talker.refusal() is None

    def test_an_error_ends_its_goal_alone(self, talker: Talker) -> None:
        for wrong in (
            replace(HELLO, temperature=1e9),
            GoalRequest("x" * 2_000_000),
            GoalRequest("\ud800"),
        ):
            outcome = done(talker, wrong)
            assert outcome.finish_reason == "error" and outcome.error
        broken = done(talker, HELLO, lambda piece: 1 / 0)
        assert "ZeroDivisionError" in broken.error
        assert done(talker, HELLO).finish_reason == "stop"

    def test_a_failed_engine_refuses_goals_until_it_is_configured_anew(
        self, talker: Talker, monkeypatch: Any
    ) -> None:
        def lost(*_: Any, **__: Any) -> None:
            raise EngineError("the device is lost")

        shared = edge.load(SETTINGS.bundle, engine=SETTINGS.engine, threads=SETTINGS.threads)
        monkeypatch.setattr(shared.engine, "run", lost)
        assert "lost" in done(talker, HELLO).error
        assert "configure it again" in (talker.refusal() or "")
        assert talker.health()[0] == "error"
        monkeypatch.undo()
        talker.deactivate()
        talker.cleanup()
        talker.configure(SETTINGS)
        talker.activate()
        assert done(talker, HELLO).finish_reason == "stop"

    def test_deactivating_ends_the_goal(self, talker: Talker) -> None:
        begun = threading.Event()
        goal = talker.start(LONG, lambda piece: begun.set())
        assert begun.wait(LIMIT_S)
        talker.deactivate()
        outcome = goal.wait(0)
        assert outcome is not None and outcome.finish_reason in ("cancelled", "stop")
        with pytest.raises(Refused, match="is inactive, not active"):
            talker.start(HELLO)

    def test_each_transition_has_its_state(self) -> None:
        talker = Talker()
        for wrong in (talker.activate, talker.deactivate, talker.cleanup):
            with pytest.raises(Refused, match="is unconfigured"):
                wrong()
        with pytest.raises(BundleError):
            talker.configure(replace(SETTINGS, bundle="/nowhere"))
        assert talker.state == "unconfigured"
        talker.configure(SETTINGS)
        with pytest.raises(Refused, match="is inactive"):
            talker.configure(SETTINGS)
        talker.cleanup()
        assert talker.state == "unconfigured" and talker.health()[2]["engine"] == ""

    def test_a_broken_transition_is_followed_by_a_fresh_start(self, monkeypatch: Any) -> None:
        talker = Talker()
        talker.configure(SETTINGS)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "chat", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                talker.activate()
        talker.shutdown()  # as on_error does
        talker.configure(SETTINGS)
        talker.activate()
        assert done(talker, HELLO).text == ANSWER
        talker.shutdown()

    def test_cleaning_up_frees_the_model_and_the_thread(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, models, load = threading.active_count(), [], edge.load

        def loads(*arguments: Any, **options: Any) -> Any:
            model = load(*arguments, **options)
            models.append(weakref.ref(model))
            return model

        monkeypatch.setattr(edge, "load", loads)
        talker = Talker()
        talker.configure(SETTINGS)
        talker.activate()
        goal = talker.start(HELLO)
        goal.wait(LIMIT_S)
        talker.deactivate()
        talker.cleanup()
        assert [model() for model in models] == [None], "kept by the goal or the talker"
        assert goal.wait(0).finish_reason == "stop"
        assert threading.active_count() == before

    def test_a_talk_is_kept_saved_and_continued(self, talker: Talker, tmp_path: Path) -> None:
        done(talker, HELLO)
        second = done(talker, replace(HELLO, keep=True))
        assert second.reused_tokens > 0
        path = tmp_path / "talk.state"
        assert talker.save(str(path)) > 0
        third = done(talker, replace(HELLO, keep=True)).text
        talker.reset()
        assert talker.load(str(path)) > 0
        assert done(talker, replace(HELLO, keep=True)).text == third
        assert done(talker, HELLO).reused_tokens == 0
        with pytest.raises(StateError):
            talker.load(str(tmp_path / "none"))

    def test_health_counts_and_measures(self, talker: Talker) -> None:
        done(talker, HELLO)
        done(talker, replace(HELLO, temperature=1e9))
        level, _, values = talker.health()
        assert level in ("ok", "warn")
        assert (values["answers"], values["errors"]) == ("2", "1")
        assert values["engine"] == ("ort" if library.path() is None else "cpu")
        assert int(values["mem_available_bytes"]) > 0
        assert all(isinstance(value, str) for value in values.values())

    def test_many_goals_one_after_the_other(self, talker: Talker) -> None:
        for index in range(20):
            goal = talker.start(LONG)
            if index % 2:
                time.sleep(0.001 * (index % 5))
            goal.cancel()
            outcome = goal.wait(LIMIT_S)
            assert outcome is not None and outcome.finish_reason in ("cancelled", "stop")
        assert done(talker, HELLO).text == ANSWER


# -- as text --------------------------------------------------------------------------------------

_PLAIN = {
    "string": str,
    "bool": bool,
    "int32": int,
    "int64": int,
    "float32": float,
    "float64": float,
}


def sections(path: Path) -> list[dict[str, tuple[str, str]]]:
    """Return the fields of each section: name → (type, default)."""
    found: list[dict[str, tuple[str, str]]] = [{}]
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text == "---":
            found.append({})
        elif text:
            kind, name, *default = text.split()
            found[-1][name] = (kind, " ".join(default))
    return found


def message(section: dict[str, tuple[str, str]]) -> Any:
    """Return an object with only these fields, at their defaults."""
    made = type("Message", (), {"__slots__": tuple(section)})()
    for name, (kind, default) in section.items():
        if kind.endswith("[]"):
            setattr(made, name, [])
        elif kind == "bool":
            setattr(made, name, default == "true")
        else:
            setattr(made, name, _PLAIN[kind](default or 0) if kind != "string" else default)
    return made


def test_a_goal_at_its_defaults_leaves_everything_to_the_settings() -> None:
    goal, result, _ = sections(ROS2 / "edge_chat_msgs/action/Generate.action")
    assert GoalRequest.of(message(goal)) == GoalRequest("")
    filled = message(goal)
    filled.prompt, filled.max_tokens, filled.temperature, filled.stop = "Hi", 3, 0.0, ["a", "b"]
    filled.seed, filled.deadline_s, filled.chat = 7, 0.0, False
    assert GoalRequest.of(filled) == GoalRequest("Hi", False, False, 3, 0.0, 7, 0.0, ("a", "b"))
    outcome = Outcome("text", "stop", "", 1, 2, 3, 0.5, 60.0)
    got = outcome.fill(message(result))
    assert all(getattr(got, name) == getattr(outcome, name) for name in result)


def test_the_node_uses_the_messages_as_they_are() -> None:
    tree = ast.parse((PACKAGE / "edge_chat/node.py").read_text(), feature_version=(3, 10))
    used: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.setdefault(node.value.id, set()).add(node.attr)
    _, result, feedback = sections(ROS2 / "edge_chat_msgs/action/Generate.action")
    assert used["feedback"] == set(feedback)
    assert used["result"] <= set(result)
    request, response = sections(ROS2 / "edge_chat_msgs/srv/StateFile.srv")
    assert used["response"] == set(response)
    assert "path" in request and {"success", "message"} == set(
        sections(ROS2 / "edge_chat_msgs/srv/Reset.srv")[1]
    )


def test_the_node_logs_harmless_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems and tracebacks hold names of files that a request or a parameter chose."""
    rooms = ("rclpy", "rclpy.action", "rclpy.callback_groups", "rclpy.executors", "rclpy.lifecycle",
             "diagnostic_msgs.msg", "edge_chat_msgs.action", "edge_chat_msgs.srv",
             "rcl_interfaces.msg")  # fmt: skip
    for room in rooms:
        monkeypatch.setitem(sys.modules, room, MagicMock())
    methods = ("declare_parameter", "get_parameter", "create_service", "create_publisher",
               "create_timer", "get_logger", "get_name", "get_clock")  # fmt: skip
    base = type("LifecycleNode", (), {name: MagicMock() for name in methods})
    base.__init__ = lambda self, name: None  # type: ignore[misc]
    monkeypatch.setattr(sys.modules["rclpy.lifecycle"], "LifecycleNode", base)
    sys.modules["rclpy"].ok = iter([True, True, False, True]).__next__  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "edge_chat.node", raising=False)
    module = importlib.import_module("edge_chat.node")
    monkeypatch.delitem(sys.modules, "edge_chat.node")
    talker, hostile = MagicMock(), "x\x1b]0;pwned\x1b\\y\u202e\x9b31m"
    monkeypatch.setattr(module, "Talker", lambda: talker)
    node = module.ChatNode()
    called = module.ActionServer.call_args.kwargs
    _, _, reset = node.create_service.call_args_list[0].args
    _, diagnose = node.create_timer.call_args.args

    for problem in (BundleError(hostile, file=hostile), Refused(hostile), OSError(hostile)):
        talker.activate.side_effect = talker.reset.side_effect = problem
        node.on_activate(None)
        reset(MagicMock(), MagicMock())
    talker.refusal.return_value = hostile
    called["goal_callback"](None)
    talker.start().cancelled.is_set.return_value = True
    talker.start().wait.return_value = Outcome("", "error", hostile)
    goal, _, _ = sections(ROS2 / "edge_chat_msgs/action/Generate.action")
    called["execute_callback"](MagicMock(request=message(goal)))
    talker.health.side_effect = OSError(hostile)
    diagnose()
    executor = MagicMock()
    executor.spin.side_effect = RuntimeError(hostile)
    module.spin(executor, node)
    logged = [call.args[0] for call in node.get_logger().method_calls]
    assert len(logged) == 8 and all("pwned" in text for text in logged)
    assert not any(set("\x1b\x9b\u202e") & set(text) for text in logged)


def _in_cpp(section: dict[str, tuple[str, str]], name: str) -> str:
    """Return a message's section as the structure that rosidl makes of it."""
    members = []
    for field, (kind, _) in section.items():
        plain = kind.removesuffix("[]")
        typed = {"string": "std::string", "float32": "float", "float64": "double"}.get(plain, plain)
        typed = f"{typed}_t" if typed.startswith("int") else typed
        members.append(f"{f'std::vector<{typed}>' if kind.endswith('[]') else typed} {field};")
    shared = f"std::shared_ptr<{name}>", f"std::shared_ptr<const {name}>"
    aliases = f"using SharedPtr = {shared[0]}; using ConstSharedPtr = {shared[1]};"
    return f"struct {name} {{ {aliases} {' '.join(members)} }};"


def _write_messages(folder: Path) -> None:
    """Write the headers that rosidl makes of edge_chat_msgs."""
    for file, name, parts in (
        ("action/Generate.action", "generate", ("Goal", "Result", "Feedback")),
        ("srv/Reset.srv", "reset", ("Request", "Response")),
        ("srv/StateFile.srv", "state_file", ("Request", "Response")),
    ):
        inside = zip(sections(ROS2 / "edge_chat_msgs" / file), parts, strict=True)
        body = "\n".join(_in_cpp(section, part) for section, part in inside)
        kind, _, title = file.partition("/")
        header = folder / "edge_chat_msgs" / kind / f"{name}.hpp"
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(
            "#pragma once\n#include <cstdint>\n#include <memory>\n#include <string>\n"
            f"#include <vector>\nnamespace edge_chat_msgs::{kind} {{\n"
            f"struct {title.partition('.')[0]} {{\n{body}\n}};\n}}\n"
        )


@pytest.mark.parametrize("flags", [(), ("-DROBOT_FORMS",)])
def test_the_node_in_cpp_compiles(flags: tuple[str, ...], tmp_path: Path) -> None:
    """With the messages as they are, and ROS 2's functions as tests/headers declares them."""
    if shutil.which("c++") is None:
        pytest.skip("needs c++: apt-get install build-essential")
    _write_messages(tmp_path)
    headers = (tmp_path, ROOT / "tests/headers", ROOT / "runtime/libedge/include")
    done = subprocess.run(
        ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *flags,
         *(f"-I{folder}" for folder in headers), ROOT / "docs/examples/c/ros2/node.cpp"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_packages_are_complete() -> None:
    listed = (ROS2 / "edge_chat_msgs/CMakeLists.txt").read_text()
    for file in (*ROS2.glob("edge_chat_msgs/action/*"), *ROS2.glob("edge_chat_msgs/srv/*")):
        assert f'"{file.parent.name}/{file.name}"' in listed
    for package in ("edge_chat", "edge_chat_msgs"):
        root = ElementTree.parse(ROS2 / package / "package.xml").getroot()
        assert root.findtext("name") == package and root.findtext("license") == "Apache-2.0"
    depends = {e.text for e in ElementTree.parse(PACKAGE / "package.xml").getroot().iter("depend")}
    assert {"rclpy", "diagnostic_msgs", "edge_chat_msgs"} <= depends
    named = {e.text for e in ElementTree.parse(PACKAGE / "package.xml").getroot() if e.text}
    for file in PACKAGE.rglob("*.py"):  # imports are declared; setup.py is for the build
        if file.name != "setup.py":
            assert _imported(file) - named <= {"edge", "edge_chat", "pytest"}, file
    setup = (PACKAGE / "setup.py").read_text()
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.parent.name in ("config", "launch", "resource"):
            assert str(path.relative_to(PACKAGE)) in setup
    assert "def main()" in (PACKAGE / "edge_chat/node.py").read_text()


def _imported(file: Path) -> set[str]:
    """Return the packages that a file imports, except the standard library."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(), feature_version=(3, 10))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names


def test_parameters_may_be_whole_numbers_and_all_faults_are_told_at_once() -> None:
    values = {each.name: each.default for each in fields(NodeSettings)}
    made = NodeSettings.of({**values, "deadline_s": 30, "temperature": 1, "diagnostics_s": 2})
    assert made.deadline_s == 30.0 and type(made.temperature) is float
    wrong = {"bundle": 3, "top_k": 1.5, "min_p": "low", "diagnostics_s": 0.0, "threads": True}
    with pytest.raises(InputError) as caught:
        NodeSettings.of({**values, **wrong})
    assert all(f"{name}: must be " in str(caught.value) for name in wrong)


def test_the_configuration_has_the_settings_at_their_defaults() -> None:
    lines = (PACKAGE / "config/edge_chat.yaml").read_text().splitlines()[2:]
    given = {}
    for line in lines:
        name, _, value = line.partition("#")[0].partition(":")
        given[name.strip()] = value.strip().strip('"')
    for each in fields(NodeSettings):
        kind = type(each.default)
        assert kind(given.pop(each.name)) == each.default, each.name
    assert not given


def test_without_edge_on_the_path_the_package_says_what_to_do(tmp_path: Path) -> None:
    """As where ROS 2's Python does not see the virtual environment."""
    command = [sys.executable, "-S", "-E", "-c", "import edge_chat"]
    done = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True)
    assert done.returncode == 1 and "export PYTHONPATH=CHECKOUT/.venv/lib" in done.stderr
