"""Both nodes under ROS 2, with a demonstration model: `colcon test --packages-select edge_chat`.

Needs a sourced ROS 2 with edge_chat_msgs, and edge on the path (jetson/README.md). The node in C++
(docs/examples/c/ros2) takes part where its package is built.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

rclpy = pytest.importorskip("rclpy", reason="no ROS 2 here: source its setup.bash")
pytest.importorskip("edge_chat_msgs", reason="edge_chat_msgs is not built: colcon build")

from action_msgs.msg import GoalStatus  # noqa: E402
from ament_index_python.packages import PackageNotFoundError, get_package_prefix  # noqa: E402
from diagnostic_msgs.msg import DiagnosticArray  # noqa: E402
from edge_chat.node import ChatNode  # noqa: E402
from edge_chat_msgs.action import Generate  # noqa: E402
from edge_chat_msgs.srv import Reset, StateFile  # noqa: E402
from lifecycle_msgs.msg import Transition  # noqa: E402
from lifecycle_msgs.srv import ChangeState  # noqa: E402
from rclpy.action import ActionClient  # noqa: E402
from rclpy.executors import MultiThreadedExecutor  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402

import edge  # noqa: E402

LIMIT_S = 60.0
BUNDLE = Path(edge.__file__).parent / "apps/bundles/demo-draft"
HELLO = {"prompt": "Hello, how are you?", "temperature": 0.0}
# at this temperature all tokens are about as likely, so the answer ends after thousands
LONG = {"prompt": "Hello", "temperature": 100.0, "seed": 1, "max_tokens": 1_000_000}


class Caller:
    """A calling node, and the node under test: in this process, or a process of its own in C++."""

    def __init__(self, language: str) -> None:
        self.language = language
        self.node = rclpy.create_node("caller")
        self.executors: list[MultiThreadedExecutor] = []
        self._spin(self.node, 2)
        if language == "python":
            self.tested = ChatNode()
            self.tested.set_parameters(
                [Parameter("bundle", value=str(BUNDLE)), Parameter("threads", value=1)]
            )
            self._spin(self.tested, 3)
        else:
            self.process = subprocess.Popen(
                [cpp_node(), "--ros-args", "-p", f"bundle:={BUNDLE}", "-r", f"__ns:=/{language}"]
            )
        self.goals = ActionClient(self.node, Generate, self.name("generate"))
        self.changes = self.node.create_client(ChangeState, self.name("change_state"))
        assert self.goals.wait_for_server(LIMIT_S) and self.changes.wait_for_service(LIMIT_S)

    def name(self, of: str) -> str:
        """Return the full name of an interface of the node under test."""
        return f"/{self.language}/edge_chat/{of}"

    def _spin(self, node: Any, threads: int) -> None:
        executor = MultiThreadedExecutor(threads)
        executor.add_node(node)
        threading.Thread(target=executor.spin, daemon=True).start()
        self.executors.append(executor)

    def change(self, transition: int) -> bool:
        request = ChangeState.Request()
        request.transition.id = transition
        return bool(done(self.changes.call_async(request)).success)

    def call(self, kind: Any, name: str, **fields: Any) -> Any:
        client = self.node.create_client(kind, self.name(name))
        assert client.wait_for_service(LIMIT_S)
        return done(client.call_async(kind.Request(**fields)))

    def send(self, fields: dict[str, Any], on_piece: Callable[[str], None] = lambda _: None) -> Any:
        def feedback(message: Any) -> None:
            on_piece(message.feedback.piece)

        return done(self.goals.send_goal_async(Generate.Goal(**fields), feedback))

    def close(self) -> None:
        for executor in self.executors:
            executor.shutdown(5)
        if self.language == "python":
            self.tested.close()
            self.tested.destroy_node()
        else:
            self.process.terminate()
            assert self.process.wait(LIMIT_S) == 0
        self.node.destroy_node()


def cpp_node() -> Path:
    """Return the node in C++, or skip the test."""
    try:
        return Path(get_package_prefix("edge_chat_cpp")) / "lib/edge_chat_cpp/node"
    except PackageNotFoundError:
        pytest.skip("edge_chat_cpp is not built: colcon build, with libedge (docs/use/c.md)")


def done(future: Any) -> Any:
    """Return the future's result, within LIMIT_S."""
    ended = threading.Event()
    future.add_done_callback(lambda _: ended.set())
    assert ended.wait(LIMIT_S), "no answer"
    return future.result()


