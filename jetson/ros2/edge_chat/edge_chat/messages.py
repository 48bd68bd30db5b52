"""Between ROS messages and the talker's own types. Knows the messages' fields, not rclpy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from edge_chat.talker import Outcome, Request


def request_of(goal: Any) -> Request:
    """A `Generate` goal: what is 0 or negative there is left to the settings."""
    return Request(
        prompt=goal.prompt,
        chat=goal.chat,
        keep=goal.keep,
        max_tokens=goal.max_tokens if goal.max_tokens > 0 else None,
        temperature=goal.temperature if goal.temperature >= 0 else None,
        seed=goal.seed if goal.seed >= 0 else None,
        deadline_s=goal.deadline_s if goal.deadline_s >= 0 else None,
        stop=tuple(goal.stop),
    )


def fill_result(result: Any, outcome: Outcome) -> Any:
    """A `Generate` result with the outcome's fields, which have its names."""
    for each in fields(outcome):
        setattr(result, each.name, getattr(outcome, each.name))
    return result
