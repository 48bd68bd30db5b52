"""The ROS 2 side: parameters, lifecycle, action, services, diagnostics.

    action    ~/generate    edge_chat_msgs/Generate
    services  ~/reset       edge_chat_msgs/Reset
              ~/save, ~/load  edge_chat_msgs/StateFile
    topic     /diagnostics  diagnostic_msgs/DiagnosticArray

All decisions are in `talker`; callbacks here only delegate and wait. They run on executor threads,
the model on its own thread. No callback may raise: rclpy ends the process for an exception in a
service or a timer, and swallows one in a transition.
"""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from dataclasses import fields
from queue import Empty, SimpleQueue
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from edge_chat_msgs.action import Generate
from edge_chat_msgs.srv import Reset, StateFile
from rcl_interfaces.msg import ParameterDescriptor
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.executors import ExternalShutdownException, MultiThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from edge.apps.terminal import harmless
from edge.errors import EdgeError
from edge_chat.talker import Goal, GoalRequest, NodeSettings, Refused, Talker

# how often a waiting callback checks whether its goal was cancelled; tokens do not wait for it
_POLL_S = 0.02
# least time between two pieces: a client keeps the last ten until it looks at them
_PIECE_S = 0.005
# executor threads: for the goal, for cancelling it, for services, parameters and diagnostics
_THREADS = 3
_SHUTDOWN_S = 5.0
_LEVELS = {
    "ok": DiagnosticStatus.OK,
    "warn": DiagnosticStatus.WARN,
    "error": DiagnosticStatus.ERROR,
}