@pytest.fixture(scope="module", params=["python", "cpp"])
def caller(request: Any) -> Iterator[Caller]:
    """A caller of an active node."""
    if request.param == "cpp":
        cpp_node()
    rclpy.init(args=["--ros-args", "-r", f"__ns:=/{request.param}"])
    instance = Caller(request.param)
    try:
        assert not instance.send(HELLO).accepted, "a goal before activation"
        assert instance.change(Transition.TRANSITION_CONFIGURE)
        assert not instance.send(HELLO).accepted
        assert instance.change(Transition.TRANSITION_ACTIVATE)
        yield instance
    finally:
        instance.close()
        rclpy.shutdown()


def test_an_answer_comes_as_feedback_and_as_the_result(caller: Caller) -> None:
    pieces: list[str] = []
    answer = done(caller.send(HELLO, pieces.append).get_result_async())
    assert answer.status == GoalStatus.STATUS_SUCCEEDED
    assert answer.result.text == "I'm doing well, thanks for asking! How are you doing today?"
    assert answer.result.finish_reason == "stop" and answer.result.tokens > 3
    # feedback is best effort: the result does not wait for the last piece
    assert answer.result.text.startswith("".join(pieces)) and pieces


def test_a_second_goal_is_rejected_and_the_first_can_be_cancelled(caller: Caller) -> None:
    started = threading.Event()
    handle = caller.send(LONG, lambda _: started.set())
    assert handle.accepted and started.wait(LIMIT_S)
    assert not caller.send(HELLO).accepted
    assert not caller.call(Reset, "reset").success
    done(handle.cancel_goal_async())
    answer = done(handle.get_result_async())
    assert answer.status == GoalStatus.STATUS_CANCELED
    assert answer.result.finish_reason == "cancelled"


def test_a_deadline_gives_what_there_is(caller: Caller) -> None:
    settle(caller)
    answer = done(caller.send({**LONG, "deadline_s": 0.05}).get_result_async())
    assert answer.status == GoalStatus.STATUS_SUCCEEDED
    assert answer.result.finish_reason == "deadline"


def test_an_answer_of_a_form(caller: Caller) -> None:
    settle(caller)
    directions = ["left", "right", "straight ahead"]
    fields = {"prompt": "Which way?", "temperature": 2.0, "choices": directions}
    for seed in range(3):
        answer = done(caller.send({**fields, "seed": seed}).get_result_async()).result
        assert answer.finish_reason == "stop" and answer.text in directions
        settle(caller)
    go = {"properties": {"go": {"enum": directions}}, "required": ["go"]}
    schema = {"type": "object", **go, "additionalProperties": False}
    answer = done(caller.send({**HELLO, "json_schema": json.dumps(schema)}).get_result_async())
    if caller.language == "python" or not answer.result.error:
        assert json.loads(answer.result.text)["go"] in directions
    else:  # built without llguidance
        assert answer.status == GoalStatus.STATUS_ABORTED and "llguidance" in answer.result.error


def test_a_conversation_goes_on_and_stops_at_a_text(caller: Caller) -> None:
    settle(caller)
    first = done(caller.send(HELLO).get_result_async()).result
    assert first.reused_tokens == 0
    settle(caller)
    second = done(caller.send({**HELLO, "keep": True, "stop": ["a"]}).get_result_async()).result
    assert second.finish_reason == "stop" and "a" not in second.text
    assert second.reused_tokens >= first.prompt_tokens + first.tokens - 1


def test_a_wrong_goal_is_aborted_with_the_reason(caller: Caller) -> None:
    settle(caller)
    answer = done(caller.send({**HELLO, "temperature": 1e6}).get_result_async())
    assert answer.status == GoalStatus.STATUS_ABORTED
    assert "temperature" in answer.result.error


def test_a_talk_is_saved_and_continued(caller: Caller, tmp_path: Any) -> None:
    settle(caller)
    done(caller.send(HELLO).get_result_async())
    settle(caller)
    path = str(tmp_path / "talk.state")
    saved = caller.call(StateFile, "save", path=path)
    assert saved.success and saved.tokens > 0
    assert caller.call(Reset, "reset").success
    assert caller.call(StateFile, "load", path=path).tokens == saved.tokens
    assert not caller.call(StateFile, "load", path=path + ".none").success


def test_diagnostics_tell_how_it_fares(caller: Caller) -> None:
    messages: list[Any] = []
    received = threading.Event()

    def listen(message: Any) -> None:
        messages.append(message)
        received.set()

    caller.node.create_subscription(DiagnosticArray, "/diagnostics", listen, 10)
    assert received.wait(LIMIT_S)
    (status,) = messages[0].status
    values = {pair.key: pair.value for pair in status.values}
    assert values["engine"] in ("cpu", "ort") and int(values["answers"]) > 0
    assert status.message == "active" and values["bundle"].endswith("demo-draft")


def test_deactivating_ends_the_goal_and_cleaning_up_frees(caller: Caller) -> None:
    settle(caller)
    started = threading.Event()
    handle = caller.send(LONG, lambda _: started.set())
    assert handle.accepted and started.wait(LIMIT_S)
    assert caller.change(Transition.TRANSITION_DEACTIVATE)
    answer = done(handle.get_result_async())
    assert answer.status == GoalStatus.STATUS_ABORTED
    assert not caller.send(HELLO).accepted
    assert caller.change(Transition.TRANSITION_CLEANUP)
    assert caller.change(Transition.TRANSITION_CONFIGURE)
    assert caller.change(Transition.TRANSITION_ACTIVATE)
    assert done(caller.send(HELLO).get_result_async()).result.finish_reason == "stop"


def test_what_breaks_is_answered_and_the_node_goes_on(caller: Caller, monkeypatch: Any) -> None:
    def broken() -> None:
        raise OSError("broken")

    if caller.language != "python":
        pytest.skip("patches the node in Python")
    talker = caller.tested._talker
    settle(caller)
    with monkeypatch.context() as patch:
        patch.setattr(talker, "reset", broken)
        assert caller.call(Reset, "reset").message == "OSError: broken"
    assert caller.change(Transition.TRANSITION_DEACTIVATE)
    with monkeypatch.context() as patch:
        patch.setattr(talker, "_warm_up", broken)
        assert not caller.change(Transition.TRANSITION_ACTIVATE)
    assert talker.state == "unconfigured"
    assert caller.change(Transition.TRANSITION_CONFIGURE)
    assert caller.change(Transition.TRANSITION_ACTIVATE)


def test_a_signal_ends_the_goal_and_the_process(caller: Caller) -> None:
    if caller.language == "python":
        pytest.skip("the node in Python is in this process")
    started = threading.Event()
    assert caller.send(LONG, lambda _: started.set()).accepted and started.wait(LIMIT_S)
    caller.process.send_signal(signal.SIGINT)
    assert caller.process.wait(LIMIT_S) == 0


def settle(caller: Caller) -> None:
    """Wait until no goal runs. In C++ none does once its result is there."""
    if caller.language != "python":
        return
    end = time.monotonic() + LIMIT_S
    while caller.tested._talker.refusal() and time.monotonic() < end:
        time.sleep(0.01)