class ChatNode(LifecycleNode):
    """The lifecycle node; the module lists its interfaces."""

    def __init__(self) -> None:
        super().__init__("edge_chat")
        self._talker = Talker()
        for setting in fields(NodeSettings):
            # any type: otherwise ROS ends the process if a file has 30 instead of 30.0
            self.declare_parameter(
                setting.name, setting.default, ParameterDescriptor(dynamic_typing=True)
            )
        group = ReentrantCallbackGroup()
        self._actions = ActionServer(
            self,
            Generate,
            "~/generate",
            execute_callback=self._execute,
            goal_callback=self._accept,
            cancel_callback=lambda handle: CancelResponse.ACCEPT,
            callback_group=group,
        )
        self.create_service(Reset, "~/reset", self._reset, callback_group=group)
        self.create_service(StateFile, "~/save", self._save, callback_group=group)
        self.create_service(StateFile, "~/load", self._load, callback_group=group)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        period = self.get_parameter("diagnostics_s").value
        usable = type(period) in (int, float) and period > 0  # on_configure refuses other values
        self.create_timer(
            float(period) if usable else NodeSettings.diagnostics_s,
            self._diagnose,
            callback_group=group,
        )

    # -- lifecycle -------------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        values = {
            setting.name: self.get_parameter(setting.name).value for setting in fields(NodeSettings)
        }
        return self._transition(lambda: self._talker.configure(NodeSettings.of(values)))

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._transition(self._talker.activate)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._transition(self._talker.deactivate)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._transition(self._talker.cleanup)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._transition(self._talker.shutdown)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free everything after a failed transition: success here means unconfigured."""
        return self._transition(self._talker.shutdown)

    def _transition(self, change: Any) -> TransitionCallbackReturn:
        """Return success, failure (the node stays in its state), or an error (calls `on_error`)."""
        try:
            change()
        except (EdgeError, Refused) as problem:
            self.report(str(problem))
            return TransitionCallbackReturn.FAILURE
        except Exception:
            self.report(traceback.format_exc())
            return TransitionCallbackReturn.ERROR
        return TransitionCallbackReturn.SUCCESS

    # -- goals -----------------------------------------------------------------------------------

    def _accept(self, request: Any) -> GoalResponse:
        reason = self._talker.refusal()
        if reason is None:
            return GoalResponse.ACCEPT
        self.report(f"rejected a goal: the node {reason}", "warning")
        return GoalResponse.REJECT

    def _execute(self, handle: Any) -> Any:
        pieces: SimpleQueue[str] = SimpleQueue()
        result = Generate.Result()
        try:
            goal = self._talker.start(GoalRequest.of(handle.request), pieces.put)
        except Refused as problem:  # another goal was accepted at the same moment
            result.finish_reason, result.error = "error", str(problem)
            handle.abort()
            return result
        self._forward(handle, goal, pieces)
        outcome = goal.wait()
        assert outcome is not None
        outcome.fill(result)
        if outcome.finish_reason == "error":
            self.report(outcome.error)
            handle.abort()
        elif handle.is_cancel_requested:
            handle.canceled()
        elif outcome.finish_reason == "cancelled":  # by deactivation
            handle.abort()
        else:
            handle.succeed()
        return result

    def _forward(self, handle: Any, goal: Goal, pieces: SimpleQueue[str]) -> None:
        """Publish pieces until the goal has ended and all of them are published."""
        while True:
            ended = goal.wait(0) is not None
            if handle.is_cancel_requested and not goal.cancelled.is_set():
                goal.cancel()
            try:
                piece = pieces.get(timeout=0 if ended else _POLL_S)
            except Empty:
                if ended:
                    return
                continue
            with suppress(Empty):
                while True:
                    piece += pieces.get_nowait()
            feedback = Generate.Feedback()
            feedback.piece = piece
            handle.publish_feedback(feedback)
            time.sleep(_PIECE_S)

    # -- services --------------------------------------------------------------------------------

    def _reset(self, request: Any, response: Any) -> Any:
        response.success, response.message, _ = self._attempt(self._talker.reset)
        return response

    def _save(self, request: Any, response: Any) -> Any:
        outcome = self._attempt(lambda: self._talker.save(request.path))
        response.success, response.message, response.tokens = outcome
        return response

    def _load(self, request: Any, response: Any) -> Any:
        outcome = self._attempt(lambda: self._talker.load(request.path))
        response.success, response.message, response.tokens = outcome
        return response

    def _attempt(self, work: Any) -> tuple[bool, str, int]:
        try:
            return True, "", work() or 0
        except Refused as problem:
            return False, f"the node {problem}", 0
        except EdgeError as problem:
            return False, str(problem), 0
        except Exception as problem:
            self.report(traceback.format_exc())
            return False, f"{type(problem).__name__}: {problem}", 0

    # -- diagnostics -----------------------------------------------------------------------------

    def _diagnose(self) -> None:
        try:
            self._publish_health()
        except Exception:
            if rclpy.ok():  # otherwise the context is shutting down
                self.report(traceback.format_exc(), throttle_duration_sec=60.0)

    def _publish_health(self) -> None:
        level, message, values = self._talker.health()
        status = DiagnosticStatus()
        status.name = f"{self.get_name()}: language model"
        status.hardware_id = values["engine"]
        status.level, status.message = _LEVELS[level], message
        for name, value in values.items():
            pair = KeyValue()
            pair.key, pair.value = name, value
            status.values.append(pair)
        array = DiagnosticArray()
        array.header.stamp = self.get_clock().now().to_msg()
        array.status.append(status)
        self._diagnostics.publish(array)

    def report(self, text: str, level: str = "error", **options: Any) -> None:
        """Log text, which may hold names and messages from untrusted files and requests."""
        getattr(self.get_logger(), level)(harmless(text), **options)

    def close(self) -> None:
        """Shut the talker down, before the process ends."""
        self._talker.shutdown()


def spin(executor: MultiThreadedExecutor, node: ChatNode) -> None:
    """Spin until the context ends, and survive RCLErrors.

    Up to Jazzy, the lifecycle's own service raises one for a transition that the state does not
    have, which would end the process.
    """
    while rclpy.ok():
        try:
            executor.spin()
        except RuntimeError as problem:
            node.report(f"a request failed, but the node continues: {problem}")
            time.sleep(_POLL_S)  # no busy loop, should the executor itself fail


def main() -> None:
    rclpy.init()
    node = ChatNode()
    executor = MultiThreadedExecutor(_THREADS)
    executor.add_node(node)
    try:
        spin(executor, node)
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    finally:
        node.close()  # ends the running goal and its callback
        executor.shutdown(_SHUTDOWN_S)  # no callback may use the node while it is destroyed
        node.destroy_node()
        rclpy.try_shutdown()
